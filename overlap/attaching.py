"""`overlap.attach`: the one line that makes training data-parallel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import runtime
from .config import Settings

if TYPE_CHECKING:
    import torch

    from overlap.frameworks.torch.attached import Attached


def attach(
    model: torch.nn.Module,
    *,
    bucket_mb: float | None = None,
    backward_passes_per_step: int = 1,
    check_every: int = 0,
) -> Attached:
    """Average the gradients of `model` over all ranks, from now on, behind its backward passes.

    Parameters and buffers become those of rank 0. When `loss.backward()` returns, `p.grad` of every parameter
    that some rank has used is the average over all ranks (a rank that has not used it counts as zeros); one
    that no rank has used keeps its `grad`. `p.grad` aliases the engine's memory and is valid until the next
    backward; a gradient that you keep longer is given memory of its own. The model itself is not wrapped or
    changed. Collective: every rank attaches the same model. Initializes overlap where `init` was not called.

    Args:
        model: on the CPU, with the same parameters on every rank.
        bucket_mb: largest bucket in MB (1e6 bytes), OVERLAP_BUCKET_MB or 4 unless given: smaller ones start
            earlier, larger ones cost less.
        backward_passes_per_step: how many backwards one average is of: the gradients of all but the last
            accumulate locally, as within `no_sync`.
        check_every: run `check_replicas` with the model and the optimizer before every so many steps of it; 0
            is never.

    Raises:
        TypeError, ValueError: this model can't be attached; says why, before anything is sent.
        MismatchError: models or options differ between ranks: the first difference, with the ranks.
        PeerLost: another rank failed meanwhile.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    settings = Settings.read()
    limit = settings.bucket_mb if bucket_mb is None else bucket_mb
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < float("inf"):
        raise ValueError(f"bucket_mb must be a positive number of megabytes, not {bucket_mb!r}")
    _check_count("backward_passes_per_step", backward_passes_per_step, 1)
    _check_count("check_every", check_every, 0)
    from overlap.frameworks.torch.attach import attach as attach_torch

    runtime.init()
    edge = min(limit, settings.edge_bucket_mb)
    return attach_torch(runtime.engine(), model, limit, edge, backward_passes_per_step, check_every)


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
