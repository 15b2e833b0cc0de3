"""Where an optimizer's step calls us: just before it, or after its closure, which makes the gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class Stepper(Protocol):
    """What steps are reported to; hashable, and referred to weakly.

    Attributes:
        number: the order in which an optimizer that holds parameters of several reports to them.
    """

    number: int

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether its gradients are averaged by this one."""

    def before_step(self, optimizer: Optimizer, loss: float | None) -> float | None:
        """All backwards of this step are done; returns the ranks' mean loss, None where there is none."""


_steppers: WeakSet[Stepper] = WeakSet()
# Of each optimizer, whose parameters it has; an entry is good as long as its groups and the steppers are.
# Weak, for a model may refer to its optimizer.
_found: WeakKeyDictionary[Optimizer, tuple[object, list[ReferenceType[Stepper]]]] = WeakKeyDictionary()
_changes = 0


def register(stepper: Stepper) -> None:
    """Report the steps of all optimizers that hold its parameters, made before or later."""
    global _changes
    if not _changes:
        register_optimizer_step_pre_hook(_before_step)
    _changes += 1
    _steppers.add(stepper)


def unregister(stepper: Stepper) -> None:
    global _changes
    _changes += 1
    _steppers.discard(stepper)


def _before_step(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    steppers = _of(optimizer)
    if not steppers:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        for stepper in steppers:
            stepper.before_step(optimizer, None)
        return None
    averaged = _averaged(closure, optimizer, steppers)
    if len(args) > 1:
        return (args[0], averaged, *args[2:]), kwargs
    return args, {**kwargs, "closure": averaged}


def _of(optimizer: Optimizer) -> list[Stepper]:
    """The steppers that own some of its parameters."""
    if not _steppers:
        return []
    state = (_changes, tuple(len(group["params"]) for group in optimizer.param_groups))
    known, found = _found.get(optimizer, (None, []))
    if known != state:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        steppers = [each for each in _steppers if any(map(each.owns, parameters))]
        found = [ref(each) for each in sorted(steppers, key=lambda stepper: stepper.number)]
        _found[optimizer] = (state, found)
    return [stepper for each in found if (stepper := each()) is not None]


def _averaged(closure: Callable[[], Any], optimizer: Optimizer, steppers: list[Stepper]) -> Callable[[], Any]:
    """The closure with the mean of all ranks' losses: line searches would else part ways."""

    @wraps(closure)
    def averaged() -> Any:
        loss = closure()
        mean = None if loss is None else float(loss)
        for stepper in steppers:
            mean = stepper.before_step(optimizer, mean)
        if loss is None or mean is None:
            return loss
        return torch.as_tensor(mean, dtype=loss.dtype) if isinstance(loss, torch.Tensor) else mean

    return averaged
