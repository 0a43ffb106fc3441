"""Runs test functions where Triton interprets kernels on the CPU, or where it compiles them.

Triton decides which of the two it does when a kernel is defined, from `TRITON_INTERPRET`, so one
process cannot do both, and a test must not depend on which test imported Triton first. Functions
with one of these decorators run in a process of their own, one for each way, started when first
needed; what they raise, the test raises. (This module must not import Triton itself.)
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Runs the test where kernels are interpreted: slowly, and exactly as they are written."""
    return _elsewhere(test, "1")


def compiled(test: Callable[..., None]) -> Callable[..., None]:
    """Runs the test where kernels are compiled, which takes no GPU."""
    return _elsewhere(test, "0")


def _elsewhere(test: Callable[..., None], interpret: str) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: object) -> None:
        _pool(interpret).submit(_call, test.__module__, test.__name__, arguments).result()

    return run


@functools.cache
def _pool(interpret: str) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_set_mode,
        initargs=(interpret,),
    )


def _set_mode(interpret: str) -> None:
    os.environ["TRITON_INTERPRET"] = interpret


def _call(module: str, name: str, arguments: dict[str, object]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
