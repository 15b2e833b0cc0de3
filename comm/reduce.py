"""Reduction kernels: numpy's on any memory, torch's for 16-bit floats where torch is installed.

A reduction goes block by block, each small enough to stay in a core's cache from the first read to the last
write, and folds its sources in the order given: so the bits depend on neither block nor place.
"""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from overlap.comm.dtype import DType, Op

BLOCK_BYTES = 128 * 1024
# Torch's kernels use its thread pool above 32,768 elements, which an engine thread must not start; where
# torch has one thread, larger blocks spread the cost of its calls (65,536: 15 % faster; 131,072: slower).
_BLOCK_16BIT, _BLOCK_16BIT_ALONE = 32 * 1024, 64 * 1024
_BLOCK_NUMPY = 64 * 1024

_FOLDS: dict[Op, Callable[..., Any]] = {
    Op.SUM: np.add,
    Op.AVERAGE: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
}

# One block a thread and type: channels reduce at the same time.
_scratch = threading.local()


def reduce_into(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    op: Op,
    dtype: DType,
    divisor: float = 1,
) -> None:
    """Fold `sources` elementwise, in their order, and write the result to every target.

    Args:
        sources: 1-D arrays of equal length in `dtype.storage`.
        targets: likewise; a target may be one of the sources, else it must not overlap any.
        op: AVERAGE sums and divides by `divisor`.
    """
    with np.errstate(all="ignore"):
        if dtype in (DType.FLOAT16, DType.BFLOAT16):
            kernel = _torch_16bit if has_torch() else _numpy_16bit
            kernel(sources, targets, op, dtype, divisor)
            return
        if dtype.is_complex and op in (Op.SUM, Op.AVERAGE):
            parts = np.dtype(f"f{dtype.itemsize // 2}")
            sources = [source.view(parts) for source in sources]
            targets = [target.view(parts) for target in targets]
        _numpy(sources, targets, op, divisor if op is Op.AVERAGE else 1)


def _numpy(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: Op, divisor: float) -> None:
    storage, count = sources[0].dtype, len(sources[0])
    fold = _complex_product if op is Op.PRODUCT and storage.kind == "c" else _FOLDS[op]
    scale, factor = _scaling(divisor, storage)
    block = BLOCK_BYTES // storage.itemsize
    # With two sources each element is read before it is written, so a target can hold the running value.
    own = None if len(sources) <= 2 else _block(storage, block)
    for start in range(0, count, block):
        piece = slice(start, min(start + block, count))
        value = targets[0][piece] if own is None else own[: piece.stop - start]
        if len(sources) == 1:
            np.copyto(value, sources[0][piece])
        else:
            fold(sources[0][piece], sources[1][piece], out=value)
        for source in sources[2:]:
            fold(value, source[piece], out=value)
        if factor != 1:
            scale(value, factor, out=value)
        for target in targets[1:] if own is None else targets:
            np.copyto(target[piece], value)


