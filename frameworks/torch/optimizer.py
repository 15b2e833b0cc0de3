"""`DistributedOptimizer`: Horovod's, on the buckets that `overlap.attach` averages behind backward."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from overlap.comm.dtype import Op
from overlap.comm.engine import Engine
from overlap.comm.request import WORLD

from . import lifetime
from .averaging import AdasumDeltas, Averaging, Compressed, Named, Overlapped
from .compression import Compression, NoneCompressor
from .rounds import Options
from .tensors import dtype_of

Average, Sum, Adasum, Min, Max, Product = range(6)
_OPS = {Average: Op.AVERAGE, Sum: Op.SUM, Min: Op.MIN, Max: Op.MAX, Product: Op.PRODUCT}


def engine() -> tuple[Engine, tuple[int, int]]:
    """This process's engine, and bucket_bytes and edge_bytes of `make_plan`; `overlap.torch` sets it."""
    raise ValueError("overlap is not initialized: import overlap.torch, and call its init() first")


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """An optimizer like `optimizer`, whose gradients are those of all ranks together. Collective.

    They are reduced behind backward; `step` waits for what is left, after which every trainable parameter has
    a gradient (zeros where no rank has used it). State, defaults and groups are `optimizer`'s own, which is
    not to be stepped any more. A pickle or copy is a plain optimizer of the wrapped class.

    Args:
        named_parameters: names of all parameters of `optimizer`, for messages.
        compression: what gradients are sent as: `Compression.none`, `fp16`, `bf16`, or a class with
            `compress` and `decompress`, which costs the overlap with backward.
        backward_passes_per_step: how many backwards a gradient is the sum of before it is reduced.
        op: Average, Sum, Min, Max, Product; or Adasum, which combines how far each rank's own step came.
        gradient_predivide_factor: only checked: 16-bit gradients are added in float32.
        num_groups, groups: only checked: gradients are sent in buckets.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that take part; all unless given. On others the optimizer is a local one.

    Raises:
        ValueError: an argument that makes no sense; says which.
        NotImplementedError: op=Adasum on some ranks only.
    """
    _check(op, gradient_predivide_factor, backward_passes_per_step)
    _check_groups(groups, num_groups)
    named = _named(optimizer, named_parameters)
    own, limits = engine()
    group, size = WORLD, own.world.size
    if process_set is not None and process_set.process_set_id != WORLD:
        if op == Adasum and size > 1:
            raise NotImplementedError("op=Adasum works with the global process set only")
        if process_set.process_set_id is None:
            raise ValueError(f"{process_set} is not registered: pass it to add_process_set before")
        group, size = process_set.process_set_id, process_set.size() if process_set.included() else 1
    wire = getattr(compression, "wire", None)
    base = type(optimizer)
    made = type(base.__name__, (_Distributed, base), {"__module__": __name__, "__doc__": base.__doc__})
    self: Any = object.__new__(made)
    # Not a learning-rate scheduler's `step`, which is bound to `optimizer`.
    self.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    self._base = base

    def start() -> None:
        _check_parameters(named)
        if op == Adasum:
            self._adasum = AdasumDeltas(own, named, compression)
        else:
            options = Options(limits, self._passes, _OPS[op], wire, sparse_as_dense, once=True)
            self._averaging = _start(own, named, compression, options, group)

    self._passes = backward_passes_per_step
    if size > 1:
        self._named, self._restart = named, start
        start()
    return self


def _start(engine: Engine, named: Named, compression: Any, options: Options, group: int) -> Averaging:
    if compression is not NoneCompressor and options.wire is None:
        return Compressed(engine, named, options.op, compression, group)
    return Overlapped(engine, named, options, group)


