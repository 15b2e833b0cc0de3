"""`hvd.join`: a rank without batches takes part in what the others do, operations and optimizers alike."""

from __future__ import annotations

import threading
from contextlib import suppress

from overlap.comm.errors import CommError

from . import collectives
from .averaging import Overlapped, overlapped


def join(device: int = -1) -> int:
    """This rank has no more batches: it takes part in the others' reductions, with nothing, until all join.

    Gradients of parameters that a `DistributedOptimizer` has are None afterwards. Parameters are each rank's
    own: broadcast them from the rank that this returns.

    Args:
        device: has no meaning here.

    Returns:
        the rank that joined last, the same on all.

    Raises:
        HorovodInternalError: a rank was lost meanwhile.
    """
    # Optimizers have a channel each, and the others may use them in any order.
    servants = [threading.Thread(target=_serve, args=(each,), daemon=True) for each in list(overlapped)]
    for servant in servants:
        servant.start()
    last = collectives.join(device)
    for servant in servants:
        servant.join()
    return last


def _serve(optimizer: Overlapped) -> None:
    # A rank that is lost fails the join itself; what a peer has dropped already needs no serving.
    with suppress(CommError):
        optimizer.join()
