"""``mantissa.Watch`` as a callback of other libraries' trainers, one module for each library."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("lightning", "transformers"):  # each imports its library
        return import_module(f"mantissa.callbacks.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