class _Distributed:
    """What a distributed optimizer does otherwise than the wrapped class, which comes after it in line."""

    _base: type[Optimizer]
    _named: dict[str, torch.nn.Parameter]
    _averaging: Averaging | None = None
    _adasum: AdasumDeltas | None = None
    _restart: Callable[[], None] | None = None
    _passes = 1
    _synchronized, _should_synchronize = False, True

    def synchronize(self) -> None:
        """Wait until all gradients are reduced: to clip them, or look at them, before `step`. Collective.

        Put the `step` that follows into `skip_synchronize`.
        """
        self._finish(None)

    def _finish(self, loss: float | None) -> float | None:
        if self._averaging is not None:
            loss = self._averaging.finish(loss)
        self._synchronized = True
        return loss

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around a `step` that follows `synchronize`."""
        if self._adasum is not None:
            raise AssertionError(
                "skip_synchronize() has no meaning with op=Adasum, which combines steps, not gradients"
            )
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is left, and step. A closure's gradients and losses are reduced each time it is called.

        A gradient scaler's `step` comes here only where gradients are finite, so call `synchronize` and
        `scaler.unscale_` before it, and put it into `skip_synchronize`.
        """
        local_step: Callable[..., Any] = super().step  # type: ignore[misc]
        if self._adasum is not None:
            return self._adasum.step(lambda: local_step(closure))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize(), though gradients were "
                    "synchronized already: ranks meet once more for nothing. Write `with "
                    "optimizer.skip_synchronize(): optimizer.step()` after optimizer.synchronize()",
                    stacklevel=2,
                )
            if closure is None:
                self._finish(None)
            else:
                closure = self._averaged(closure)
        self._synchronized = False
        return local_step(closure) if closure is not None else local_step()

    # Torch would call hooks of steps here, and again in the wrapped class's `step`.
    step.hooked = True  # type: ignore[attr-defined]

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with the mean of all ranks' losses: line searches would else part ways."""

        @wraps(closure)
        def averaged() -> Any:
            loss = closure()
            mean = self._finish(None if loss is None else float(loss))
            if mean is None:
                return loss
            return torch.as_tensor(mean, dtype=loss.dtype) if isinstance(loss, torch.Tensor) else mean

        return averaged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped class does, but not between a backward and the `step` that it was for."""
        if self._averaging is not None and self._averaging.pending():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(), which throws away what was averaged: call it before backward"
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backwards a gradient is the sum of, from now on; the same on all ranks."""
        _check_passes(passes)
        self._passes = passes
        if self._averaging is not None:
            self._averaging.set_passes(passes)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped class does; backwards before it don't count."""
        self._synchronized = False
        if self._averaging is not None:
            self._averaging.forget()
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped class does; the new parameters' gradients are reduced too. Collective."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._restart is None:
            return
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        if self._averaging is not None:
            self._averaging.detach()
        for place, parameter in enumerate(groups[-1]["params"]):
            self._named[f"allreduce.noname.{len(groups) - 1}.{place}"] = parameter
        self._restart()

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = getattr(self, "_base", None)
        if base is None:
            return super().__reduce_ex__(protocol)
        return _plain, (base,), self.__getstate__()


def _plain(base: type[Optimizer]) -> Optimizer:
    """What a pickle begins with."""
    optimizer: Optimizer = object.__new__(base)
    return optimizer


# -- checks ----------------------------------------------------------------------------------------------


def _check(op: int, gradient_predivide_factor: float, passes: int) -> None:
    if op not in range(6) or isinstance(op, bool):
        raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    _check_passes(passes)


def _check_passes(passes: int) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes!r}")


def _check_groups(groups: Any, num_groups: int) -> None:
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return
    if not isinstance(groups, list) and not (isinstance(groups, int) and groups > 0):
        raise ValueError(
            f"groups should be a non-negative integer or a list of list of torch.Tensor, not {groups!r}"
        )
    if isinstance(groups, int):
        return
    members = [each for group in groups for each in (group if isinstance(group, (list, tuple)) else [group])]
    if not all(isinstance(each, torch.Tensor) for each in members):
        raise ValueError("groups must consist of torch.Tensor, in lists: list of list of torch.Tensor")
    if len({id(each) for each in members}) < len(members):
        raise ValueError("groups: a parameter can only appear once in groups")


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters, in its order, by their names."""
    if named_parameters is None:
        return {
            f"allreduce.noname.{number}.{place}": parameter
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()"
        )
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    names = {id(parameter): name for name, parameter in pairs}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unnamed = [place for place, parameter in enumerate(parameters) if id(parameter) not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: the "
            f"optimizer's parameters number {unnamed}. Give those of all its groups"
        )
    return {names[id(parameter)]: parameter for parameter in parameters}


def _check_parameters(named: Named) -> None:
    """Refuse what can't be averaged, before anything is sent; let go of an earlier optimizer's parameters."""
    for name, parameter in named.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name!r} has no shape yet: run one batch through the model before")
        if parameter.device.type != "cpu":
            raise ValueError(f"{name!r} is on {parameter.device}, but only CPU tensors can be averaged yet")
        dtype_of(f"parameter {name!r}", parameter)
        owner = lifetime.owner_of(parameter)
        if isinstance(owner, Overlapped):
            owner.detach()
        elif owner is not None:
            raise ValueError(f"parameter {name!r} is attached already: use overlap.attach or this, not both")
        elif parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has a post-accumulate hook already (an optimizer in backward?), which "
                "would see gradients before they are averaged: remove it, and step after backward"
            )
