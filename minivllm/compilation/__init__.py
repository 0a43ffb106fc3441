"""Compiling a model in pieces: traced once, split at attention, distinct pieces compiled once."""
