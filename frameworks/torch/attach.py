"""Attaching a model: what can be judged is judged, replicas are made equal, and hooks are registered."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from overlap.comm.engine import Engine

from .attached import Attached
from .replicas import broadcast_state, check_same_model
from .tensors import dtype_of

# Which attached model a parameter belongs to; a weak reference, for it refers to the parameter.
_owners: Any = WeakTensorKeyDictionary()


def _owner_of(parameter: torch.Tensor) -> Attached | None:
    """The attached model that averages its gradient, if there is one."""
    reference = _owners.get(parameter)
    owner: Attached | None = None if reference is None else reference()
    return None if owner is None or owner.detached else owner


def attach(
    engine: Engine,
    model: torch.nn.Module,
    bucket_mb: float,
    edge_bucket_mb: float,
    passes: int,
    check_every: int,
) -> Attached:
    """See `overlap.attach`."""
    _check(model)
    options = {
        "bucket_mb": bucket_mb,
        "edge_bucket_mb": edge_bucket_mb,
        "backward_passes_per_step": passes,
        "check_every": check_every,
    }
    check_same_model(model, options, engine.communicator)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no parameter that requires a gradient: there is nothing to average")
    broadcast_state(model, engine.communicator)
    attached = Attached(engine, model, int(bucket_mb * 1e6), int(edge_bucket_mb * 1e6), passes, check_every)
    for parameter in model.parameters():
        _owners[parameter] = weakref.ref(attached)
    _watch_registrations()
    return attached


@cache
def _watch_registrations() -> None:
    """Once a process: a parameter that takes an attached one's place has no hook, and ranks would drift."""
    register_module_parameter_registration_hook(_refuse_parameter)
    register_module_module_registration_hook(_refuse_module)


def _refuse_parameter(module: torch.nn.Module, name: str, new: torch.nn.Parameter | None) -> None:
    old = module._parameters.get(name)
    if old is not None and old is not new:
        _refuse(module, name, [old])


def _refuse_module(module: torch.nn.Module, name: str, new: torch.nn.Module | None) -> None:
    old = module._modules.get(name)
    if old is not None and old is not new:
        kept = set() if new is None else {id(parameter) for parameter in new.parameters()}
        _refuse(module, name, [each for each in old.parameters() if id(each) not in kept])


def _refuse(module: torch.nn.Module, name: str, replaced: list[torch.nn.Parameter]) -> None:
    for parameter in replaced:
        owner = _owner_of(parameter)
        if owner is not None and owner.has(module):
            raise ValueError(
                f"{owner.name_of(parameter)!r} of an attached model can't be replaced (by setting {name!r}): "
                "call detach() of what overlap.attach returned before, and overlap.attach(model) afterwards"
            )


def _check(model: torch.nn.Module) -> None:
    """Refuse what can't be attached, before anything is sent."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            "model is wrapped in DistributedDataParallel, which averages too: attach model.module"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape yet: run one batch through the model before attach")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name!r} is on {tensor.device}, but only CPU models can be attached yet")
    for name, parameter in model.named_parameters():
        dtype_of(f"parameter {name!r}", parameter)
        if _owner_of(parameter) is not None:
            raise ValueError(
                f"parameter {name!r} is attached already: attach a model once, or detach it before"
            )
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has a post-accumulate hook already (an optimizer in backward?), which "
                "would see gradients before they are averaged: remove it, and step after backward"
            )