def _complex_product(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """By parts: numpy's own product is fused or not, depending on an array's length and place."""
    real = x.real * y.real - x.imag * y.imag
    out.imag = x.real * y.imag + x.imag * y.real
    out.real = real


def _scaling(divisor: float, storage: np.dtype[Any]) -> tuple[Callable[..., Any], Any]:
    """Division by `divisor`: by multiplication only where that gives the same bits (powers of two)."""
    if math.frexp(divisor)[0] == 0.5 and 2.0**-100 < divisor < 2.0**100:
        return np.multiply, storage.type(1 / divisor)
    return np.divide, storage.type(divisor)


def _block(storage: np.dtype[Any], count: int) -> np.ndarray:
    blocks = _scratch.__dict__.setdefault("blocks", {})
    if (storage, count) not in blocks:
        # On a cache line of its own: AVX-512 loads that straddle two cost a third of the time.
        memory = np.empty(count * storage.itemsize + 64, np.uint8)
        start = -memory.ctypes.data % 64
        blocks[storage, count] = memory[start : start + count * storage.itemsize].view(storage)
    result: np.ndarray = blocks[storage, count]
    return result


def has_torch() -> bool:
    """Whether 16-bit floats are reduced by torch's kernels (several times as fast as numpy's)."""
    global _has_torch
    if _has_torch is None:
        _has_torch = importlib.util.find_spec("torch") is not None
    return _has_torch


def use_torch(wanted: bool | None) -> None:
    """Whether to use torch's kernels; None (at first) is where it is installed."""
    global _has_torch
    _has_torch = wanted


_has_torch: bool | None = None


def _torch_16bit(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: Op, dtype: DType, divisor: float
) -> None:
    import torch

    kind = torch.bfloat16 if dtype is DType.BFLOAT16 else torch.float16
    block = _BLOCK_16BIT_ALONE if torch.get_num_threads() == 1 else _BLOCK_16BIT

    def blocks(arrays: Sequence[np.ndarray]) -> list[tuple[torch.Tensor, ...]]:
        tensors = [torch.from_numpy(array.view(np.int16)).view(kind) for array in arrays]
        return list(zip(*(tensor.split(block) for tensor in tensors), strict=True))

    # Views are half of what a call costs: an allreduce's targets are its sources.
    reads = blocks(sources)
    writes = reads if targets is sources else blocks(targets)
    total, term = torch.from_numpy(_block(np.dtype("f4"), 2 * block)).split(block)
    scale, factor = _scaling(divisor if op is Op.AVERAGE else 1, np.dtype("f4"))
    for (first, *others), (target, *copies) in zip(reads, writes, strict=True):
        value = total if len(first) == block else total[: len(first)]
        value.copy_(first)
        for other in others:
            if op in (Op.SUM, Op.AVERAGE):
                value.add_(other)
            else:
                # Numpy's: torch's vector and scalar code differ in which zero is the smaller one.
                _FOLDS[op](value.numpy(), term[: len(first)].copy_(other).numpy(), out=value.numpy())
        if factor != 1:
            value.mul_(factor.item()) if scale is np.multiply else value.div_(factor.item())
        target.copy_(value)
        for copy in copies:
            copy.copy_(target)


def _numpy_16bit(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: Op, dtype: DType, divisor: float
) -> None:
    widen, narrow = (_widen, _narrow) if dtype is DType.FLOAT16 else (_widen_pairs, _narrow_pairs)
    fold, count = _FOLDS[op], len(sources[0])
    scale, factor = _scaling(divisor if op is Op.AVERAGE else 1, np.dtype("f4"))
    total, other = _block(np.dtype("f4"), _BLOCK_NUMPY), _block(np.dtype("f4"), _BLOCK_NUMPY + 2)
    for start in range(0, count, _BLOCK_NUMPY):
        piece = slice(start, min(start + _BLOCK_NUMPY, count))
        even = piece.stop - start + (piece.stop - start) % 2
        value, term = total[:even], other[:even]
        widen(sources[0][piece], value)
        for source in sources[1:]:
            widen(source[piece], term)
            fold(value, term, out=value)
        if factor != 1:
            scale(value, factor, out=value)
        result = narrow(value, term)[: piece.stop - start]
        for target in targets:
            np.copyto(target[piece], result)


def scale(array: np.ndarray, dtype: DType, factor: float) -> None:
    """Multiply `array` (any shape, in `dtype.storage`) in place.

    16-bit floats are multiplied in float32 and rounded once, integers in float64 and truncated towards zero.
    """
    if factor == 1 or not array.size:
        return
    with np.errstate(all="ignore"):
        if dtype is DType.BFLOAT16:
            array[...] = _from_float32(_to_float32(array) * np.float32(factor))
        elif dtype is DType.FLOAT16:
            array[...] = array.astype(np.float32) * np.float32(factor)
        elif dtype.is_floating or dtype.is_complex:
            np.multiply(array, array.dtype.type(factor), out=array)
        else:
            array[...] = np.trunc(array.astype(np.float64) * factor).astype(array.dtype)


def to_float64(array: np.ndarray, dtype: DType) -> np.ndarray:
    """A real array's values, 1-D; a copy."""
    values = _to_float32(array) if dtype is DType.BFLOAT16 else array
    return values.reshape(-1).astype(np.float64)


def from_float64(values: np.ndarray, array: np.ndarray, dtype: DType) -> None:
    """Write `values` (1-D) to `array`, rounded to its type."""
    with np.errstate(all="ignore"):
        if dtype is DType.BFLOAT16:
            array[...] = _from_float32(values.astype(np.float32)).reshape(array.shape)
        else:
            array[...] = values.reshape(array.shape)


def _to_float32(bfloat16: np.ndarray) -> np.ndarray:
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def _from_float32(values: np.ndarray) -> np.ndarray:
    """To bfloat16: to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _widen(half: np.ndarray, out: np.ndarray) -> None:
    """float16 to float32, exactly."""
    np.copyto(out[: len(half)], half)


def _narrow(value: np.ndarray, _: np.ndarray) -> np.ndarray:
    return value.astype(np.float16)


# Note: bfloat16 in pairs. Numpy converts between 16 and 32 bits one element at a time, but shifts and masks
# 32 bits in vectors. So two bfloat16 are read as one number of 32 bits; its low halves, shifted up, fill the
# first half of the float32 block, its high halves the second.


def _widen_pairs(half: np.ndarray, out: np.ndarray) -> None:
    """bfloat16 to float32, exactly; the last of an odd number is paired with anything."""
    if len(half) % 2 or half.ctypes.data % 4:
        padded = np.zeros(len(out), np.uint16)
        padded[: len(half)] = half
        half = padded
    pairs, planes = half.view(np.uint32), out.view(np.uint32).reshape(2, -1)
    np.left_shift(pairs, 16, out=planes[0])
    np.bitwise_and(pairs, 0xFFFF0000, out=planes[1])


def _narrow_pairs(value: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, to nearest, ties to even.

    A NaN can't be carried into infinity: those that come of bfloat16 or of arithmetic end in 16 zeros.
    """
    bits, rounded = value.view(np.uint32), scratch.view(np.uint32)
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    low, high = rounded.reshape(2, -1)
    np.right_shift(low, 16, out=low)
    np.bitwise_and(high, 0xFFFF0000, out=high)
    return np.bitwise_or(low, high, out=low).view(np.uint16)
