"""Who is in this job: rank, size and hosts, found from the launcher's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from overlap.comm.errors import StartError


@dataclass(frozen=True)
class World:
    """The ranks of one job as one rank sees them.

    Attributes:
        rank: this process, 0 to size - 1.
        size: how many processes the job has.
        local_rank, local_size: the same within this host.
        cross_rank, cross_size: this host among the hosts.
        address: the name under which the ranks of this host meet (empty in a world of one).
        source: what the world was found from: "overlap", "torchrun" or "alone".
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    address: str = ""
    source: str = "alone"


# Launchers whose worlds need a backend that is not there: variable -> what started the process.
_OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "an mpiexec (PMI)",
    "PMIX_SIZE": "an mpiexec (PMIx)",
    "SLURM_STEP_NUM_TASKS": "srun",
}


# Any of the first means overlap's launcher; all of the second mean torchrun, whose WORLD_SIZE may be lost.
_OVERLAP_VARIABLES = ("OVERLAP_RANK", "OVERLAP_SIZE", "OVERLAP_LOCAL_RANK", "OVERLAP_LOCAL_SIZE")
_TORCHRUN_VARIABLES = {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def discover(environ: Mapping[str, str] = os.environ) -> World:
    """Find the world from `environ`: overlap's own launcher, torchrun, or none of them.

    Raises:
        StartError: variables are incomplete or contradict each other, the job spans hosts, or another
            launcher says that this process is one of several. Never a silent world of one.

    >>> discover({}).size
    1
    """
    if any(name in environ for name in _OVERLAP_VARIABLES):
        world = World(
            rank=_integer(environ, "OVERLAP_RANK"),
            size=_integer(environ, "OVERLAP_SIZE"),
            local_rank=_integer(environ, "OVERLAP_LOCAL_RANK"),
            local_size=_integer(environ, "OVERLAP_LOCAL_SIZE"),
            address=f"overlap-{_text(environ, 'OVERLAP_JOB')}",
            source="overlap",
        )
    elif _says_several(environ, "WORLD_SIZE") or environ.keys() >= _TORCHRUN_VARIABLES:
        size, local_size = _integer(environ, "WORLD_SIZE"), _integer(environ, "LOCAL_WORLD_SIZE")
        # torchrun's run id is "none" for every job; the agent's pid and port tell two jobs apart.
        world = World(
            rank=_integer(environ, "RANK"),
            size=size,
            local_rank=_integer(environ, "LOCAL_RANK"),
            local_size=local_size,
            cross_rank=_integer(environ, "RANK") // max(local_size, 1),
            cross_size=-(-size // max(local_size, 1)),
            address=f"overlap-torchrun-{_text(environ, 'MASTER_ADDR')}-{_text(environ, 'MASTER_PORT')}"
            f"-{os.getppid()}",
            source="torchrun",
        )
    else:
        for variable, launcher in _OTHER_LAUNCHERS.items():
            if _says_several(environ, variable):
                count = environ[variable]
                raise StartError(
                    f"{variable}={count} says that {launcher} started this process as one of {count}, but "
                    f"this version of overlap has no MPI backend: it would train {count} separate models. "
                    f"Start with `overlap run -np {count} python ...`, or unset {variable} to run alone"
                )
        return World()
    return _checked(world)


def _says_several(environ: Mapping[str, str], variable: str) -> bool:
    count = environ.get(variable, "")
    return count.isdigit() and int(count) > 1


def _checked(world: World) -> World:
    if not 0 <= world.rank < world.size or not 0 <= world.local_rank < world.local_size <= world.size:
        raise StartError(
            f"{world.source}'s variables contradict each other: rank {world.rank} of {world.size}, local "
            f"rank {world.local_rank} of {world.local_size}; start the job anew with one launcher"
        )
    if world.local_size != world.size:
        raise StartError(
            f"this job has {world.size} ranks, {world.local_size} of them on this host, but this version of "
            f"overlap runs on one host only; start all ranks on one host"
        )
    return world


def _text(environ: Mapping[str, str], name: str) -> str:
    try:
        return environ[name]
    except KeyError:
        raise StartError(
            f"environment variable {name} is missing though its companions are set; start with "
            "`overlap run -np N ...` or torchrun, which set all of them"
        ) from None


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = _text(environ, name)
    try:
        return int(value)
    except ValueError:
        raise StartError(f"environment variable {name} must be an integer, not {value!r}") from None
