"""What a training script does beside training, on all ranks: work of rank 0, means, a first check."""

from __future__ import annotations

import hashlib
import numbers
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.dtype import Op
from overlap.comm.errors import MismatchError
from overlap.comm.objects import allgather_bytes
from overlap.comm.span import Span
from overlap.comm.warn import warn

from . import runtime

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# A length that no set-up call sends: `attach` and these calls can't be taken for each other.
_CALL_BYTES = 248
# What rank 0 is at while the others wait for it.
_alone = ""


class _RankZeroTraceback(Exception):
    """Rank 0's traceback, as text: tracebacks can't be pickled."""


def on_rank_zero(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `fn(*args, **kwargs)` on rank 0 only; its result is returned on every rank, when it has ended.

    Collective: every rank calls it, however long `fn` takes. Rank 0 has the result itself, the others a
    pickled copy. `fn` must not make collective calls: the other ranks don't run it.

    Raises:
        MismatchError: a rank called something else; `fn` was not called.
        TypeError: the result can't be pickled (on all ranks).
        PeerLost: another rank failed meanwhile.
        Exception: what `fn` raised, on all ranks with the same type and text; the other ranks' has rank 0's
            traceback as its cause. One that can't be pickled becomes a RuntimeError, on all ranks, with the
            type's name and the text.
    """
    with _collective("on_rank_zero") as communicator:
        if communicator.rank:
            value: T = _receive(communicator)
            return value
        with _reported(communicator, "on_rank_zero") as results:
            results.append(fn(*args, **kwargs))
        value = results[0]
        return value


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """In a `with` block: rank 0 runs the block first, the other ranks when it has finished.

    Collective: every rank enters the block. The block must not make collective calls.

    Raises:
        MismatchError: a rank called something else; no rank has run the block.
        PeerLost: another rank failed meanwhile.
        Exception: what rank 0's block raised, as in `on_rank_zero`: the others then don't run theirs. What
            the block raises on another rank is raised there only.
    """
    with _collective("rank_zero_first") as communicator:
        if communicator.rank:
            _receive(communicator)
        else:
            with _reported(communicator, "rank_zero_first") as results:
                yield
                results.append(None)
    if communicator.rank:
        yield


@overload
def mean(x: float) -> float: ...
@overload
def mean(x: np.ndarray) -> np.ndarray: ...
@overload
def mean(x: torch.Tensor) -> torch.Tensor: ...
def mean(x: Any) -> Any:
    """The mean over all ranks of a number, an array or a tensor, element by element; equal bits on all ranks.

    Collective. The result is a float for numbers and bools, else a new array or tensor of `x`'s shape and
    dtype, contiguous and without a gradient. 16-bit floats are summed in float32.

    Args:
        x: a number, or a numpy array or torch CPU tensor of floats (or complex numbers), of any layout; the
            same shape and dtype on every rank.

    Raises:
        TypeError, ValueError: not such an `x`; integers must be converted to float. Nothing was sent.
        MismatchError: kinds, shapes or dtypes differ between ranks, or a rank called something else.
        PeerLost: another rank failed meanwhile.
    """
    kind, result, span = _copied(x)
    if not (span.dtype.is_floating or span.dtype.is_complex):
        raise ValueError(f"x is of {span.dtype.value}, which holds no mean: convert it to float")
    with _collective(f"mean of {kind}") as communicator:
        communicator.allreduce(span, Op.AVERAGE)
    return result.item() if kind == "a number" else result


def check_batch(batch: Any) -> None:
    """Warn, once and on rank 0, where all ranks have the same `batch`: their data was not sharded.

    Collective; for the first batch, before training. Training goes on either way, and in a job of one rank
    nothing is said. The batch's shapes, dtypes and values are hashed (on the CPU), not sent.

    Args:
        batch: arrays, tensors, numbers and strings in any nesting of tuples, lists and dicts. Anything else
            is compared by its `repr`.

    Raises:
        MismatchError: a rank called something else.
        PeerLost: another rank failed meanwhile.
    """
    digest = hashlib.sha256()
    _hash(digest.update, batch)
    with _collective("check_batch") as communicator:
        digests = allgather_bytes(communicator, digest.digest())
    if communicator.rank == 0 and len(digests) > 1 and len(set(digests)) == 1:
        warn(
            f"all {len(digests)} ranks have the same first batch, so they all compute the same: give each "
            f"rank its own part of the data with overlap.shard(loader)",
            stacklevel=2,
        )


@contextmanager
def _collective(call: str) -> Iterator[Communicator]:
    """The world's communicator, when every rank has made the same `call`."""
    runtime.init()
    if _alone:
        raise ValueError(
            f"overlap.{call.split()[0]} is a collective call, but only rank 0 runs what is in {_alone}: make "
            f"it outside, on every rank"
        )
    communicator = runtime.engine().communicator
    communicator.doing = call
    try:
        _check_same_call(communicator, call)
        yield communicator
    finally:
        communicator.doing = ""


def _check_same_call(communicator: Communicator, call: str) -> None:
    size, rank = communicator.size, communicator.rank
    calls = np.zeros((size, _CALL_BYTES), np.uint8)
    data = np.frombuffer(call.encode()[:_CALL_BYTES], np.uint8)
    calls[rank, : len(data)] = data
    communicator.allgather(Span.wrap(calls), [_CALL_BYTES] * size)
    texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in calls]
    for other, text in enumerate(texts):
        if text != texts[0]:
            raise MismatchError(
                f"ranks call different things: rank 0 {texts[0]}; rank {other} {text}. Every rank must make "
                f"the same calls in the same order, with the same shapes and dtypes"
            )


