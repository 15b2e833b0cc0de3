"""The plain computation that every backend's results are compared with, and the data for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from overlap.comm.dtype import DType, Op, check_reducible

HALVES = (DType.FLOAT16, DType.BFLOAT16)
FOLDS = {
    Op.SUM: np.add,
    Op.AVERAGE: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
}


def allowed(op: Op, dtype: DType) -> bool:
    try:
        check_reducible(op, dtype, None)
    except ValueError:
        return False
    return True


def widened(array: np.ndarray, dtype: DType) -> np.ndarray:
    """In the type that it is accumulated in."""
    if dtype is DType.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype is DType.FLOAT16 else array


def narrowed(values: np.ndarray, dtype: DType) -> np.ndarray:
    """In storage: rounded to nearest, ties to even."""
    if dtype is DType.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    return values.astype(dtype.storage)


def whole(dtype: DType, count: int, rank: int) -> np.ndarray:
    """Small whole numbers: sums and products are exact in every type."""
    values = (np.arange(count) * (2 * rank + 3) + 5 * rank) % 7
    if dtype is DType.BOOL:
        return values % 3 > 0
    if dtype.is_floating or dtype.is_complex or dtype.value.startswith("int"):
        values = values - 3
    return narrowed(values + 1j * (values[::-1] - 1) if dtype.is_complex else values, dtype)


def random(dtype: DType, count: int, rank: int, seed: int = 0) -> np.ndarray:
    """Floats of many magnitudes, integers of every bit pattern: what is not rounded in rank order differs."""
    rng = np.random.default_rng([seed, rank])
    if dtype is DType.BOOL:
        return rng.integers(0, 2, count, np.uint8).astype(bool)
    if not (dtype.is_floating or dtype.is_complex):
        return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype.storage).copy()

    def floats() -> np.ndarray:
        return rng.standard_normal(count) * 2.0 ** rng.integers(-9, 9, count)

    return narrowed(floats() + 1j * floats() if dtype.is_complex else floats(), dtype)


def reduced(parts: list[np.ndarray], op: Op, dtype: DType, divisor: float | None = None) -> np.ndarray:
    """All ranks' parts folded in rank order."""
    with np.errstate(all="ignore"):
        value = widened(parts[0], dtype).copy()
        for part in parts[1:]:
            if op is Op.PRODUCT and dtype.is_complex:
                value = product(value, part)
            else:
                value = FOLDS[op](value, widened(part, dtype))
        if op is Op.AVERAGE:
            # By parts: numpy's complex division by a real number is a division of complex numbers.
            reals = value.view(f"f{value.itemsize // 2}") if dtype.is_complex else value
            reals /= reals.dtype.type(len(parts) if divisor is None else divisor)
        return narrowed(value, dtype)


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Each product and sum rounded: numpy's own is fused or not, depending on the array's length."""
    result = np.empty_like(x)
    result.real = x.real * y.real - x.imag * y.imag
    result.imag = x.real * y.imag + x.imag * y.real
    return result


def same(found: np.ndarray, expected: np.ndarray, dtype: DType) -> bool:
    if dtype.is_floating or dtype.is_complex:
        return np.array_equal(widened(found, dtype), widened(expected, dtype), equal_nan=True)
    return found.tobytes() == expected.tobytes()


def check(found: np.ndarray, expected: np.ndarray, dtype: DType, *what: Any) -> None:
    """Raise with the first difference."""
    if same(found, expected, dtype):
        return
    place = next(i for i in range(len(expected)) if not same(found[i : i + 1], expected[i : i + 1], dtype))
    raise AssertionError(
        f"{what}: element {place} of {len(expected)} is {widened(found, dtype)[place]!r}, "
        f"not {widened(expected, dtype)[place]!r}"
    )
