"""Compares replicas between ranks: parameters, optimizer and loss scale, by hash first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from overlap.comm.backends.base import Communicator
from overlap.comm.errors import MismatchError
from overlap.comm.objects import allgather_bytes, are_equal

from .tensors import bytes_of, values_of

_SHOWN = 8  # elements of a list that a message shows

# What to do about a difference, by the kind of item.
_ADVICE = {
    "scale": "create the GradScaler with the same arguments on every rank, load its state on all of them or "
    "on none, and call scaler.step and scaler.update on every rank after each averaged backward",
    "optimizer": "give check_replicas the same kind of optimizer on every rank",
    "option": "give the optimizer the same options on every rank, and step schedulers with values averaged "
    "over ranks (overlap.mean)",
    "parameter": "call overlap.attach before the first step; gradients that were never averaged (no_sync at "
    "step) or a step that only some ranks made are the usual causes",
    "state": "load the optimizer's state on every rank or on none; gradients that were never averaged "
    "(no_sync at step) or a step that only some ranks made are the usual causes",
}


class _Item(NamedTuple):
    """What is compared: `shown` is for people, `digest` is equal where all bits are."""

    kind: str
    shown: str
    digest: str


def check_replicas(
    communicator: Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """See `overlap.check_replicas`."""
    parameters = dict(model.named_parameters())
    _check(parameters)
    if communicator.size == 1:
        return
    items = dict(_items(parameters, optimizer, scaler))
    # Sorted: ranks may have set the same options in another order.
    sorted_items = json.dumps(items, sort_keys=True).encode()
    if are_equal(communicator, sorted_items):
        return
    replicas = [_load(each) for each in allgather_bytes(communicator, json.dumps(items).encode())]
    raise MismatchError(_first_difference(replicas))


def _check(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Refuse what has no bits to compare, before anything is sent."""
    for name, parameter in parameters.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet: run one batch through the model before check_replicas"
            )
        if parameter.device.type == "meta":
            raise ValueError(f"parameter {name!r} is on meta, without values: materialize the model first")
        if parameter.layout != torch.strided:
            raise ValueError(f"parameter {name!r} has layout {parameter.layout}, but must be torch.strided")


def _load(data: bytes) -> dict[str, _Item]:
    return {label: _Item(*fields) for label, fields in json.loads(data).items()}


# -- what is compared ------------------------------------------------------------------------------------


def _items(
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
) -> Iterator[tuple[str, _Item]]:
    """Causes come before what they bring about: other learning rates soon make other parameters."""
    scale = None if scaler is None else scaler.get_scale()
    yield "loss scale", _Item("scale", *_describe(scale))
    yield "optimizer", _Item("optimizer", "None" if optimizer is None else type(optimizer).__name__, "")
    for number, group in enumerate(optimizer.param_groups if optimizer else []):
        for option, value in group.items():
            if option != "params":
                yield f"{option} of optimizer group {number}", _Item("option", *_describe(value))
    for name, parameter in parameters.items():
        yield f"parameter {name!r}", _Item("parameter", *_describe(parameter))
    if optimizer is not None:
        yield from _state_items(parameters, optimizer)


def _state_items(
    parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, _Item]]:
    names = {parameter: repr(name) for name, parameter in parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            owner = names.get(parameter, f"parameter {index} of optimizer group {number}")
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"optimizer state {key} of {owner}", _Item("state", *_describe(value))


def _describe(value: object) -> tuple[str, str]:
    """`value` as a message shows it, and a digest of all that it is.

    Of an object that is no plain data only the type counts: its repr may hold an address.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, dict):
        return _describe_parts("dict", [part for pair in value.items() for part in pair])
    if isinstance(value, (list, tuple)):
        return _describe_parts(type(value).__name__, value)
    plain = value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype))
    shown = repr(value) if plain else type(value).__name__
    return shown, _digest(shown.encode())


def _describe_parts(kind: str, parts: Sequence[object]) -> tuple[str, str]:
    described = [_describe(part) for part in parts]
    digest = _digest(json.dumps([kind, described]).encode())
    if kind == "dict" or len(parts) > _SHOWN:
        return f"a {kind}", digest
    shown = ", ".join(text for text, _ in described)
    return f"({shown})" if kind == "tuple" else f"[{shown}]", digest


def _describe_tensor(tensor: torch.Tensor) -> tuple[str, str]:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    values = values_of(tensor)
    shown = f"a {dtype} tensor of shape {shape}" if shape else f"tensor({values.item()!r}, {dtype})"
    return shown, _digest(f"{dtype} {shape} ".encode(), bytes_of(values).data)


def _digest(*parts: bytes | memoryview) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()


# -- what a message says ---------------------------------------------------------------------------------


def _first_difference(replicas: Sequence[dict[str, _Item]]) -> str:
    """The first item in which some rank is not as rank 0 is, with the first such rank."""
    labels = dict.fromkeys(label for replica in replicas for label in replica)
    label, rank = next(
        (label, rank)
        for label in labels
        for rank, replica in enumerate(replicas)
        if replica.get(label) != replicas[0].get(label)
    )
    pair = [replicas[0].get(label), replicas[rank].get(label)]
    kind = next(item.kind for item in pair if item)
    mine, theirs = (item.shown if item else "missing" for item in pair)
    if mine == theirs:
        drift = " (drifted apart)" if kind == "parameter" else ""
        fault = f"{label} differs between rank 0 and rank {rank}{drift}"
    else:
        fault = f"{label} is {mine} on rank 0 but {theirs} on rank {rank}"
    return f"{fault}: {_ADVICE[kind]}"
