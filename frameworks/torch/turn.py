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
        share: the weight of what the loss is of: of the last round; None where it set none.
    """

    what: Next
    weight: float | None = None
    loss: float | None = None
    steps: int = 0
    share: float | None = None

    def exchange(self, communicator: Communicator) -> list[Turn]:
        """Collective: every rank's turn, in rank order."""
        given = [self.weight, self.loss, self.share]
        # A loss may be NaN itself, so whether there is one is said apart.
        table = np.empty((communicator.size, 8))
        table[communicator.rank] = (
            self.what,
            self.steps,
            *(value is None for value in given),
            *(math.nan if value is None else value for value in given),
        )
        communicator.allgather(Span.wrap(table), [8] * communicator.size)
        turns = []
        for what, steps, *rest in table.tolist():
            weight, loss, share = (
                None if absent else value for absent, value in zip(rest[:3], rest[3:], strict=True)
            )
            turns.append(Turn(Next(int(what)), weight, loss, int(steps), share))
        return turns


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
    """The mean of the losses of those ranks that have one, by the weights that their gradients had.

    A rank of weight 0 has no say, be its loss NaN (from 0 / 0).
    """
    losses = [
        (turn.loss, 1.0 if turn.share is None else turn.share) for turn in turns if turn.loss is not None
    ]
    total = sum(share for _, share in losses)
    if not total:
        return sum(loss for loss, _ in losses) / len(losses)
    return sum(loss * share for loss, share in losses if share) / total
