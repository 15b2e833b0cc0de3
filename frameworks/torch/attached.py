"""An attached model: what users call, and how ranks stay together that differ in what they do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from overlap.comm.engine import Channel, Engine
from overlap.comm.stats import Stats
from overlap.comm.warn import warn

from . import lifetime, steps
from .check import check_replicas
from .replicas import broadcast_state, broadcast_tensors
from .rounds import Options, Rounds
from .turn import Next, mean_loss

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
        self.number = next(_numbers)
        self.detached = False
        self._engine, self._model = engine, model
        self._named = dict(model.named_parameters())
        self._ids = {id(parameter) for parameter in self._named.values()}
        self._options = Options((bucket_bytes, edge_bytes), passes)
        self._check_every, self._steps, self._warned = check_every, 0, False
        self._channel: Channel | None = None
        self._rounds: Rounds | None = None
        # A world of one has nothing to average, unless its micro-batches have weights.
        if engine.world.size > 1:
            self._take_part()

    def _take_part(self) -> Rounds:
        self._channel = channel = self._engine.open_channel("gradients")
        channel.last_words = _weak(self._last_words)
        # At exit `shutdown` closes it.
        weakref.finalize(self, channel.let_go).atexit = False
        self._rounds = Rounds(channel, self._named, self._options)
        lifetime.keep(self, self._named.values())
        steps.register(self)
        return self._rounds

    # -- what users call ---------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate locally and send nothing; the next one outside averages the sum."""
        rounds = self._rounds
        if rounds is None:
            yield
            return
        rounds.pause(1)
        try:
            yield
        finally:
            rounds.pause(-1)

    @property
    def weight(self) -> float | None:
        """How much this rank counts in the averages of the backwards that follow: its samples, or tokens.

        Set it before each backward, on every rank; zero is allowed, and makes this rank's gradients zeros.
        Then a mean of means becomes the mean: the average is the sum of weight times gradient, over the ranks
        and over the `no_sync` backwards before, divided by the sum of weights. None: all count alike.
        """
        return None if self._rounds is None else self._rounds.weights.current

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if weight is not None:
            weight = float(weight)
            if not 0 <= weight < float("inf"):
                raise ValueError(f"weight must be a number of at least 0, not {weight!r}")
            if self.detached:
                raise ValueError("weight can't be set: this model was detached")
            rounds = self._rounds or self._take_part()
            rounds.weights.register()
        if self._rounds is not None:
            self._rounds.weights.current = weight

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a training loop whose number of steps may differ between ranks. Collective.

        A rank that has left the loop takes part in what the others average, with zeros, until all have left;
        then every rank gets the parameters and buffers of the one that made the most steps (the last of
        them). Optimizer states are each rank's own. `grad` is None afterwards.
        """
        yield
        if self._rounds is not None:
            self._join_others(self._rounds)

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers (running statistics of batch norm) to every rank, in place. Collective.

        Otherwise buffers are each rank's own after `attach`: nothing is written between a forward and its
        backward.
        """
        if self._rounds is not None:
            self._rounds.submit(
                lambda communicator: broadcast_tensors(self._model.buffers(), communicator, 0), "sync_buffers"
            ).wait()

    def stats(self) -> Stats:
        """What rounds have cost so far; zeros in a world of one, which sends nothing."""
        return Stats() if self._rounds is None else self._rounds.recorder.stats()

    def detach(self) -> None:
        """Remove the hooks: backwards are local from now on. Gradients stay as they are. Idempotent.

        A model that is dropped needs no `detach`: its memory and its channel go with the garbage collection
        that finds it. Only where `weight` was set does it live until `detach`: torch's nodes, which have the
        hooks then, refer to parameters where the collector can't see it.
        """
        self.detached = True
        steps.unregister(self)
        rounds, self._rounds = self._rounds, None
        channel, self._channel = self._channel, None
        if rounds is not None and channel is not None:
            rounds.close()
            lifetime.let_go(self._named.values())
            self._engine.close_channel(channel)

    # -- steps -------------------------------------------------------------------------------------------

    def has(self, module: torch.nn.Module) -> bool:
        return any(module is own for own in self._model.modules())

    def name_of(self, parameter: torch.Tensor) -> str:
        return next(name for name, own in self._named.items() if own is parameter)

    def owns(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def before_step(self, optimizer: Any, loss: float | None) -> float | None:
        """Run empty rounds until no rank is in a backward any more."""
        rounds = self._rounds
        if rounds is None or not rounds.can_step():
            return loss
        if rounds.passes > 1 and rounds.never_averaged() is not None:
            rounds.run_own()  # a step after fewer backwards, or more, than an average is of
        turns = rounds.follow(Next.STEP, loss, self._steps)
        rounds.begin_step()
        self._warn_of_local_gradients(rounds)
        self._steps += 1
        all_step = all(turn.what is Next.STEP for turn in turns)
        if all_step and self._check_every and self._steps % self._check_every == 0:
            rounds.submit(
                lambda communicator: check_replicas(communicator, self._model, optimizer, None), "check_every"
            ).wait()
        return None if loss is None else mean_loss(turns)

    def _join_others(self, rounds: Rounds) -> None:
        made = [turn.steps for turn in rounds.join(self._steps)]
        last = max(range(len(made)), key=lambda rank: (made[rank], rank))
        if min(made) < made[last]:
            rounds.submit(
                lambda communicator: broadcast_state(self._model, communicator, last), "the end of join"
            ).wait()
            self._steps = made[last]

    def _warn_of_local_gradients(self, rounds: Rounds) -> None:
        name = rounds.never_averaged()
        if name is not None and not self._warned:
            self._warned = True
            warn(
                f"the optimizer steps on gradients that were never averaged ({name!r} and others): ranks "
                "drift apart. Run the last backward before a step outside of no_sync",
                stacklevel=2,
            )

    def _last_words(self) -> str:
        made = f"{self._steps} steps" if self._steps else f"{self.stats().steps} averaged backwards"
        return (
            f"ended after {made}; unless its own output says why, give every rank as many batches "
            "(overlap.shard does), or put the loop into attached.join()"
        )


def _weak(words: Callable[[], str]) -> Callable[[], str]:
    """The channel outlives a dropped model for a moment, and must not keep it."""
    method = weakref.WeakMethod(words)

    def last_words() -> str:
        words = method()
        return "dropped its model" if words is None else words()

    return last_words
