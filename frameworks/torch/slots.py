"""A slot a parameter: where its gradient goes, and how far it has come in this round."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

import torch

from overlap.comm.plan import BucketPlan
from overlap.comm.span import Buffer, Span

from .tensors import make_slice, no_rows

# Smaller gradients stay in `grad` until their bucket is complete, and are copied by one call.
_SMALL_BYTES = 64 * 1024
# How many are copied at once. Fewer than make Python's garbage collector run (700 objects): it costs 20 %.
_RUN = 256
# References to a slice that nobody else holds, where getrefcount is given a local variable or an element of a
# list: the slot's, that one's, and the argument's.
_OWN_REFERENCES = 3

UNPLANNED = -1

_address_of: Any = torch.Tensor.data_ptr


class Slot:
    """One parameter's gradient.

    Attributes:
        parameter, name, index: whose gradient.
        slice: its place in a bucket; None while it is in no bucket.
        address: of the slice's memory.
        expected: how often its gradient accumulates in one backward, as the last one showed; the last of them
            makes it ready. UNPLANNED while it is in no bucket.
        left: how many of them are to come in this round; below zero it came more often.
        small: it is copied with the rest of its bucket.
        dtype: what it is averaged in: the parameter's own, unless gradients are compressed.
        sparse: some rank's gradient was sparse when it came for the first time.
        listener: what its hook reports to.
    """

    __slots__ = (
        "_buffer",
        "_offset",
        "address",
        "bucket",
        "dtype",
        "expected",
        "index",
        "left",
        "listener",
        "name",
        "parameter",
        "slice",
        "small",
        "sparse",
    )

    def __init__(
        self, index: int, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype | None = None
    ) -> None:
        self.index, self.name, self.parameter = index, name, parameter
        compressed = dtype is not None and parameter.is_floating_point()
        self.dtype: torch.dtype = dtype if dtype is not None and compressed else parameter.dtype
        self.sparse = False
        self.listener: Any = None
        self.bucket = 0
        self.slice: torch.Tensor | None = None
        self.address = 0
        self.expected = self.left = UNPLANNED
        self.small = False
        self._buffer: Buffer | None = None
        self._offset = 0

    def place(self, bucket: int, buffer: Buffer, offset: int) -> None:
        """Give it a place in a bucket."""
        parameter = self.parameter
        self.bucket, self._buffer, self._offset = bucket, buffer, offset
        self.slice = make_slice(buffer, offset, parameter, self.dtype)
        self.address = self.slice.data_ptr()
        self.small = parameter.is_contiguous() and parameter.numel() * parameter.element_size() < _SMALL_BYTES
        if self.expected == UNPLANNED:  # and `left` has counted down from it
            self.expected, self.left = max(1, UNPLANNED - self.left), 0

    def release(self) -> None:
        """Let go of the bucket's memory; a gradient that is still used keeps it alive."""
        self.slice = self._buffer = None

    def fill(self) -> None:
        """Bring what `parameter.grad` holds into the slice (zeros where it holds nothing), and take it away.

        While the bucket is in flight `grad` is None, so that a late accumulation gets a tensor of its own and
        never meets the engine's bytes.
        """
        parameter, slice = self.parameter, self.slice
        assert slice is not None
        grad = parameter.grad
        if slice.data_ptr() != self.address:
            slice = self._make_slice()  # somebody gave it other memory: `grad.data = ...`, `model.half()`
        if grad is not slice:
            if sys.getrefcount(slice) > _OWN_REFERENCES:
                slice = self._leave_to_user()
            with torch.no_grad():  # backward(create_graph=True): the slice must not join the graph
                if grad is None:
                    slice.zero_()
                else:
                    slice.copy_(grad if grad.layout is torch.strided else grad.to_dense())
        parameter.grad = None

    def _leave_to_user(self) -> torch.Tensor:
        """Somebody kept last round's gradient: that tensor gets memory of its own, the slice a new tensor."""
        assert self.slice is not None
        with torch.no_grad():
            self.slice.set_(self.slice.clone())  # type: ignore[call-overload]  # missing in torch's stubs
        return self._make_slice()

    def _make_slice(self) -> torch.Tensor:
        assert self._buffer is not None
        self.slice = make_slice(self._buffer, self._offset, self.parameter, self.dtype)
        return self.slice

    def deliver(self) -> None:
        """Let `grad` be what the slice holds, in the parameter's own type and the gradient's layout."""
        assert self.slice is not None
        grad = self.slice if self.dtype == self.parameter.dtype else self.slice.to(self.parameter.dtype)
        self.parameter.grad = grad.to_sparse(1).coalesce() if self.sparse else grad

    def fill_with_zeros(self) -> None:
        """Let `grad` be zeros: no rows where it is sparse."""
        like = self.parameter.detach()
        if self.sparse:
            self.parameter.grad = no_rows(like, 1)
        else:
            self.parameter.grad = torch.zeros_like(like)

    def end_round(self) -> None:
        """Expect as many accumulations as came in this round, if any did."""
        if self.expected != UNPLANNED:
            self.expected -= self.left
        self.left = self.expected


