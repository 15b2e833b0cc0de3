"""Where autograd calls us: after a gradient was accumulated, and at the end of the outermost backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from .slots import UNPLANNED, Slot

current_task: Callable[[], int] = torch._C._current_graph_task_id


class Listener(Protocol):
    """What hooks report to.

    Attributes:
        paused: above 0 in `no_sync`.
        task: the graph task whose hook reported last.
        touched, late: a byte a parameter that hooks set; see `Record`.
    """

    paused: int
    task: int
    touched: bytearray
    late: bytearray

    def begin(self, task: int) -> None:
        """A backward, or one nested in it, has made its first gradient."""

    def unplanned(self, slot: Slot) -> None:
        """A gradient was accumulated whose parameter is in no bucket."""

    def ready(self, slot: Slot) -> None:
        """The last accumulation that this parameter's gradient is expected to get."""

    def end(self) -> None:
        """The outermost backward is over."""

    def aborted(self) -> None:
        """Backward raised, and will never end."""


def register(slot: Slot, listener: Listener) -> Any:
    """Register the post-accumulate hook of one parameter; returns the handle that removes it."""
    parameter, index, touched = slot.parameter, slot.index, listener.touched

    def accumulated(_: torch.Tensor) -> None:
        touched[index] = 1
        if listener.paused:
            return
        task = current_task()
        if task != listener.task:
            listener.begin(task)
        slot.seen = seen = slot.seen + 1
        if seen == slot.expected:
            listener.ready(slot)
        elif slot.expected == UNPLANNED:
            listener.unplanned(slot)
        elif seen > slot.expected:
            listener.late[index] = 1

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
    node, once done, queues the call again on its own task. Autograd drops the callbacks of a task that raises,
    and nothing else refers to this object: that is how an aborted backward is noticed.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener | None = listener
        Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        if self._listener is None:
            return
        outer = torch._C._current_autograd_node()
        if outer is None:
            listener, self._listener = self._listener, None
            listener.end()
        else:
            outer.register_hook(lambda *_: Variable._execution_engine.queue_callback(self))

    def __del__(self) -> None:
        if self._listener is not None:
            self._listener.aborted()
