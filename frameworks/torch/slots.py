"""A slot a parameter: where its gradient goes, and how far it has come in this round."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from overlap.comm.plan import BucketPlan
from overlap.comm.span import Buffer, Span

from .tensors import make_slice

# Smaller gradients wait until their bucket is complete, and are copied by one call.
_SMALL_BYTES = 64 * 1024
# References to a slice that only its slot holds, as getrefcount counts them: the attribute and its argument.
_OWN_REFERENCES = 2

UNPLANNED = -1


class Slot:
    """One parameter's gradient.

    Attributes:
        parameter, name, index: whose gradient.
        slice: its place in a bucket; None while it is in no bucket.
        expected: how often its gradient accumulates in one backward, as the last one showed; the last of them
            makes it ready. UNPLANNED while it is in no bucket.
        seen: how often it has accumulated in this round.
        waiting: its gradient, flat, until the bucket is complete.
    """

    __slots__ = (
        "_buffer",
        "_offset",
        "bucket",
        "expected",
        "flat",
        "index",
        "name",
        "parameter",
        "seen",
        "slice",
        "small",
        "waiting",
    )

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter) -> None:
        self.index, self.name, self.parameter = index, name, parameter
        self.bucket = 0
        self.slice: torch.Tensor | None = None
        self.expected, self.seen = UNPLANNED, 0
        self.small = self.flat = False
        self.waiting: torch.Tensor | None = None
        self._buffer: Buffer | None = None
        self._offset = 0

    def place(self, bucket: int, buffer: Buffer, offset: int) -> None:
        """Give it a place in a bucket."""
        parameter = self.parameter
        self.bucket, self._buffer, self._offset = bucket, buffer, offset
        self.slice = make_slice(buffer, offset, parameter)
        self.small = parameter.is_contiguous() and parameter.numel() * parameter.element_size() < _SMALL_BYTES
        self.flat = parameter.dim() == 1
        self.expected = max(1, self.seen)

    def fill(self) -> None:
        """Bring what `parameter.grad` holds into the slice (zeros where it holds nothing), and take it away.

        While the bucket is in flight `grad` is None, so that a late accumulation gets a tensor of its own and
        never meets the engine's bytes.
        """
        parameter, slice = self.parameter, self.slice
        assert slice is not None
        grad = parameter.grad
        if grad is not slice:
            if sys.getrefcount(slice) > _OWN_REFERENCES + 1:
                slice = self._leave_to_user()
            if grad is None:
                slice.zero_()
            else:
                if grad.requires_grad:  # backward(create_graph=True): the slice must not join the graph
                    grad = grad.detach()
                if self.small and grad.is_contiguous():
                    self.waiting = grad if self.flat else grad.view(-1)
                else:
                    slice.copy_(grad)
        parameter.grad = None

    def _leave_to_user(self) -> torch.Tensor:
        """Somebody kept last round's gradient: that tensor gets memory of its own, the slice a new tensor."""
        assert self.slice is not None and self._buffer is not None
        with torch.no_grad():
            self.slice.set_(self.slice.clone())
        self.slice = make_slice(self._buffer, self._offset, self.parameter)
        return self.slice


class BucketSlots:
    """The slots of one bucket, and its memory."""

    def __init__(self, plan: BucketPlan, slots: Sequence[Slot], buffer: Buffer) -> None:
        self.slots = [slots[index] for index in plan.parameters]
        self._starts = dict(zip(plan.parameters, plan.starts, strict=True))
        self.span: Span = buffer.span(plan.dtype, plan.count, plan.offset)
        dtype = self.slots[0].parameter.dtype
        if plan.count:
            self._flat = torch.frombuffer(buffer.memory, dtype=dtype, count=plan.count, offset=plan.offset)
        else:
            self._flat = torch.empty(0, dtype=dtype)
        first = self.slots[0].name
        self.name = first if len(self.slots) == 1 else f"{first} and {len(self.slots) - 1} more"

    def gather(self) -> None:
        """Copy the gradients that wait into the bucket: all by one call where all wait."""
        waiting = [slot.waiting for slot in self.slots if slot.waiting is not None]
        if not waiting:
            return
        with torch.no_grad():
            if len(waiting) == len(self.slots):
                torch.cat(waiting, out=self._flat)
            else:
                places = [slot.slice.view(-1) for slot in self.slots if slot.waiting is not None]  # type: ignore[union-attr]
                torch._foreach_copy_(places, waiting)
        for slot in self.slots:
            slot.waiting = None

    def part(self, slot: Slot) -> Span:
        """One slot's elements of the bucket."""
        start = self._starts[slot.index]
        return Span.wrap(self.span.array[start : start + slot.parameter.numel()], self.span.dtype)
