"""Compiling a model in pieces: traced once, split at attention, each distinct piece compiled once."""
