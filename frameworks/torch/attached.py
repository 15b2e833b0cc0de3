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
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from overlap.comm.backends.base import Communicator
from overlap.comm.bucket import Buckets, State
from overlap.comm.dtype import Op
from overlap.comm.errors import BackwardAborted
from overlap.comm.engine import Channel, Engine
from overlap.comm.handle import Handle
from overlap.comm.plan import Parameter, Plan, make_plan
from overlap.comm.span import Span
from overlap.comm.stats import Recorder, Stats

from . import hooks, steps
from .check import check_replicas
from .record import Record, check_records
from .replicas import broadcast_state, broadcast_tensors
from .slots import UNPLANNED, BucketSlots, Slot
from .sparse import average_sparse, sparse_parameters
from .tensors import bytes_of, dtype_of
from .turn import Next, Turn, check_weights, divisor_of, mean_loss
from .weights import Weights

# The bucket number in the tags of what is no bucket.
_NO_BUCKET = 0xFFFF
_numbers = count()


class Attached:
    """What `overlap.attach` returns; the model itself is unchanged.

    Args:
        engine: of this process.
        model: what was attached.
        bucket_bytes, edge_bytes: see `make_plan`.
        passes: how many backwards an average is of: all but the last of them are local.
        check_every: compare replicas before every so many steps; 0 for never.

    Attributes:
        number: counts what was attached in this process.
        detached: `detach` was called.
    """

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        bucket_bytes: int,
        edge_bytes: int,
        passes: int = 1,
        check_every: int = 0,
    ) -> None:
        named = list(model.named_parameters())
        self.number = next(_numbers)
        self.idle = True
        self.touched, self._late = bytearray(len(named)), bytearray(len(named))
        self._engine = engine
        self._limits = (bucket_bytes, edge_bytes)
        self._parameters = [Parameter(name, p.numel(), dtype_of(name, p)) for name, p in named]
        self._slots = [Slot(index, name, p) for index, (name, p) in enumerate(named)]
        self._tensors = [p for _, p in named]
        self._ids = {id(p) for p in self._tensors}
        sparse = sparse_parameters(model)
        self._sparse = [slot for slot in self._slots if id(slot.parameter) in sparse]  # in no bucket
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
        self._model, self._check_every, self._steps = model, check_every, 0
        self._warned = False
        self._opening: Handle[list[Turn]] | None = None  # of the open round
        self._divisor: float | None = None  # of the round's average; the engine's thread sets and reads it
        self._weight: float | None = None
        self._weights: Weights | None = None
        self._weight_sum = 0.0  # of the backwards since the last average
        self._passes, self._local_passes = passes, 0
        self._local_open = False  # a local backward has made gradients
        self._channel: Channel | None = None
        self._hooks: list[Any] = []
        if engine.world.size > 1:
            self._take_part()

    def _take_part(self) -> None:
        self._channel = self._engine.open_channel("gradients")
        self._channel.last_words = self._last_words
        self._hooks = [hooks.register(slot, self) for slot in self._slots]
        steps.register(self)

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

    @property
    def weight(self) -> float | None:
        """How much this rank counts in the averages of the backwards that follow: its samples, or tokens.

        Set it before each backward, on every rank; zero is allowed, and makes this rank's gradients zeros.
        Then a mean of means becomes the mean: the average is the sum of weight times gradient, over the ranks
        and over the `no_sync` backwards before, divided by the sum of weights. None: all count alike.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if weight is not None:
            weight = float(weight)
            if not 0 <= weight < float("inf"):
                raise ValueError(f"weight must be a number of at least 0, not {weight!r}")
            if self.detached:
                raise ValueError("weight can't be set: this model was detached")
            if self._channel is None:  # a world of one, whose micro-batches have weights too
                self._take_part()
            if self._weights is None:
                self._weights = Weights(self._slots, self._is_fresh, lambda: self._weight)
            self._weights.register()
        self._weight = weight

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a training loop whose number of steps may differ between ranks. Collective.

        A rank that has left the loop takes part in what the others average, with zeros, until all have left;
        then every rank gets the parameters and buffers of the one that made the most steps (the last of
        them). Optimizer states are each rank's own. `grad` is None afterwards.
        """
        yield
        if self._channel is not None and not self.detached:
            self._join_others()

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers (running statistics of batch norm) to every rank, in place. Collective.

        Otherwise buffers are each rank's own after `attach`: nothing is written between a forward and its
        backward.
        """
        if self._channel is not None:
            self._submit(
                lambda communicator: broadcast_tensors(self._model.buffers(), communicator, 0), "sync_buffers"
            ).wait()

    def stats(self) -> Stats:
        """What rounds have cost so far; zeros in a world of one, which sends nothing."""
        return self._recorder.stats()

    def detach(self) -> None:
        """Remove the hooks: backwards are local from now on. Gradients stay as they are. Idempotent."""
        self.detached = True
        steps.unregister(self)
        if self._weights is not None:
            self._weights.remove()
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
        if os.getpid() != self._process:
            return False
        if self._paused or self._local_open or self._local_passes + 1 < self._passes:
            self._begin_local()
            return False
        self._settle()  # an aborted round may still be in flight
        hooks.EndOfBackward(self)
        self._add_weight()
        self._opening = self._take_turn(Next.ROUND)
        self._open_round()
        return True

    def _begin_local(self) -> None:
        """A backward that averages nothing: it counts once."""
        if not self._local_open and (self._weight is not None or self._passes > 1):
            self._local_open = True
            self._add_weight()
            hooks.EndOfBackward(_LocalBackward(self))

    def end_local(self) -> None:
        self._local_open = False
        self._local_passes += 0 if self._paused else 1

    def _add_weight(self) -> None:
        self._weight_sum += self._weight or 0.0

    def _open_round(self) -> None:
        self._open = True
        self._set_idle()
        self._round += 1

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
            if self._opening is not None:
                check_weights(self._opening.wait())
            check_records(records, self._slots)
            touched = np.any([record.touched for record in records], axis=0)
            self._average_late(np.any([record.late for record in records], axis=0))
            sent += self._average_sparse(touched)
            sent += self._join(touched)
            self._deliver(touched)
            if self._weights is not None:
                self._weights.put_back()
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

    # -- turns -------------------------------------------------------------------------------------------

    def has(self, module: torch.nn.Module) -> bool:
        return any(module is own for own in self._model.modules())

    def name_of(self, parameter: torch.Tensor) -> str:
        return next(slot.name for slot in self._slots if slot.parameter is parameter)

    def owns(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def before_step(self, optimizer: Any, loss: float | None) -> float | None:
        """Run empty rounds until no rank is in a backward any more."""
        if os.getpid() != self._process or self._open:
            return loss
        turns = self._run_rounds_of_others(Next.STEP, loss)
        self._warn_of_local_gradients()
        self._steps += 1
        if self._check_every and self._steps % self._check_every == 0:
            self._submit(
                lambda communicator: check_replicas(communicator, self._model, optimizer, None), "check_every"
            ).wait()
        return None if loss is None else mean_loss(turns)

    def _run_rounds_of_others(self, what: Next, loss: float | None = None) -> list[Turn]:
        while True:
            turns = self._take_turn(what, loss).wait()
            if all(turn.what is not Next.ROUND for turn in turns):
                return turns
            self._open_round()
            self.end()

    def _join_others(self) -> None:
        while True:
            for parameter in self._tensors:
                parameter.grad = None
            self._weight_sum = 0.0
            try:
                turns = self._run_rounds_of_others(Next.JOIN)
            except BackwardAborted:  # that rank's own affair; it may go on
                continue
            if all(turn.what is Next.JOIN for turn in turns):
                break
        made = [turn.steps for turn in turns]
        last = max(range(len(made)), key=lambda rank: (made[rank], rank))
        if min(made) < made[last]:
            self._submit(
                lambda communicator: broadcast_state(self._model, communicator, last), "the end of join"
            ).wait()
            self._steps = made[last]

    def _take_turn(self, what: Next, loss: float | None = None) -> Handle[list[Turn]]:
        weighted = self._weight is not None or self._weight_sum > 0
        turn = Turn(what, self._weight_sum if weighted else None, loss, self._steps)

        def work(communicator: Communicator) -> list[Turn]:
            turns = turn.exchange(communicator)
            self._divisor = divisor_of(turns)
            return turns

        doing = {Next.ROUND: "the start of a backward", Next.STEP: "optimizer.step()", Next.JOIN: "join"}
        return self._submit(work, doing[what])

    def _warn_of_local_gradients(self) -> None:
        if 1 in self.touched and not self._warned:
            self._warned = True
            name = self._slots[self.touched.index(1)].name
            warnings.warn(
                f"the optimizer steps on gradients that were never averaged ({name!r} and others): ranks drift "
                "apart. Run the last backward before a step outside of no_sync",
                stacklevel=2,
            )

    def _is_fresh(self, slot: Slot) -> bool:
        return not self.touched[slot.index]

    def _last_words(self) -> str:
        return (
            f"ended after {self._steps} steps (give every rank as many batches, as overlap.shard does, or put "
            "the loop into attached.join())"
        )

    # -- a round -----------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._open = False
        self._set_idle()

    def _set_idle(self) -> None:
        self.idle = self._paused > 0 or not self._open

    def _submit(
        self, work: Callable[[Communicator], Any], doing: str, bucket: int = _NO_BUCKET
    ) -> Handle[Any]:
        assert self._channel is not None  # hooks are removed before the channel closes
        return self._channel.submit(work, doing, self._round << 16 | bucket)

    def _send(self, bucket: int) -> None:
        slots = self._buckets[bucket]
        slots.gather()
        work = partial(self._average, slots.span)
        self._flying.append(self._submit(work, f"allreduce of bucket {bucket} ({slots.name})", bucket))

    def _fill_rest(self) -> None:
        """Fill in what did not come, so that every bucket leaves."""
        kept = []
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.left > 0:
                    if not self.touched[slot.index]:
                        kept.append((slot.parameter, slot.parameter.grad))
                        self._set_aside(slot)
                    self.ready(slot)
        # They contribute what their `grad` holds, and keep it should no other rank have touched them.
        for parameter, grad in kept:
            parameter.grad = grad

    def _set_aside(self, slot: Slot) -> None:
        if self._weights is not None and self._weight is not None:
            self._weights.set_aside(slot)

    def _average(self, span: Span, communicator: Communicator) -> None:
        """On the engine's thread, after the round's opening."""
        communicator.allreduce(span, Op.AVERAGE, self._divisor)

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
            self._submit(partial(self._average, span), f"allreduce of what came late of {slot.name}").wait()
            slot.slice.add_(rest)

    def _average_sparse(self, touched: np.ndarray) -> list[Handle[Any]]:
        """Average what is in no bucket, and take it from the rest of the round."""
        slots = [slot for slot in self._sparse if touched[slot.index]]
        for slot in slots:
            if not self.touched[slot.index]:
                self._set_aside(slot)
        handles = [
            self._submit(partial(self._average_rows, slot.parameter), f"the sparse gradient of {slot.name}")
            for slot in slots
        ]
        for slot, handle in zip(slots, handles, strict=True):
            slot.parameter.grad = handle.wait()
            touched[slot.index] = False
        return handles

    def _average_rows(self, parameter: torch.nn.Parameter, communicator: Communicator) -> torch.Tensor:
        return average_sparse(communicator, parameter.grad, parameter, self._divisor)

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
        self._weight_sum = 0.0
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
                self._set_aside(self._slots[index])
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
            self._flying.append(self._submit(partial(self._average, span), f"allreduce of {name}"))


_libc = ctypes.CDLL(None)


def _give_back_freed_memory() -> None:
    """Return what gradients occupied before they moved into slices; glibc would keep it, as large again."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class _LocalBackward:
    """Listens for the end of a local backward."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def end(self) -> None:
        self._attached.end_local()

    aborted = end
