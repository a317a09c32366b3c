"""Importing bitsandbytes, which peft imports too, without torch's compiler.

bitsandbytes calls `torch.compile` for functions of its optimizers when it is imported. That compiles nothing yet, but
imports the compiler, which takes a second of CPU time in every process. Here `torch.compile` is called when such a
function is called for the first time.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from typing import Any

import torch


def import_bitsandbytes() -> None:
    """Import bitsandbytes if it is installed and not imported yet; call it before the first import of peft."""
    if "bitsandbytes" not in sys.modules:
        with compiling_at_first_call(), suppress(ImportError):
            importlib.import_module("bitsandbytes")


@contextmanager
def compiling_at_first_call() -> Iterator[None]:
    """Let `torch.compile` return functions that it compiles when they are first called."""
    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return partial(compile_later, **options)
        compiled = cache(lambda: compile_now(function, **options))

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return compiled()(*arguments, **named)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now
