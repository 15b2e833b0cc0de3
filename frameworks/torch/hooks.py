"""Where autograd calls us: after a gradient was accumulated, and at the end of the outermost backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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
        gate: of all its hooks.
        touched: a byte a parameter that hooks set; see `Record`.
    """

    gate: Gate
    touched: bytearray

    def begin(self) -> bool:
        """The first gradient of a backward; whether it is to be averaged."""

    def unexpected(self, slot: Slot) -> None:
        """A gradient was accumulated more often than expected, or is in no bucket."""

    def ready(self, slot: Slot) -> None:
        """The last accumulation that this parameter's gradient is expected to get."""


class Gate:
    """Where a model's hooks look first: closed while no round is open, or a `no_sync` block is.

    Torch's engine refers to hooks where Python's garbage collector can't see it: what a hook refers to lives
    as long as its parameter. So it refers to this, and only an open gate refers to the model's slots, which
    lead back to parameters; `lifetime.keep` lets the parameters own them.

    Attributes:
        slots: of all parameters, while it is open.
        listener: a weak reference.
    """

    __slots__ = ("listener", "slots")

    def __init__(self, listener: Listener) -> None:
        self.listener = weakref.ref(listener)
        self.slots: Sequence[Slot] | None = None


def register(slot: Slot, listener: Listener) -> Any:
    """Register the post-accumulate hook of one parameter; returns the handle that removes it."""
    parameter, slot.listener = slot.parameter, listener
    accumulated = _make_hook(slot.index, slot.name, listener.touched, listener.gate)
    if parameter.requires_grad:
        return parameter.register_post_accumulate_grad_hook(accumulated)
    # Torch refuses hooks on frozen parameters, but keeps them when one is frozen: so thaw it for a moment.
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(accumulated)
    finally:
        parameter.requires_grad_(False)


def _make_hook(index: int, name: str, touched: bytearray, gate: Gate) -> Callable[[torch.Tensor], None]:
    def accumulated(_: torch.Tensor) -> None:
        touched[index] = 1
        slots = gate.slots
        if slots is None:
            listener = gate.listener()
            if listener is None:
                raise _gone(name)
            if not listener.begin():
                return
            slots = gate.slots
            assert slots is not None  # `begin` has opened it
        slot = slots[index]
        slot.left = left = slot.left - 1
        if left == 0:
            slot.listener.ready(slot)
        elif left < 0:
            slot.listener.unexpected(slot)

    return accumulated


def _gone(name: str) -> RuntimeError:
    return RuntimeError(
        f"the attached model of {name!r} was dropped before this backward, so that nothing averages its "
        "gradients: keep the model until its last backward is over, or call detach() of what overlap.attach "
        "returned"
    )


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
