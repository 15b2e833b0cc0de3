"""Where autograd calls us: after a gradient was accumulated, and at the end of the outermost backward."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd import Variable

from .slots import Slot


class BackwardListener(Protocol):
    """What the end of a backward is reported to."""

    def end(self) -> None:
        """The outermost backward is over."""

    def aborted(self) -> None:
        """Backward raised, and will never end."""


class Listener(BackwardListener, Protocol):
    """What hooks report to.

    Attributes:
        idle: no round is open, or a `no_sync` block is.
        touched: a byte a parameter that hooks set; see `Record`.
    """

    idle: bool
    touched: bytearray

    def begin(self) -> bool:
        """The first gradient of a backward; whether it is to be averaged."""

    def unexpected(self, slot: Slot) -> None:
        """A gradient was accumulated more often than expected, or is in no bucket."""

    def ready(self, slot: Slot) -> None:
        """The last accumulation that this parameter's gradient is expected to get."""


def register(slot: Slot, listener: Listener) -> Any:
    """Register the post-accumulate hook of one parameter; returns the handle that removes it."""
    parameter, index, touched = slot.parameter, slot.index, listener.touched

    def accumulated(_: torch.Tensor) -> None:
        touched[index] = 1
        if listener.idle and not listener.begin():
            return
        slot.left = left = slot.left - 1
        if left == 0:
            listener.ready(slot)
        elif left < 0:
            listener.unexpected(slot)

    if parameter.requires_grad:
        return parameter.register_post_accumulate_grad_hook(accumulated)
    # Torch refuses hooks on frozen parameters, but keeps them when one is frozen: so thaw it for a moment.
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(accumulated)
    finally:
        parameter.requires_grad_(False)


class EndOfBackward:
    """Calls `listener.end` once, when the outermost backward ends.

    In the backward of a reentrant checkpoint the running graph task is a nested one: when it ends, the outer
    node, once done, queues the call again on its own task. Autograd drops the callbacks of a task that
    raises, and nothing else refers to this object: that is how an aborted backward is noticed.
    """

    def __init__(self, listener: BackwardListener) -> None:
        self._listener: BackwardListener | None = listener
        Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        if self._listener is None:
            return
        outer: Any = torch._C._current_autograd_node()
        if outer is None:
            listener, self._listener = self._listener, None
            listener.end()
        else:
            outer.register_hook(lambda *_: Variable._execution_engine.queue_callback(self))

    def __del__(self) -> None:
        if self._listener is not None:
            self._listener.aborted()
