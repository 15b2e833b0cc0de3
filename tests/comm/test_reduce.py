"""Kernels: each 16-bit kernel rounds once and to even, averages are exact, and nonsense is refused."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from overlap.comm import reduce
from overlap.comm.dtype import DType, Op, check_reducible


@pytest.fixture(params=["numpy", "torch"])
def kernel(request):
    if request.param == "torch":
        pytest.importorskip("torch")
    reduce.use_torch(request.param == "torch")
    yield request.param
    reduce.use_torch(None)


def halves(values, dtype):
    kind = ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else np.float16
    return np.array(values, np.float32).astype(kind).view(dtype.storage)


def result(rows, op, dtype, divisor=1):
    arrays = [halves(row, dtype) for row in rows]
    reduce.reduce_into(arrays, arrays, op, dtype, divisor)
    assert all(array.tobytes() == arrays[0].tobytes() for array in arrays)
    kind = ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else np.float16
    return arrays[0].view(kind).astype(np.float32).tolist()


def test_range_of_float16(kernel):
    assert result([[30000.0]] * 4, Op.AVERAGE, DType.FLOAT16, 4) == [30000.0]


def test_bfloat16_sum_whatever_the_order(kernel):
    for order in itertools.permutations([256.0, 1.0, 1.0, 0.0]):
        assert result([[value] for value in order], Op.SUM, DType.BFLOAT16) == [258.0]
    assert result([[1.0], [1.0078125]], Op.AVERAGE, DType.BFLOAT16, 2) == [1.0]


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_every_value_survives(kernel, dtype):
    """All 65,536 bit patterns, NaN and infinities among them, through a sum with zero."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    kind = ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else np.float16
    arrays = [bits.view(dtype.storage).copy(), np.zeros(1 << 16, dtype.storage)]
    reduce.reduce_into(arrays, arrays, Op.SUM, dtype)
    before, after = bits.view(kind).astype(np.float32), arrays[0].view(kind).astype(np.float32)
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_average_of_seven_is_exact(dtype):
    values = np.arange(1, 200_000, dtype=dtype.storage)
    arrays = [values.copy() for _ in range(7)]
    reduce.reduce_into(arrays, arrays, Op.AVERAGE, dtype, 7)
    np.testing.assert_array_equal(arrays[3], values)


def test_other_types():
    def of(dtype, op, *rows, divisor=1):
        arrays = [np.array(row, dtype) for row in rows]
        reduce.reduce_into(arrays, arrays, op, DType.of(arrays[0]), divisor)
        return arrays[-1].tolist()

    assert of("complex64", Op.AVERAGE, [1 + 2j], [3 - 4j], divisor=2) == [2 - 1j]
    assert of("complex128", Op.PRODUCT, [1 + 2j], [3 - 4j]) == [11 + 2j]
    assert of("bool", Op.MAX, [True, False], [False, False]) == [True, False]
    assert of("bool", Op.MIN, [True, False], [True, True]) == [True, False]
    assert of("uint8", Op.SUM, [200], [100]) == [44]
    assert of("int64", Op.MIN, [-(2**62)], [5]) == [-(2**62)]


@pytest.mark.parametrize(
    ("op", "dtype", "divisor"),
    [
        (Op.AVERAGE, DType.INT32, None),
        (Op.SUM, DType.BOOL, None),
        (Op.AVERAGE, DType.BOOL, None),
        (Op.MIN, DType.COMPLEX64, None),
        (Op.SUM, DType.FLOAT32, 2),
        (Op.AVERAGE, DType.FLOAT32, 0),
        (Op.AVERAGE, DType.FLOAT32, float("nan")),
    ],
)
def test_what_has_no_meaning(op, dtype, divisor):
    with pytest.raises(ValueError, match=r"not defined|divisor"):
        check_reducible(op, dtype, divisor)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("count", [1, 2, 3, 65_535, 65_536, 131_075])
def test_a_half_can_start_anywhere_and_have_any_neighbour(kernel, dtype, count):
    rng = np.random.default_rng(count)
    rows = [rng.standard_normal(count + 1) * 2.0 ** rng.integers(-12, 12, count + 1) for _ in range(3)]
    arrays = [halves(row, dtype)[start:] for row, start in zip(rows, (0, 1, 1), strict=True)]
    arrays = [array[:count] for array in arrays]
    kind = ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else np.float16
    total = np.zeros(count, np.float32)
    for array in arrays:
        total += array.view(kind).astype(np.float32)
    reduce.reduce_into(arrays, arrays, Op.AVERAGE, dtype, 3)
    assert all(array.tobytes() == arrays[0].tobytes() for array in arrays)
    assert arrays[0].tobytes() == (total / np.float32(3)).astype(kind).tobytes()
