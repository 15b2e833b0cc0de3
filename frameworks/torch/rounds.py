"""Rounds of averaging: one with every backward outside of `no_sync`.

Hooks fill slices, full buckets leave in plan order while backward goes on; at its end what did not come is
filled in, ranks exchange their records, and when all is reduced every `grad` is its slice.

The first backward has no plan yet: it teaches the order, and everything is sent at its end. Parameters that
join later (unfrozen, or used for the first time) join the plan in the same way.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from overlap.comm.backends.base import Communicator
from overlap.comm.bucket import Buckets, State
from overlap.comm.dtype import Op
from overlap.comm.engine import Channel
from overlap.comm.errors import BackwardAborted
from overlap.comm.handle import Handle
from overlap.comm.plan import Parameter, Plan, make_plan
from overlap.comm.span import Span
from overlap.comm.stats import Recorder
from overlap.comm.warn import warn

from . import hooks
from .record import Record, check_records
from .slots import UNPLANNED, BucketSlots, Slot
from .sparse import average_sparse
from .tensors import dtype_of, span_of
from .turn import Next, Turn, check_weights, divisor_of
from .weights import Weights

# The bucket number in the tags of what is no bucket.
_NO_BUCKET = 0xFFFF
_DOING = {Next.ROUND: "the start of a backward", Next.STEP: "optimizer.step()", Next.JOIN: "join"}


@dataclass(frozen=True)
class Options:
    """How gradients are averaged; the same on all ranks.

    Attributes:
        limits: bucket_bytes and edge_bytes of `make_plan`.
        passes: how many backwards an average is of: all but the last of them are local.
        op: what is done instead of averaging. Sparse gradients are averaged or, with any other, summed.
        wire: what floating-point gradients are sent as; None is as they are.
        densify: sparse gradients are in buckets too.
        once: a parameter is averaged once between two steps; again is an error.
    """

    limits: tuple[int, int]
    passes: int = 1
    op: Op = Op.AVERAGE
    wire: torch.dtype | None = None
    densify: bool = False
    once: bool = False


# They can't be corrected by what comes after a bucket has left.
_NOT_LINEAR = (Op.MIN, Op.MAX, Op.PRODUCT)


class Rounds:
    """The rounds of one attached model, or one distributed optimizer; listens to its hooks.

    Args:
        channel: of this model alone.
        named: all parameters by name.

    Attributes:
        passes: see `Options`.
        averaged: a flag a parameter: it was averaged since the last step; only counted with `Options.once`.
        weights: of the backwards.
        recorder: what rounds have cost.
    """

    def __init__(
        self,
        channel: Channel,
        named: Mapping[str, torch.nn.Parameter],
        options: Options,
    ) -> None:
        slots = [Slot(index, name, p, options.wire) for index, (name, p) in enumerate(named.items())]
        self.gate = hooks.Gate(self)
        self.touched, self._late = bytearray(len(slots)), bytearray(len(slots))
        self.weights = Weights(slots, lambda slot: not self.touched[slot.index])
        self.recorder = Recorder()
        self._channel = channel
        self._options = options
        # Whether a gradient is its slice, or is made from it.
        self._as_is = options.wire is None and not options.densify
        self._held = options.op in _NOT_LINEAR
        self._slots = slots
        self._parameters = [
            Parameter(s.name, s.parameter.numel(), dtype_of(s.name, s.parameter, s.dtype)) for s in slots
        ]
        self._unplanned = list(slots)  # in no bucket
        self.averaged = np.zeros(len(slots), bool)
        self._buckets: list[BucketSlots] = []
        self._filling = Buckets([])
        self._digest = 0
        self._round = 0
        # A forked child (a data-loader worker) has hooks but no engine thread: its backwards are local.
        self._process = os.getpid()
        self._paused = 0  # depth of no_sync blocks
        self._warned = False
        self._open = False  # a backward has made gradients, and its end has not come
        self._order: list[int] = []  # in which gradients came that are in no bucket
        self._flying: list[Handle[None]] = []
        self._opening: Handle[list[Turn]] | None = None  # of the open round, where a backward opened it
        self._divisor: float | None = None  # of the round's average; the engine's thread sets and reads it
        self.passes, self._local_passes = options.passes, 0
        self._local_open = False  # a local backward has made gradients
        self._hooks = [hooks.register(slot, self) for slot in slots]

    # -- what an attached model calls ---------------------------------------------------------------------

    def pause(self, depth: int) -> None:
        """Add `depth` to that of the `no_sync` blocks."""
        self._paused += depth
        self._set_gate()

    def can_step(self) -> bool:
        """Whether this is the rank's own process, outside of a backward."""
        return os.getpid() == self._process and not self._open

    def follow(self, what: Next, loss: float | None = None, steps: int = 0) -> list[Turn]:
        """Say what this rank does next, and run empty rounds until no rank is in a backward."""
        while True:
            turns = self.take_turn(what, loss, steps).wait()
            if all(turn.what is not Next.ROUND for turn in turns):
                return turns
            self.run_empty()

    def join(self, steps: int) -> list[Turn]:
        """Take part in the others' rounds and steps, with nothing, until all ranks have joined."""
        while True:
            for slot in self._slots:
                slot.parameter.grad = None
            self.weights.end_round()
            self.begin_step()
            try:
                turns = self.follow(Next.JOIN, None, steps)
            except BackwardAborted:  # that rank's own affair; it may go on
                continue
            if all(turn.what is Next.JOIN for turn in turns):
                return turns

    def run_own(self) -> None:
        """Average what has accumulated locally, outside of a backward."""
        self._settle()
        self._opening = self.take_turn(Next.ROUND)
        self.run_empty()

    def begin_step(self) -> None:
        """A step follows: what comes then may be averaged again."""
        self.averaged[:] = False
        self._local_passes = 0

    def forget(self) -> None:
        """What has accumulated is of no use any more."""
        self.begin_step()
        self.touched[:] = bytes(len(self._slots))

    def fill_with_zeros(self) -> None:
        """Every trainable parameter has a gradient: where it has none, zeros."""
        for slot in self._slots:
            if slot.parameter.grad is None and slot.parameter.requires_grad:
                slot.fill_with_zeros()

    def run_empty(self) -> None:
        """Take part in a round that other ranks run; its opening was this rank's last turn."""
        self._open_round()
        self.end()

    def never_averaged(self) -> str | None:
        """The name of a parameter whose gradient has accumulated locally since the last round."""
        return self._slots[self.touched.index(1)].name if 1 in self.touched else None

    def close(self) -> None:
        """Remove the hooks and let go of the buckets; gradients stay as they are."""
        self.weights.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets = [], []
        for slot in self._slots:
            slot.release()

    def take_turn(self, what: Next, loss: float | None = None, steps: int = 0) -> Handle[list[Turn]]:
        """Tell the others what this rank does next, and learn what they do."""
        turn = Turn(what, self.weights.told(), loss, steps, self.weights.last)

        def work(communicator: Communicator) -> list[Turn]:
            turns = turn.exchange(communicator)
            self._divisor = divisor_of(turns)
            return turns

        return self.submit(work, _DOING[what])

    def submit(
        self, work: Callable[[Communicator], Any], doing: str, bucket: int = _NO_BUCKET
    ) -> Handle[Any]:
        return self._channel.submit(work, doing, self._round << 16 | bucket)

    # -- what hooks call ---------------------------------------------------------------------------------

    def begin(self) -> bool:
        if os.getpid() != self._process:
            return False
        if self._paused or self._local_open or self._local_passes + 1 < self.passes:
            self._begin_local()
            return False
        if torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warn(
                "backward(create_graph=True): averaged gradients are no part of the graph. For a penalty on "
                "gradients take them from torch.autograd.grad(..., create_graph=True)"
            )
        self._settle()  # an aborted round may still be in flight
        hooks.EndOfBackward(self)
        self.weights.add()
        self._opening = self.take_turn(Next.ROUND)
        self._open_round()
        return True

    def _begin_local(self) -> None:
        """A backward that averages nothing: it counts once."""
        if not self._local_open and (self.weights.current is not None or self.passes > 1):
            self._local_open = True
            self.weights.add()
            hooks.EndOfBackward(_LocalBackward(self))

    def end_local(self) -> None:
        self._local_open = False
        if not self._paused:
            self._local_passes += 1

    def _open_round(self) -> None:
        self._open = True
        self._set_gate()
        self._round += 1

    def unexpected(self, slot: Slot) -> None:
        if slot.expected == UNPLANNED:
            self._order.append(slot.index)
        elif self._held:
            return
        elif not slot.small or self._filling.states[slot.bucket] is State.IN_FLIGHT:
            # Its part of the bucket is filled: what came since is in a tensor of its own, under `grad`.
            self._late[slot.index] = 1

    def ready(self, slot: Slot) -> None:
        if self._held and self._open:
            return  # `_fill_rest` comes back to it, when nothing can come late
        if not slot.small:
            slot.fill()
        for bucket in self._filling.filled(slot.bucket):
            self._send(bucket)

    def end(self) -> None:
        if not self._open:
            return
        ended_s = time.perf_counter()
        self._close()
        try:
            self._fill_rest()
            records = self._exchange(aborted=False).wait()
            sent = self._settle()
            if self._opening is not None:
                check_weights(self._opening.wait())
            check_records(records, self._slots)
            touched = np.any([record.touched for record in records], axis=0)
            if self._options.once:
                self._count(touched)
            for index in np.flatnonzero(np.any([record.sparse for record in records], axis=0)).tolist():
                self._slots[index].sparse = True
            self._average_late(np.any([record.late for record in records], axis=0))
            sent += self._average_sparse(touched)
            sent += self._join(touched)
            self._deliver(touched)
            self.weights.put_back()
            self.recorder.add(sent, ended_s, time.perf_counter())
        finally:
            self._reset()

    def aborted(self) -> None:
        """Peers wait for this round's buckets: send what there is, and a record that says it is void."""
        if self._open:
            self._close()
            self._fill_rest()
            self._flying.append(self._exchange(aborted=True))
            self._reset()

    # -- a round -----------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._open = False
        self._set_gate()

    def _set_gate(self) -> None:
        self.gate.slots = self._slots if self._open and not self._paused else None

    def _send(self, bucket: int) -> None:
        slots = self._buckets[bucket]
        slots.gather()
        work = partial(self._average, slots.span)
        self._flying.append(self.submit(work, f"allreduce of bucket {bucket} ({slots.name})", bucket))

    def _fill_rest(self) -> None:
        """Fill in what did not come, so that every bucket leaves."""
        kept = []
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.left > 0 or self._held:
                    if not self.touched[slot.index]:
                        kept.append((slot.parameter, slot.parameter.grad))
                        self.weights.set_aside(slot)
                    self.ready(slot)
        # They contribute what their `grad` holds, and keep it should no other rank have touched them.
        for parameter, grad in kept:
            parameter.grad = grad

    def _average(self, span: Span, communicator: Communicator) -> None:
        """On the engine's thread, after the round's opening."""
        op = self._options.op
        communicator.allreduce(span, op, self._divisor if op is Op.AVERAGE else None)

    def _exchange(self, aborted: bool) -> Handle[Any]:
        trainable = bytes([slot.parameter.requires_grad for slot in self._slots])
        flags = self.touched, self._late, trainable, self._find_sparse()
        arrays = (np.frombuffer(bytes(each), bool) for each in flags)
        record = Record(self._digest, aborted, *arrays)
        return self.submit(record.exchange, "the end of a backward")

    def _find_sparse(self) -> bytearray:
        sparse = bytearray(len(self._slots))
        for slot in self._unplanned:
            grad = slot.parameter.grad
            sparse[slot.index] = bool(self.touched[slot.index]) and grad is not None and grad.is_sparse
        return sparse

    def _count(self, touched: np.ndarray) -> None:
        again = np.flatnonzero(self.averaged & touched)
        if len(again):
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(): "
                f"that of {self._slots[again[0]].name!r} was averaged already. Increase "
                "backward_passes_per_step to accumulate gradients locally"
            )
        self.averaged |= touched

    def _settle(self) -> list[Handle[None]]:
        """Wait for all that is in flight; then slices hold averages."""
        flying, self._flying = self._flying, []
        for handle in flying:
            handle.wait()
        self._filling.reduced()
        return flying

    def _average_late(self, late: np.ndarray) -> None:
        """Average what accumulated after its bucket had left, and add it: the average of all is their sum."""
        for slot in (self._slots[index] for index in np.flatnonzero(late).tolist()):
            assert slot.slice is not None
            rest = torch.zeros(slot.slice.shape, dtype=slot.slice.dtype)
            if self._late[slot.index] and slot.parameter.grad is not None:
                rest.copy_(slot.parameter.grad.detach())
            span = span_of(rest, self._parameters[slot.index].dtype)
            self.submit(partial(self._average, span), f"allreduce of what came late of {slot.name}").wait()
            slot.slice.add_(rest)

    def _average_sparse(self, touched: np.ndarray) -> list[Handle[Any]]:
        """Average what is in no bucket, and take it from the rest of the round."""
        if self._options.densify:
            return []
        slots = [slot for slot in self._unplanned if slot.sparse and touched[slot.index]]
        for slot in slots:
            if not self.touched[slot.index]:
                self.weights.set_aside(slot)
        handles = [
            self.submit(partial(self._average_rows, slot.parameter), f"the sparse gradient of {slot.name}")
            for slot in slots
        ]
        for slot, handle in zip(slots, handles, strict=True):
            slot.parameter.grad = handle.wait()
            touched[slot.index] = False
        return handles

    def _average_rows(self, parameter: torch.nn.Parameter, communicator: Communicator) -> torch.Tensor:
        divisor = self._divisor if self._options.op is Op.AVERAGE else 1.0
        return average_sparse(communicator, parameter.grad, parameter, divisor)

    def _deliver(self, touched: np.ndarray) -> None:
        """Every gradient that some rank has touched is its slice now; the others keep what they held."""
        if touched.all():  # as in most models, always
            slots = self._slots
        else:
            slots = [self._slots[index] for index in np.flatnonzero(touched).tolist()]
        if self._as_is:
            for slot in slots:
                slot.parameter.grad = slot.slice
        else:
            for slot in slots:
                slot.deliver()

    def _reset(self) -> None:
        """Ready for the next round, whatever became of this one."""
        for slot in self._slots:
            if slot.left != slot.expected:
                slot.end_round()
        self.touched[:] = self._late[:] = bytes(len(self._slots))
        self.weights.end_round()
        self._local_passes = 0
        self._opening = None
        self._order.clear()
        self._filling.begin()

    # -- joining the plan --------------------------------------------------------------------------------

    def _join(self, touched: np.ndarray) -> list[Handle[None]]:
        """Parameters that some rank has touched and that are in no bucket: plan anew, and average them."""
        new = [
            index for index in np.flatnonzero(touched).tolist() if self._slots[index].expected == UNPLANNED
        ]
        if not new:
            return []
        for index in new:
            if not self.touched[index]:
                self.weights.set_aside(self._slots[index])
        planned = [slot for bucket in self._buckets for slot in bucket.slots]
        for slot in planned:
            if touched[slot.index]:
                slot.deliver()
        held = [slot for slot in planned if slot.parameter.grad is not None]
        order = self._agree_on_order(new)
        self._lay_out(
            make_plan(self._parameters, [slot.index for slot in planned] + order, *self._options.limits)
        )
        for number in range(len(self._buckets)):
            self._average_new(number, set(new))
        sent = self._settle()
        for slot in held:
            slot.deliver()
        return sent

    def _agree_on_order(self, new: Sequence[int]) -> list[int]:
        """Rank 0's order of `new`; what it did not see comes last, from the model's end to its start."""
        last = {index: place for place, index in enumerate(self._order)}
        mine = sorted(new, key=lambda index: (last.get(index, len(self._order)), -index))
        order = np.array(mine, np.int64)
        self.submit(
            lambda communicator: communicator.broadcast(Span.wrap(order), 0), "the bucket plan"
        ).wait()
        agreed: list[int] = order.tolist()
        return agreed

    def _lay_out(self, plan: Plan) -> None:
        """Allocate a plan's buckets and move gradients into their new slices."""
        buffer = self.submit(
            lambda communicator: communicator.allocate(plan.nbytes), "the bucket plan"
        ).wait()
        self._digest = plan.digest()
        self._filling = Buckets([len(bucket.parameters) for bucket in plan.buckets])
        self._buckets = []
        for number, bucket in enumerate(plan.buckets):
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                slot = self._slots[index]
                slot.place(number, buffer, bucket.offset + start * bucket.dtype.itemsize)
                if not slot.small:
                    slot.fill()
            self._buckets.append(BucketSlots(bucket, self._slots, buffer))
            self._buckets[-1].gather()
        self._unplanned = [slot for slot in self._slots if slot.expected == UNPLANNED]
        _give_back_freed_memory()

    def _average_new(self, number: int, new: set[int]) -> None:
        bucket = self._buckets[number]
        slots = [slot for slot in bucket.slots if slot.index in new]
        whole = len(slots) == len(bucket.slots)
        spans = [(bucket.span, bucket.name)] if whole else [(bucket.part(slot), slot.name) for slot in slots]
        for span, name in spans:
            self._flying.append(self.submit(partial(self._average, span), f"allreduce of {name}"))


_libc = ctypes.CDLL(None)


def _give_back_freed_memory() -> None:
    """Return what gradients occupied before they moved into slices; glibc would keep it, as large again."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class _LocalBackward:
    """Listens for the end of a local backward."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def end(self) -> None:
        self._rounds.end_local()

    aborted = end
