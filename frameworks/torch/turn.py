"""What ranks do next, told before each round and each step: so that they may differ in how often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.errors import MismatchError
from overlap.comm.span import Span


class Next(IntEnum):
    ROUND = 0  # a backward that averages has begun
    STEP = 1  # an optimizer is about to step: this rank's backwards are done
    JOIN = 2  # this rank has no more batches


@dataclass(frozen=True)
class Turn:
    """One rank's next deed.

    Attributes:
        what: which.
        weight: of what it has accumulated since gradients were last averaged; None where it set none.
        loss: what the closure of an optimizer returned, to be averaged; None where there is no closure.
        steps: how many steps it has made.
    """

    what: Next
    weight: float | None = None
    loss: float | None = None
    steps: int = 0

    def exchange(self, communicator: Communicator) -> list[Turn]:
        """Collective: every rank's turn, in rank order."""
        given = [math.nan if value is None else value for value in (self.weight, self.loss)]
        # A loss may be NaN itself, so whether there is one is said apart.
        table = np.empty((communicator.size, 6))
        table[communicator.rank] = self.what, self.steps, self.weight is None, self.loss is None, *given
        communicator.allgather(Span.wrap(table), [6] * communicator.size)
        return [
            Turn(Next(int(what)), None if no_weight else weight, None if no_loss else loss, int(steps))
            for what, steps, no_weight, no_loss, weight, loss in table.tolist()
        ]


def divisor_of(turns: Sequence[Turn]) -> float | None:
    """What the sum of a round's gradients is divided by: the sum of weights; None is the number of ranks.

    A round in which nothing has a weight has gradients of zeros only, which one divides as well as another.
    """
    weights = [turn.weight for turn in turns if turn.weight is not None]
    return (sum(weights) or 1.0) if weights else None


def check_weights(turns: Sequence[Turn]) -> None:
    """Raise the same error on every rank where only some of those that run a round have set a weight."""
    running = [rank for rank, turn in enumerate(turns) if turn.what is Next.ROUND]
    without = [rank for rank in running if turns[rank].weight is None]
    if without and len(without) < len(running):
        weighted = next(rank for rank in running if turns[rank].weight is not None)
        raise MismatchError(
            f"rank {weighted} has set attached.weight but rank {without[0]} has not: set it on every rank "
            "before each backward, or on none"
        )


def mean_loss(turns: Sequence[Turn]) -> float:
    """The mean of the losses of those ranks that have one."""
    losses = [turn.loss for turn in turns if turn.loss is not None]
    return sum(losses) / len(losses)