class BucketSlots:
    """The slots of one bucket, and its memory."""

    def __init__(self, plan: BucketPlan, slots: Sequence[Slot], buffer: Buffer) -> None:
        self.slots = [slots[index] for index in plan.parameters]
        self._starts = dict(zip(plan.parameters, plan.starts, strict=True))
        self.span: Span = buffer.span(plan.dtype, plan.count, plan.offset)
        self._runs = [
            _Run(run, buffer, plan.offset + self._starts[run[0].index] * plan.dtype.itemsize)
            for run in _runs_of_small(self.slots)
        ]
        first = self.slots[0].name
        self.name = first if len(self.slots) == 1 else f"{first} and {len(self.slots) - 1} more"

    def gather(self) -> None:
        """Bring the small gradients into the bucket."""
        for run in self._runs:
            run.gather()

    def part(self, slot: Slot) -> Span:
        """One slot's elements of the bucket."""
        start = self._starts[slot.index]
        return Span.wrap(self.span.array[start : start + slot.parameter.numel()], self.span.dtype)


def _runs_of_small(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Small slots that are neighbours in a bucket, up to `_RUN` of them at a time."""
    for small, neighbours in groupby(slots, attrgetter("small")):
        while small and (run := list(islice(neighbours, _RUN))):
            yield run


class _Run:
    """Neighbours in a bucket whose gradients are copied by one call."""

    def __init__(self, slots: Sequence[Slot], buffer: Buffer, offset: int) -> None:
        self._slots = slots
        self._parameters = [slot.parameter for slot in slots]
        self._addresses = [slot.address for slot in slots]
        self._only_vectors = all(parameter.dim() == 1 for parameter in self._parameters)
        count = sum(parameter.numel() for parameter in self._parameters)
        dtype = slots[0].dtype
        if count:
            self._flat = torch.frombuffer(buffer.memory, dtype=dtype, count=count, offset=offset)
        else:
            self._flat = torch.empty(0, dtype=dtype)

    def gather(self) -> None:
        grads = [parameter.grad for parameter in self._parameters]
        slices = [slot.slice for slot in self._slots]
        # A gradient that is its slice already counts here too: `grads` holds it.
        kept = max(map(sys.getrefcount, slices)) > _OWN_REFERENCES
        moved = list(map(_address_of, slices)) != self._addresses
        if kept or moved or not self._copy(grads):
            for slot in self._slots:
                slot.fill()
            return
        for parameter in self._parameters:
            parameter.grad = None

    def _copy(self, grads: list[Any]) -> bool:
        """Whether it could be done at once."""
        try:
            with torch.no_grad():
                flat = grads if self._only_vectors else [grad.view(-1) for grad in grads]
                torch.cat(flat, out=self._flat)
        except (AttributeError, TypeError, RuntimeError):
            # One is None, or was set by the user with strides that can't be flattened.
            return False
        return True
