"""The element types that the engine can move and reduce, and the operations that reduce them."""

from __future__ import annotations

import math
from enum import Enum

import numpy as np


class DType(Enum):
    """An element type; `storage` is the numpy type of its bytes (numpy has no bfloat16: uint16 holds it)."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"

    storage: np.dtype[np.generic]
    itemsize: int
    is_floating: bool
    is_complex: bool

    def __init__(self, name: str) -> None:
        self.storage = np.dtype("uint16" if name == "bfloat16" else name)
        self.itemsize = self.storage.itemsize
        self.is_floating = "float" in name
        self.is_complex = "complex" in name

    @classmethod
    def of(cls, array: np.ndarray) -> DType:
        """The type of a numpy array's elements.

        Raises:
            TypeError: no operation knows this type.
        """
        try:
            return cls(array.dtype.name)
        except ValueError:
            allowed = ", ".join(known.value for known in cls)
            raise TypeError(f"dtype must be one of {allowed}, not {array.dtype.name!r}") from None


class Op(Enum):
    """What an allreduce or reduce-scatter does with the elements of all ranks (MPI's names)."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


def check_reducible(op: Op, dtype: DType, divisor: float | None) -> None:
    """Refuse what has no meaning, before anything is sent.

    Raises:
        TypeError: `op` is no Op.
        ValueError: `op` is undefined for `dtype`, or `divisor` is given without an average, or is not a
            positive, finite number.
    """
    if not isinstance(op, Op):
        raise TypeError(f"op must be an Op (Op.SUM, Op.AVERAGE, ...), not {op!r}")
    if op is Op.AVERAGE and not (dtype.is_floating or dtype.is_complex):
        raise ValueError(f"op=Op.AVERAGE is not defined for {dtype.value}: use Op.SUM and divide as you want")
    if op is Op.SUM and dtype is DType.BOOL:
        raise ValueError(
            "op=Op.SUM is not defined for bool: use Op.MAX for any, Op.MIN for all, or cast to an integer"
        )
    if op in (Op.MIN, Op.MAX) and dtype.is_complex:
        raise ValueError(f"op={op} is not defined for {dtype.value}: complex numbers have no order")
    if divisor is not None and (op is not Op.AVERAGE or not 0 < divisor < math.inf):
        raise ValueError(
            f"divisor must be positive and finite, and goes with Op.AVERAGE only, not {divisor!r} with {op}"
        )
