"""Weighted averages: each gradient is multiplied by its rank's weight before it is accumulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .slots import Slot


class Weights:
    """Pre-hooks of the nodes that accumulate gradients; afterwards two micro-batches can't be told apart.

    Args:
        slots: of all parameters.
        fresh: whether a slot's gradient has not been accumulated since it was last averaged: then what `grad`
            holds is an average already, and is set aside.

    Attributes:
        current: the weight of the next backward; None where all count alike.
        last: what this rank counted in the last round.
    """

    def __init__(self, slots: Sequence[Slot], fresh: Callable[[Slot], bool]) -> None:
        self.current: float | None = None
        self._total = 0.0
        self.last: float | None = None
        self._slots, self._fresh = slots, fresh
        # Torch holds these nodes weakly; a parameter's is another one once it was frozen or changed type.
        self._nodes: dict[int, Any] = {}
        self._hooks: dict[int, Any] = {}
        self._aside: dict[int, torch.Tensor] = {}

    def register(self) -> None:
        """Hook what is trainable and not hooked yet."""
        for slot in self._slots:
            if slot.parameter.requires_grad:
                self._register(slot)

    def _register(self, slot: Slot) -> None:
        with torch.enable_grad():
            edge: Any = slot.parameter.view_as(slot.parameter).grad_fn
        node = edge.next_functions[0][0]
        if self._nodes.get(slot.index) is node:
            return

        def weigh(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
            weight = self.current
            if weight is None:
                return None
            if self._fresh(slot):
                self.set_aside(slot)
            return tuple(None if gradient is None else _scaled(gradient, weight) for gradient in gradients)

        if slot.index in self._hooks:
            self._hooks[slot.index].remove()
        self._nodes[slot.index], self._hooks[slot.index] = node, node.register_prehook(weigh)

    def add(self) -> None:
        """A backward begins."""
        self._total += self.current or 0.0

    def told(self) -> float | None:
        """What the other ranks are told: the weight of all backwards since the last average."""
        return self._total if self.current is not None or self._total else None

    def set_aside(self, slot: Slot) -> None:
        """Where there are weights: take what `grad` holds out of the round; they must not change it."""
        if self.told() is None:
            return
        if slot.parameter.grad is not None and slot.index not in self._aside:
            self._aside[slot.index] = slot.parameter.grad
            slot.parameter.grad = None

    def put_back(self) -> None:
        """Add what was set aside to what the round has given."""
        for index, held in self._aside.items():
            parameter = self._slots[index].parameter
            if parameter.grad is None:
                parameter.grad = held
            elif parameter.grad is not held:  # as where no rank has touched it
                with torch.no_grad():
                    parameter.grad.add_(held)
        self._aside.clear()

    def end_round(self) -> None:
        """Whatever became of it: what was set aside and not put back is void."""
        self.last, self._total = self.told(), 0.0
        self._aside.clear()

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._nodes, self._hooks = {}, {}


def _scaled(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    """`gradient` times `weight`; zeros where the weight is 0, be the gradient NaN (from 0 / 0)."""
    with torch.no_grad():
        return gradient * weight if weight else torch.zeros_like(gradient)
