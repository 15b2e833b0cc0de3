"""Data-parallel training whose gradient communication hides behind the backward pass.

Names load on first use: `import overlap` imports no framework.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that has it.
_HOMES = {
    "Adasum": "overlap.collectives",
    "Attached": "overlap.frameworks.torch.attached",
    "Average": "overlap.collectives",
    "BackwardAborted": "overlap.comm.errors",
    "CommError": "overlap.comm.errors",
    "InternalError": "overlap.comm.errors",
    "Max": "overlap.collectives",
    "Min": "overlap.collectives",
    "MismatchError": "overlap.comm.errors",
    "PeerLost": "overlap.comm.errors",
    "ProcessSet": "overlap.process_sets",
    "Product": "overlap.collectives",
    "RankFailed": "overlap.comm.errors",
    "StallError": "overlap.comm.errors",
    "StartError": "overlap.comm.errors",
    "Sum": "overlap.collectives",
    "add_process_set": "overlap.process_sets",
    "allgather": "overlap.collectives",
    "allreduce": "overlap.collectives",
    "alltoall": "overlap.collectives",
    "attach": "overlap.attaching",
    "barrier": "overlap.collectives",
    "broadcast": "overlap.collectives",
    "check_batch": "overlap.coordination",
    "check_replicas": "overlap.checking",
    "cross_rank": "overlap.runtime",
    "cross_size": "overlap.runtime",
    "global_process_set": "overlap.process_sets",
    "init": "overlap.runtime",
    "is_initialized": "overlap.runtime",
    "join": "overlap.collectives",
    "local_rank": "overlap.runtime",
    "local_size": "overlap.runtime",
    "mean": "overlap.coordination",
    "on_rank_zero": "overlap.coordination",
    "rank": "overlap.runtime",
    "rank_zero_first": "overlap.coordination",
    "reducescatter": "overlap.collectives",
    "remove_process_set": "overlap.process_sets",
    "run": "overlap.launch",
    "shard": "overlap.sharding",
    "shutdown": "overlap.runtime",
    "size": "overlap.runtime",
    "world": "overlap.runtime",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from overlap.attaching import attach as attach
    from overlap.checking import check_replicas as check_replicas
    from overlap.collectives import Adasum as Adasum
    from overlap.collectives import Average as Average
    from overlap.collectives import Max as Max
    from overlap.collectives import Min as Min
    from overlap.collectives import Product as Product
    from overlap.collectives import Sum as Sum
    from overlap.collectives import allgather as allgather
    from overlap.collectives import allreduce as allreduce
    from overlap.collectives import alltoall as alltoall
    from overlap.collectives import barrier as barrier
    from overlap.collectives import broadcast as broadcast
    from overlap.collectives import join as join
    from overlap.collectives import reducescatter as reducescatter
    from overlap.comm.errors import BackwardAborted as BackwardAborted
    from overlap.comm.errors import CommError as CommError
    from overlap.comm.errors import InternalError as InternalError
    from overlap.comm.errors import MismatchError as MismatchError
    from overlap.comm.errors import PeerLost as PeerLost
    from overlap.comm.errors import RankFailed as RankFailed
    from overlap.comm.errors import StallError as StallError
    from overlap.comm.errors import StartError as StartError
    from overlap.coordination import check_batch as check_batch
    from overlap.coordination import mean as mean
    from overlap.coordination import on_rank_zero as on_rank_zero
    from overlap.coordination import rank_zero_first as rank_zero_first
    from overlap.frameworks.torch.attached import Attached as Attached
    from overlap.launch import run as run
    from overlap.process_sets import ProcessSet as ProcessSet
    from overlap.process_sets import add_process_set as add_process_set
    from overlap.process_sets import global_process_set as global_process_set
    from overlap.process_sets import remove_process_set as remove_process_set
    from overlap.runtime import cross_rank as cross_rank
    from overlap.runtime import cross_size as cross_size
    from overlap.runtime import init as init
    from overlap.runtime import is_initialized as is_initialized
    from overlap.runtime import local_rank as local_rank
    from overlap.runtime import local_size as local_size
    from overlap.runtime import rank as rank
    from overlap.runtime import shutdown as shutdown
    from overlap.runtime import size as size
    from overlap.runtime import world as world
    from overlap.sharding import shard as shard

if os.path.isfile(os.path.join(os.path.dirname(__file__), "comm")):
    raise ImportError(
        "overlap/comm is a file where a symbolic link should be: clone the repository with symbolic links "
        "(git config core.symlinks true), or install the wheel"
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'overlap' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES.keys())
