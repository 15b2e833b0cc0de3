"""Rounding, infinities and NaN of each 16-bit kernel, value by value."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from overlap.comm import reduce
from overlap.comm.dtype import DType, Op, check_reducible

KINDS = {DType.FLOAT16: np.float16, DType.BFLOAT16: ml_dtypes.bfloat16}


@pytest.fixture(params=[False, True], ids=["numpy", "torch"])
def kernel(request):
    reduce.use_torch(request.param)
    yield
    reduce.use_torch(None)


def one(values, op, dtype, divisor=1):
    arrays = [np.array([v], np.float32).astype(KINDS[dtype]).view(dtype.storage) for v in values]
    reduce.reduce_into(arrays, arrays, op, dtype, divisor)
    return float(arrays[0].view(KINDS[dtype])[0])


@pytest.mark.parametrize(
    ("dtype", "values", "total"),
    [
        (DType.FLOAT16, [2048.0, 1.0], 2048.0),
        (DType.FLOAT16, [2048.0, 3.0], 2052.0),
        (DType.BFLOAT16, [256.0, 1.0], 256.0),
        (DType.BFLOAT16, [256.0, 3.0], 260.0),
        (DType.FLOAT16, [60000.0, 60000.0], math.inf),
        (DType.BFLOAT16, [3e38, 3e38], math.inf),
        (DType.FLOAT16, [math.inf, 1.0], math.inf),
        (DType.BFLOAT16, [-math.inf, 1.0], -math.inf),
    ],
)
def test_ties_and_infinities(kernel, dtype, values, total):
    assert one(values, Op.SUM, dtype) == total


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("op", [Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX, Op.PRODUCT])
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [1.0, 2.0, math.nan]])
def test_nan(kernel, dtype, op, values):
    assert math.isnan(one(values, op, dtype))


@pytest.mark.parametrize("dtype", KINDS)
def test_inf_minus_inf(kernel, dtype):
    assert math.isnan(one([math.inf, -math.inf], Op.SUM, dtype))


def test_average_of_sevens_of_integers_in_halves(kernel):
    for dtype, top in ((DType.FLOAT16, 2048), (DType.BFLOAT16, 256)):
        for value in range(1, top, 17):
            assert one([value] * 7, Op.AVERAGE, dtype, 7) == value


def test_wraparound():
    arrays = [np.array([2**31 - 1], np.int32), np.array([1], np.int32)]
    reduce.reduce_into(arrays, arrays, Op.SUM, DType.INT32)
    assert arrays[1].tolist() == [-(2**31)]


def test_refusals():
    with pytest.raises(TypeError, match="op must be an Op"):
        check_reducible("sum", DType.FLOAT32, None)
    for divisor in (-1, math.inf):
        with pytest.raises(ValueError, match="divisor"):
            check_reducible(Op.AVERAGE, DType.FLOAT32, divisor)
    for op in Op:
        check_reducible(op, DType.FLOAT16, None)
    check_reducible(Op.AVERAGE, DType.COMPLEX64, 2)
