"""Communicators: one file a backend, each against the contract in `base.py`; and which one a world gets."""

from __future__ import annotations

import platform

from overlap.comm.backends.base import Communicator
from overlap.comm.errors import StartError
from overlap.comm.world import World


def connect(world: World, generation: int, timeout_s: float, spin_s: float) -> Communicator:
    """Join the other ranks of `world`.

    Args:
        generation, timeout_s: see `rendezvous.meet`.
        spin_s: how long a rank looks for its peers before it sleeps.

    Raises:
        StartError: not all ranks came in time, or this platform has no backend for several.
    """
    if world.size == 1:
        # Needs nothing of the system: one process works wherever Python does.
        from overlap.comm.backends.inproc import alone

        return alone()
    from overlap.comm import futex

    if not futex.AVAILABLE:
        raise StartError(
            f"this job has {world.size} ranks, but shared memory between them needs Linux 5.3 or newer "
            f"(futex, memfd, pidfd), not {platform.system()} {platform.release()} on {platform.machine()}; "
            f"run one rank"
        )
    from overlap.comm.backends.shm import ShmCommunicator
    from overlap.comm.rendezvous import meet

    return ShmCommunicator.start(meet(world, generation, timeout_s), world.rank, spin_s)
