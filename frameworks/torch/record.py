"""What ranks tell each other at the end of a round: which gradients came, and whether all went well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.errors import BackwardAborted, MismatchError
from overlap.comm.span import Span

from .slots import Slot


@dataclass(frozen=True)
class Record:
    """One rank's round.

    Attributes:
        plan: the digest of its plan, which must be the same on all ranks.
        aborted: its backward raised.
        touched: a flag a parameter: something was accumulated since it was last averaged, in `no_sync` too.
        late: it accumulated again after its bucket had left.
        trainable: its `requires_grad`.
        sparse: its gradient is sparse, and in no bucket.
    """

    plan: int
    aborted: bool
    touched: np.ndarray
    late: np.ndarray
    trainable: np.ndarray
    sparse: np.ndarray

    def exchange(self, communicator: Communicator) -> list[Record]:
        """Collective: every rank's record, in rank order."""
        head = np.array([self.plan, self.aborted], np.int64).view(np.uint8)
        flags = (self.touched, self.late, self.trainable, self.sparse)
        mine = np.concatenate([head, *map(np.packbits, flags)])
        table = np.empty((communicator.size, len(mine)), np.uint8)
        table[communicator.rank] = mine
        communicator.allgather(Span.wrap(table), [len(mine)] * communicator.size)
        return [self._unpack(row) for row in table]

    def _unpack(self, row: np.ndarray) -> Record:
        plan, aborted = row[:16].view(np.int64).tolist()
        flags = np.unpackbits(row[16:].reshape(4, -1), axis=1, count=len(self.touched)).astype(bool)
        return Record(plan, bool(aborted), *flags)


def check_records(records: Sequence[Record], slots: Sequence[Slot]) -> None:
    """Raise the same error on every rank where a round can't be averaged."""
    for rank, record in enumerate(records):
        if record.aborted:
            raise BackwardAborted(rank)
        if record.plan != records[0].plan:
            raise MismatchError(
                f"rank {rank} has another bucket plan than rank 0: give attach the same options on all ranks"
            )
        differs = np.flatnonzero(record.trainable != records[0].trainable)
        if len(differs):
            slot, first = slots[differs[0]], bool(records[0].trainable[differs[0]])
            states = ("trainable", "frozen") if first else ("frozen", "trainable")
            raise MismatchError(
                f"parameter {slot.name!r} is {states[0]} on rank 0 but {states[1]} on rank {rank}: freeze "
                "and unfreeze the same parameters on every rank"
            )
