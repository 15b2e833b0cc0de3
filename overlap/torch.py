"""Horovod's face for PyTorch: `import overlap.torch as hvd` instead of `import horovod.torch as hvd`."""

from __future__ import annotations

import torch

from overlap.comm.engine import Engine
from overlap.comm.errors import CommError as HorovodInternalError
from overlap.comm.named import NamedOperations
from overlap.frameworks.torch import collectives, optimizer
from overlap.frameworks.torch.broadcasting import broadcast_optimizer_state, broadcast_parameters
from overlap.frameworks.torch.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from overlap.frameworks.torch.compression import Compression
from overlap.frameworks.torch.joining import join
from overlap.frameworks.torch.optimizer import DistributedOptimizer
from overlap.frameworks.torch.sync_batch_norm import SyncBatchNorm

from . import runtime
from .basics import (
    at_shutdown,
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    shutdown,
    start_timeline,
    stop_timeline,
)
from .config import Settings
from .objects import allgather_object, broadcast_object
from .process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from .runtime import cross_rank, cross_size, is_initialized, local_rank, local_size, rank, size


def _named() -> NamedOperations:
    if not runtime.is_initialized():
        raise HorovodInternalError("overlap is not initialized: call hvd.init() first")
    return runtime.engine().named


def _engine() -> tuple[Engine, tuple[int, int]]:
    settings = Settings.read()
    edge = min(settings.bucket_mb, settings.edge_bucket_mb)
    return runtime.engine(), (int(settings.bucket_mb * 1e6), int(edge * 1e6))


_MPI_LIB_AVAILABLE = False


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()


collectives.named = _named
optimizer.engine = _engine
at_shutdown(collectives.reset)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
