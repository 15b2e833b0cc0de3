"""A model's parameters and an optimizer's state, made those of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overlap.comm.errors import MismatchError
from overlap.comm.exchange import broadcast_object
from overlap.comm.request import Kind

from . import collectives
from .collectives import broadcast_async_, synchronize
from .started import start


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Make parameters those of `root_rank`, in place.

    Args:
        params: a `state_dict()`, `named_parameters()`, or tensors. Of a dict, entries that are no tensors are
            sent as objects and set.

    Raises:
        ValueError: `params` is something else.
    """
    handles, objects = [], []
    for name, value in _pairs_of(params):
        if isinstance(value, torch.Tensor):
            handles.append(broadcast_async_(value, root_rank, name))
        elif isinstance(params, dict):
            objects.append(name)
        elif value is not None:
            raise ValueError(f"invalid params: {name} is of type {type(value).__name__}, not a tensor")
    for handle in handles:
        synchronize(handle)
    for name in objects:
        params[name] = broadcast_object(collectives.named(), params[name], root_rank, str(name))


def _pairs_of(params: Any) -> list[tuple[Any, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items(), key=lambda pair: str(pair[0]))
    if not isinstance(params, Iterable) or isinstance(params, (str, bytes, torch.Tensor)):
        raise ValueError(f"invalid params of type: {type(params).__name__}: give model.state_dict()")
    return [each if isinstance(each, tuple) else (None, each) for each in params]


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor that is sent by itself."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: torch.nn.Module | None = None) -> None:
    """Make an optimizer's state and options those of `root_rank`; no step is made, types are kept.

    Where there is no state yet, trainable parameters get a zero gradient, as from Horovod.

    Args:
        model: whose `Embedding(sparse=True)` layers get sparse zero gradients.

    Raises:
        MismatchError: this rank's optimizer has other parameter groups than `root_rank`'s.
    """
    if not optimizer.state:
        _zero_gradients(optimizer, model)
    named = collectives.named()
    mine = named.rank == root_rank
    tensors: list[torch.Tensor] = []
    described = _taken_apart(_content_of(optimizer), tensors) if mine else None
    described = broadcast_object(named, described, root_rank, "broadcast_optimizer_state")
    if not mine:
        content = _put_together(described, tensors)
    if tensors:
        options: dict[str, Any] = {"root": root_rank, "joinable": False}
        start(named, Kind.BROADCAST, "broadcast_optimizer_state", tensors, True, **options).wait()
    if not mine:
        _assign(optimizer, content)


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _content_of(optimizer: Any) -> dict[str, Any]:
    """Options by group, and states by the parameters' places."""
    options = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    places = {parameter: place for place, parameter in enumerate(_parameters_of(optimizer))}
    states = {places[key]: dict(value) for key, value in optimizer.state.items() if key in places}
    counts = [len(group["params"]) for group in optimizer.param_groups]
    return {"counts": counts, "options": options, "states": states}


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with each tensor in it put in `tensors` and replaced by what describes it."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        tensors.append(value.detach())
        return _Tensor(value.dtype, tuple(value.shape))
    if type(value) is dict:
        return {key: _taken_apart(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_taken_apart(each, tensors) for each in value)
    return value


def _put_together(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse: with tensors that are yet to be filled."""
    if isinstance(value, _Tensor):
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]
    if type(value) is dict:
        return {key: _put_together(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_together(each, tensors) for each in value)
    return value


def _assign(optimizer: Any, content: dict[str, Any]) -> None:
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if counts != content["counts"]:
        raise MismatchError(
            f"broadcast_optimizer_state: this rank's groups have {counts} parameters, the root's "
            f"{content['counts']}"
        )
    for group, options in zip(optimizer.param_groups, content["options"], strict=True):
        group.update(options)
    for place, parameter in enumerate(_parameters_of(optimizer)):
        if place in content["states"]:
            optimizer.state[parameter] = content["states"][place]
        else:
            optimizer.state.pop(parameter, None)


def _zero_gradients(optimizer: Any, model: torch.nn.Module | None) -> None:
    sparse = set()
    for module in () if model is None else model.modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            sparse.add(module.weight)
    for parameter in _parameters_of(optimizer):
        if not parameter.requires_grad:
            continue
        if parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam):
            indices = torch.empty((1, 0), dtype=torch.int64)
            values = parameter.new_empty((0, *parameter.shape[1:]))
            parameter.grad = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
        else:
            parameter.grad = torch.zeros_like(parameter)
