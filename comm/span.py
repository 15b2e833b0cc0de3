"""Memory that collectives work on: buffers that a communicator allocates, and typed spans of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlap.comm.dtype import DType


@dataclass(frozen=True, eq=False)
class Span:
    """A typed, contiguous piece of memory: what every collective takes.

    Attributes:
        array: its elements, 1-D, in `dtype.storage`; aliases the memory.
        dtype: the type of its elements.
        place: where it lies in a buffer that all ranks allocated together, (buffer number, byte offset);
            None for memory of this rank alone, which a backend may have to stage.
        peers: the same place in every rank's part of the buffer, where this rank can read it.
        group: the communicator's mark (`Buffer.group`); to another communicator the place means nothing.
    """

    array: np.ndarray
    dtype: DType
    place: tuple[int, int] | None = None
    peers: tuple[np.ndarray, ...] = ()
    group: object = None

    @classmethod
    def wrap(cls, array: np.ndarray, dtype: DType | None = None) -> Span:
        """A span over any contiguous array (no copy).

        Args:
            array: C-contiguous and writable, of any shape.
            dtype: how to read it, where numpy's type does not say so (`uint16` that holds bfloat16).

        Raises:
            ValueError: `array` is not contiguous or not writable, or `dtype` has another storage.
            TypeError: an element type that no operation knows.
        """
        if not array.flags.writeable:
            raise ValueError("array must be writable: copy it first")
        if not array.flags.c_contiguous:
            raise ValueError(f"array must be C-contiguous, not of strides {array.strides}: copy it first")
        dtype = dtype or DType.of(array)
        if dtype.storage != array.dtype:
            raise ValueError(f"dtype {dtype.value} is stored as {dtype.storage}, not {array.dtype}")
        return cls(array.reshape(-1), dtype)

    def __len__(self) -> int:
        return len(self.array)


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that every rank of a communicator has at once.

    Attributes:
        number: counts the communicator's allocations; the same on every rank.
        parts: each rank's memory as bytes, where this rank can read it; else only its own.
        rank: whose part is this rank's own.
        group: a mark of the communicator that allocated it.
    """

    number: int
    parts: tuple[np.ndarray, ...]
    rank: int
    group: object

    @property
    def memory(self) -> np.ndarray:
        """This rank's own bytes; whatever aliases them keeps the buffer alive."""
        return self.parts[self.rank]

    def span(self, dtype: DType, count: int, offset: int = 0) -> Span:
        """A typed span of `count` elements that starts `offset` bytes into the buffer.

        Raises:
            ValueError: it is not aligned, or does not lie within the buffer.
        """
        end = offset + count * dtype.itemsize
        if offset % dtype.itemsize or not 0 <= offset <= end <= len(self.memory):
            raise ValueError(
                f"a span of {count} {dtype.value} at byte {offset} must be aligned and end within the "
                f"buffer's {len(self.memory)} bytes"
            )
        peers = tuple(part[offset:end].view(dtype.storage) for part in self.parts)
        return Span(peers[self.rank], dtype, (self.number, offset), peers, self.group)