@contextmanager
def _reported(communicator: Communicator, call: str) -> Iterator[list[Any]]:
    """Rank 0's part: tell the others how the block ends, and the result that it puts in the list."""
    global _alone
    results: list[Any] = []
    several = communicator.size > 1
    _alone = call
    try:
        yield results
        data = _pickled(results[0]) if several else b""
    except BaseException as error:
        told = _portable(error) if several else error
        if several:
            _send(communicator, pickle.dumps((None, told, traceback.format_exc())))
        if told is error:
            raise
        raise told from error
    finally:
        _alone = ""
    if several:
        _send(communicator, data)


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps((result, None, ""))
    except Exception as error:
        raise TypeError(
            f"fn must return what can be pickled, for the other ranks, not {type(result).__name__}: {error}"
        ) from error


def _portable(error: BaseException) -> BaseException:
    """`error`, or where pickling would lose its type or text, a RuntimeError that tells both."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _send(communicator: Communicator, data: bytes) -> None:
    communicator.broadcast(Span.wrap(np.array([len(data)], np.int64)), 0)
    communicator.broadcast(Span.wrap(np.frombuffer(data, np.uint8).copy()), 0)


def _receive(communicator: Communicator) -> Any:
    """Rank 0's result; raises what it raised."""
    length = np.zeros(1, np.int64)
    while True:
        try:
            communicator.broadcast(Span.wrap(length), 0)
            break
        except MismatchError:
            # Rank 0 made another collective call where it was alone. It has the same error, and reports it.
            continue
    data = np.empty(length[0], np.uint8)
    communicator.broadcast(Span.wrap(data), 0)
    result, error, text = pickle.loads(data.tobytes())  # noqa: S301 - from rank 0
    if error is not None:
        raise error from _RankZeroTraceback(f"on rank 0:\n\n{text}")
    return result


def _copied(x: Any) -> tuple[str, Any, Span]:
    """What `x` is, in words, a copy of it, and the copy's memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _copied_tensor(x)
    if isinstance(x, np.ndarray):
        copy = np.array(x, x.dtype.newbyteorder("="), order="C", subok=False)
        return f"an array of {copy.dtype}, shape {copy.shape}", copy, Span.wrap(copy)
    if isinstance(x, (numbers.Real, np.bool_)):
        number = np.array(float(x))
        return "a number", number, Span.wrap(number)
    raise TypeError(f"x must be a real number, a numpy array or a torch tensor, not {type(x).__name__}")


def _copied_tensor(x: torch.Tensor) -> tuple[str, Any, Span]:
    from overlap.frameworks.torch.tensors import dtype_of, span_of, values_of

    if x.device.type != "cpu":
        raise ValueError(f"x is on {x.device}, but only CPU tensors can be averaged yet: use x.cpu()")
    if str(x.layout) != "torch.strided":
        raise ValueError(f"x is of layout {x.layout}: use x.to_dense()")
    dtype = dtype_of("x", x)
    copy = values_of(x.detach().clone())
    return f"a tensor of {dtype.value}, shape {tuple(copy.shape)}", copy, span_of(copy, dtype)


def _hash(update: Callable[[Any], None], value: Any) -> None:
    """Feed `value`'s kind, shape and contents to a hash, so that different values feed different bytes."""
    torch = sys.modules.get("torch")
    if isinstance(value, Mapping):
        update(f"mapping {len(value)};".encode())
        for key, each in value.items():
            _hash(update, key)
            _hash(update, each)
    elif isinstance(value, (tuple, list)):
        update(f"sequence {len(value)};".encode())
        for each in value:
            _hash(update, each)
    elif torch is not None and isinstance(value, torch.Tensor) and _is_plain(value):
        _hash_tensor(update, value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"array {value.dtype} {value.shape};".encode())
        update(value.tobytes())
    else:
        text = repr(value)
        update(f"{type(value).__name__} {len(text)};{text}".encode(errors="surrogatepass"))


def _is_plain(tensor: torch.Tensor) -> bool:
    return str(tensor.layout) == "torch.strided" and not tensor.is_quantized


def _hash_tensor(update: Callable[[Any], None], tensor: torch.Tensor) -> None:
    from overlap.frameworks.torch.tensors import bytes_of, values_of

    update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
    update(bytes_of(values_of(tensor)))
