"""`overlap.check_replicas`: whether training is still the same on every rank."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import runtime

if TYPE_CHECKING:
    import torch


def check_replicas(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Compare parameters, optimizer and loss scale between ranks, bit for bit; change nothing.

    What is sent is one hash, unless something differs. Buffers are not compared: running statistics are each
    rank's own. Collective: call it between steps, on every rank with the same arguments. In a world of one it
    does nothing. Initializes overlap where `init` was not called.

    Args:
        model: parameters of any shape, dtype and memory layout, frozen ones too. NaNs of the same bits are
            equal.
        optimizer: its options (learning rate, momentum, ...) in every parameter group, and its state; of an
            option that is no number, string, tensor, or list, tuple or dict of these, the type only.
        scaler: its loss scale.

    Raises:
        MismatchError: on every rank, with the first difference, both values and the ranks, and what to do;
            loss scale and options first, for they make parameters drift.
        TypeError: an argument is none of these; says which, before anything is sent.
        ValueError: a parameter is lazy and not initialized yet, on the meta device, or sparse.
        PeerLost: another rank failed meanwhile.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer)):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, not {type(optimizer).__name__}")
    if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, not {type(scaler).__name__}")
    from overlap.frameworks.torch.check import check_replicas as check_torch

    runtime.init()
    check_torch(runtime.engine().communicator, model, optimizer, scaler)
