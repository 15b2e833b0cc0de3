"""Starts the ranks of a job on this host: `overlap run` (a command) and `overlap.run` (a function)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ranks import Ranks as Ranks
    from .ranks import run as run

__all__ = ["Ranks", "run"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command `overlap run` needs neither of them, nor cloudpickle.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import ranks

    return getattr(ranks, name)
