"""The errors a user can cause, each raised with what was given, what was expected and what to do.

A command line prints the message alone, in one line; a program can catch `MinivllmError`. All of
them are also `ValueError`s or `RuntimeError`s, so that code written for vLLM keeps working.
"""


class MinivllmError(Exception):
    """Base of every error that minivllm raises on purpose."""


class ConfigError(MinivllmError, ValueError):
    """A configuration value is impossible, or contradicts another one."""


class ModelError(MinivllmError, ValueError):
    """A model cannot be found, is damaged, or has an architecture that is not supported."""


class InvalidRequestError(MinivllmError, ValueError):
    """A prompt or its sampling parameters can not be served; other requests are not affected."""


class OutOfMemoryError(MinivllmError, RuntimeError):
    """The weights or the KV cache do not fit into the device's memory."""
