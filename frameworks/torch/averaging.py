"""What averages the gradients of an optimizer's parameters between two of its steps."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from overlap.comm.dtype import Op
from overlap.comm.engine import Engine
from overlap.comm.request import WORLD, Kind

from . import lifetime
from .rounds import Options, Rounds
from .started import start
from .turn import Next, mean_loss

Named = Mapping[str, torch.nn.Parameter]

# How many optimizers of each process set go through named operations: their names are equal on all its ranks,
# which make them in the same order.
_counts: WeakKeyDictionary[Engine, Counter[int]] = WeakKeyDictionary()


def _make_name(engine: Engine, group: int) -> str:
    counts = _counts.setdefault(engine, Counter())
    counts[group] += 1
    return f"DistributedOptimizer.{group}.{counts[group]}"


class Averaging(Protocol):
    """Between the last backward and the optimizer's step."""

    def finish(self, loss: float | None) -> float | None:
        """Collective: every trainable parameter has its average afterwards; returns the ranks' mean loss."""

    def pending(self) -> bool:
        """Whether something was averaged that no step has used yet."""

    def forget(self) -> None:
        """What was accumulated is of no use any more."""

    def set_passes(self, passes: int) -> None:
        """How many backwards an average is of."""

    def detach(self) -> None:
        """Backwards are local from now on."""


class Overlapped:
    """Averages behind backward, in buckets, as `overlap.attach` does.

    Args:
        named: the optimizer's parameters.
        group: the process set whose ranks take part.
    """

    def __init__(self, engine: Engine, named: Named, options: Options, group: int = WORLD) -> None:
        self._engine, self._named, self._steps = engine, named, 0
        self._channel = channel = engine.open_channel("gradients", group)
        # At exit `shutdown` closes it.
        weakref.finalize(self, channel.let_go).atexit = False
        self._rounds = Rounds(channel, named, options)
        lifetime.keep(self, named.values())
        if group == WORLD:
            overlapped.add(self)

    def join(self) -> None:
        """Take part in the other ranks' steps, with nothing, until all ranks have joined."""
        self._rounds.join(self._steps)

    def finish(self, loss: float | None) -> float | None:
        rounds = self._rounds
        if not rounds.can_step():
            return loss
        if rounds.never_averaged() is not None:
            rounds.run_own()
        turns = rounds.follow(Next.STEP, loss, self._steps)
        rounds.begin_step()
        rounds.fill_with_zeros()
        self._steps += 1
        return None if loss is None else mean_loss(turns)

    def pending(self) -> bool:
        return bool(self._rounds.averaged.any())

    def forget(self) -> None:
        self._rounds.forget()

    def set_passes(self, passes: int) -> None:
        self._rounds.passes = passes

    def detach(self) -> None:
        overlapped.discard(self)
        self._rounds.close()
        lifetime.let_go(self._named.values())
        self._engine.close_channel(self._channel)


# Those of all ranks, which a rank that joins goes on serving.
overlapped: WeakSet[Overlapped] = WeakSet()


class Compressed:
    """Averages between backward and step, through a compressor that only its author knows.

    Args:
        compression: has `compress(tensor)`, which gives a tensor and a context, and `decompress` of both.
    """

    def __init__(self, engine: Engine, named: Named, op: Op, compression: Any, group: int = WORLD) -> None:
        self._engine, self._named, self._op, self._group = engine, named, op, group
        self._compression = compression
        self._name = _make_name(engine, group)

    def finish(self, loss: float | None) -> float | None:
        trainable = [p for p in self._named.values() if p.requires_grad]
        pairs = []
        for parameter in trainable:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            pairs.append(self._compression.compress(grad.to_dense() if grad.is_sparse else grad))
        sent = reduce_tensors(self._engine, self._name, [p for p, _ in pairs], self._op, self._group)
        for parameter, reduced, (_, context) in zip(trainable, sent, pairs, strict=True):
            parameter.grad = self._compression.decompress(reduced, context)
        if loss is None:
            return None
        mean = torch.tensor([loss], dtype=torch.float64)
        [mean] = reduce_tensors(self._engine, f"{self._name}.loss", [mean], Op.AVERAGE, self._group)
        return float(mean)

    def pending(self) -> bool:
        return False

    def forget(self) -> None:
        pass

    def set_passes(self, passes: int) -> None:
        pass

    def detach(self) -> None:
        pass


class AdasumDeltas:
    """Lets each rank step for itself, and adds up by Adasum how far the parameters came."""

    def __init__(self, engine: Engine, named: Named, compression: Any) -> None:
        self._engine, self._named, self._compression = engine, named, compression
        self._name = _make_name(engine, WORLD)

    def step(self, local_step: Callable[[], Any]) -> Any:
        parameters = [p for p in self._named.values() if p.requires_grad]
        starts = [parameter.detach().clone() for parameter in parameters]
        result = local_step()
        with torch.no_grad():
            deltas = [p.detach() - start for p, start in zip(parameters, starts, strict=True)]
            pairs = [self._compression.compress(delta) for delta in deltas]
            sent = reduce_tensors(self._engine, self._name, [p for p, _ in pairs], None, WORLD)
            for parameter, start, delta, (_, context) in zip(parameters, starts, sent, pairs, strict=True):
                parameter.copy_(start + self._compression.decompress(delta, context))
        return result


def reduce_tensors(
    engine: Engine, name: str, tensors: Sequence[torch.Tensor], op: Op | None, group: int
) -> list[torch.Tensor]:
    """Collective, as one: new tensors, reduced by `op`, or by Adasum where it is None."""
    if not tensors:
        return []
    kind = Kind.ADASUM if op is None else Kind.ALLREDUCE
    reduced: list[torch.Tensor] = start(engine.named, kind, name, tensors, op=op, group=group).wait()
    return reduced
