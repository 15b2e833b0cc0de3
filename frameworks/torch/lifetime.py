"""Lets parameters own what averages them, so that it lives as long as they do and goes with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class _Namespace(dict[str, Any]):
    """A parameter's `__dict__`, with an owner that is seen by the garbage collector and by nobody else.

    An attribute of the parameter would be copied and pickled with it, and hooks are where the collector does
    not look.
    """

    __slots__ = ("owner",)
    owner: object

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain."""
        return dict, (dict(self),)


def keep(owner: object, parameters: Iterable[torch.Tensor]) -> None:
    """Keep `owner` as long as any of `parameters` lives, or until `let_go`."""
    for parameter in parameters:
        namespace = _Namespace(parameter.__dict__)
        namespace.owner = owner
        parameter.__dict__ = namespace


def owner_of(parameter: torch.Tensor) -> object | None:
    """What `keep` was called with, if it was."""
    namespace = parameter.__dict__
    return namespace.owner if isinstance(namespace, _Namespace) else None


def let_go(parameters: Iterable[torch.Tensor]) -> None:
    """Undo `keep`."""
    for parameter in parameters:
        parameter.__dict__ = dict(parameter.__dict__)
