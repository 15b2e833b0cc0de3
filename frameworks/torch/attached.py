"""An attached model: runs a round of averaging with every backward.

A round: hooks fill slices, full buckets leave in plan order while backward goes on; at its end what did not
come is filled in, ranks exchange their records, and when all is reduced every `grad` is its slice.

The first backward has no plan yet: it teaches the order, and everything is sent at its end. Parameters that
join later (unfrozen, or used for the first time) join the plan in the same way.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from overlap.comm.backends.base import Communicator
from overlap.comm.bucket import Buckets, State
from overlap.comm.dtype import Op
from overlap.comm.engine import Engine
from overlap.comm.handle import Handle
from overlap.comm.plan import Parameter, Plan, make_plan
from overlap.comm.span import Span
from overlap.comm.stats import Recorder, Stats

from . import hooks
from .record import Record, check_records
from .slots import UNPLANNED, BucketSlots, Slot
from .tensors import bytes_of, dtype_of

# The bucket number in the tags of what is no bucket.
_NO_BUCKET = 0xFFFF


class Attached:
    """What `overlap.attach` returns; the model itself is unchanged.

    Args:
        engine: of this process.
        named: the parameters, by name, each once.
        bucket_bytes, edge_bytes: see `make_plan`.
    """

    def __init__(
        self,
        engine: Engine,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        bucket_bytes: int,
        edge_bytes: int,
    ) -> None:
        self.idle = True
        self.touched, self._late = bytearray(len(named)), bytearray(len(named))
        self._engine = engine
        self._limits = (bucket_bytes, edge_bytes)
        self._parameters = [Parameter(name, p.numel(), dtype_of(name, p)) for name, p in named]
        self._slots = [Slot(index, name, p) for index, (name, p) in enumerate(named)]
        self._tensors = [p for _, p in named]
        self._buckets: list[BucketSlots] = []
        self._filling = Buckets([])
        self._digest = 0
        self._round = 0
        # A forked child (a data-loader worker) has hooks but no engine thread: its backwards are local.
        self._process = os.getpid()
        self._paused = 0  # depth of no_sync blocks
        self._open = False  # a backward has made gradients, and its end has not come
        self._order: list[int] = []  # in which gradients came that are in no bucket
        self._flying: list[Handle[None]] = []
        self._recorder = Recorder()
        self.detached = False
        self._channel = engine.open_channel("gradients") if engine.world.size > 1 else None
        self._hooks = [hooks.register(slot, self) for slot in self._slots] if self._channel else []

    # -- what users call ---------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate locally and send nothing; the next one outside averages the sum."""
        self._paused += 1
        self._set_idle()
        try:
            yield
        finally:
            self._paused -= 1
            self._set_idle()

    def stats(self) -> Stats:
        """What rounds have cost so far; zeros in a world of one, which sends nothing."""
        return self._recorder.stats()

    def detach(self) -> None:
        """Remove the hooks: backwards are local from now on. Gradients stay as they are. Idempotent."""
        self.detached = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._channel is not None:
            self._engine.close_channel(self._channel)
            self._channel = None
        self._buckets = []
        for slot in self._slots:
            slot.slice = None

    # -- what hooks call ---------------------------------------------------------------------------------

    def begin(self) -> bool:
        if self._paused or os.getpid() != self._process:
            return False
        self._settle()  # an aborted round may still be in flight
        hooks.EndOfBackward(self)
        self._open = True
        self._set_idle()
        self._round += 1
        return True

    def unexpected(self, slot: Slot) -> None:
        if slot.expected == UNPLANNED:
            self._order.append(slot.index)
        elif not slot.small or self._filling.states[slot.bucket] is State.IN_FLIGHT:
            # Its part of the bucket is filled: what came since is in a tensor of its own, under `grad`.
            self._late[slot.index] = 1

    def ready(self, slot: Slot) -> None:
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
            check_records(records, self._slots)
            touched = np.any([record.touched for record in records], axis=0)
            self._average_late(np.any([record.late for record in records], axis=0))
            sent += self._join(touched)
            self._deliver(touched)
            self._recorder.add(sent, ended_s, time.perf_counter())
        finally:
            self._reset()

    def aborted(self) -> None:
        """Peers wait for this round's buckets: send what there is, and a record that says it is void."""
        if self._open and self._channel is not None:
            self._close()
            self._fill_rest()
            self._flying.append(self._exchange(aborted=True))
            self._reset()

    def _close(self) -> None:
        self._open = False
        self._set_idle()

    def _set_idle(self) -> None:
        self.idle = self._paused > 0 or not self._open

    # -- a round -----------------------------------------------------------------------------------------

    def _submit(
        self, work: Callable[[Communicator], Any], doing: str, bucket: int = _NO_BUCKET
    ) -> Handle[Any]:
        assert self._channel is not None  # hooks are removed before the channel closes
        return self._channel.submit(work, doing, self._round << 16 | bucket)

    def _send(self, bucket: int) -> None:
        slots = self._buckets[bucket]
        slots.gather()
        work = partial(_average, slots.span)
        self._flying.append(self._submit(work, f"allreduce of bucket {bucket} ({slots.name})", bucket))

    def _fill_rest(self) -> None:
        """Fill in what did not come, so that every bucket leaves."""
        kept = []
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.left > 0:
                    if not self.touched[slot.index]:
                        kept.append((slot.parameter, slot.parameter.grad))
                    self.ready(slot)
        # They contribute what their `grad` holds, and keep it should no other rank have touched them.
        for parameter, grad in kept:
            parameter.grad = grad

    def _exchange(self, aborted: bool) -> Handle[Any]:
        trainable = bytes([parameter.requires_grad for parameter in self._tensors])
        flags = (np.frombuffer(bytes(each), bool) for each in (self.touched, self._late, trainable))
        return self._submit(Record(self._digest, aborted, *flags).exchange, "the end of a backward")

    def _settle(self) -> list[Handle[None]]:
        """Wait for all that is in flight; then slices hold averages."""
        flying, self._flying = self._flying, []
        for handle in flying:
            handle.wait()
        self._filling.reduced()
        return flying

    def _average_late(self, late: np.ndarray) -> None:
        """Average what accumulated after its bucket had left, and add it: the average of all is their sum."""
        for slot in (self._slots[index] for index in np.flatnonzero(late)):
            assert slot.slice is not None
            rest = torch.zeros(slot.slice.shape, dtype=slot.slice.dtype)
            if self._late[slot.index] and slot.parameter.grad is not None:
                rest.copy_(slot.parameter.grad.detach())
            dtype = self._parameters[slot.index].dtype
            span = Span.wrap(bytes_of(rest).view(dtype.storage), dtype)
            self._submit(partial(_average, span), f"allreduce of what came late of {slot.name}").wait()
            slot.slice.add_(rest)

    def _deliver(self, touched: np.ndarray) -> None:
        """Every gradient that some rank has touched is its slice now; the others keep what they held."""
        if touched.all():  # as in most models, always
            for slot in self._slots:
                slot.parameter.grad = slot.slice
            return
        for index in np.flatnonzero(touched):
            slot = self._slots[index]
            slot.parameter.grad = slot.slice

    def _reset(self) -> None:
        """Ready for the next round, whatever became of this one."""
        for slot in self._slots:
            if slot.left != slot.expected:
                slot.end_round()
        self.touched[:] = self._late[:] = bytes(len(self._slots))
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
        planned = [slot for bucket in self._buckets for slot in bucket.slots]
        for slot in planned:
            if touched[slot.index]:
                slot.parameter.grad = slot.slice
        held = [slot for slot in planned if slot.parameter.grad is not None]
        order = self._agree_on_order(new)
        self._lay_out(make_plan(self._parameters, [slot.index for slot in planned] + order, *self._limits))
        for number in range(len(self._buckets)):
            self._average_new(number, set(order))
        for slot in held:
            slot.parameter.grad = slot.slice
        return self._settle()

    def _agree_on_order(self, new: Sequence[int]) -> list[int]:
        """Rank 0's order of `new`; what it did not see comes last, from the model's end to its start."""
        last = {index: place for place, index in enumerate(self._order)}
        mine = sorted(new, key=lambda index: (last.get(index, len(self._order)), -index))
        order = np.array(mine, np.int64)
        self._submit(
            lambda communicator: communicator.broadcast(Span.wrap(order), 0), "the bucket plan"
        ).wait()
        agreed: list[int] = order.tolist()
        return agreed

    def _lay_out(self, plan: Plan) -> None:
        """Allocate a plan's buckets and move gradients into their new slices."""
        buffer = self._submit(
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
        _give_back_freed_memory()

    def _average_new(self, number: int, new: set[int]) -> None:
        bucket = self._buckets[number]
        slots = [slot for slot in bucket.slots if slot.index in new]
        whole = len(slots) == len(bucket.slots)
        spans = [(bucket.span, bucket.name)] if whole else [(bucket.part(slot), slot.name) for slot in slots]
        for span, name in spans:
            self._flying.append(self._submit(partial(_average, span), f"allreduce of {name}"))


_libc = ctypes.CDLL(None)


def _give_back_freed_memory() -> None:
    """Return what gradients occupied before they moved into slices; glibc would keep it, as large again."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _average(span: Span, communicator: Communicator) -> None:
    communicator.allreduce(span, Op.AVERAGE)
