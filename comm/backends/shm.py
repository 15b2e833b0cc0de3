"""Shared memory on one host: every rank reads the others' buffers, and writes its share of results to all.

Each communicator has a control segment with a region a rank:

    counter   u32   how many times this rank has arrived or left; a futex that the others wait on
    state     u32   LIVE, ENDED (left in good order) or FAILED, with the culprit's rank and a text
    call            what this rank is about to do
    table           numbers for all-to-all
    mail            for each peer: how much was posted to it and taken from it
    staging         for memory that the others can't read

A rank writes only to its own region (and its share of results), so no word has two writers. x86 keeps stores
in order; elsewhere a lock's acquire and release around each counter orders them.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from overlap.comm import futex
from overlap.comm.backends.base import Communicator
from overlap.comm.backends.direct import (
    CALL_BYTES,
    Call,
    DirectCommunicator,
    check_allocation,
    check_color,
    check_equal,
    other_length,
)
from overlap.comm.errors import CommError, MismatchError, PeerLost
from overlap.comm.rendezvous import Links
from overlap.comm.shared_memory import Segment, create_file
from overlap.comm.span import Buffer, Span

_LIVE, _ENDED, _FAILED = 0, 1, 2
_CALL_AT, _TEXT_AT, _TABLE_AT, _TEXT_BYTES = 64, 256, 4096, 3840
STAGING_BYTES = 1024 * 1024
_PAGE = 4096
# How often a sleeping rank looks whether its peers live.
_SLICE = futex.timespec(0.1)
_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")


class _Region:
    """One rank's part of the control segment, as arrays."""

    def __init__(self, memory: np.ndarray, size: int) -> None:
        self.words = memory[:_CALL_AT].data.cast("I")
        self.address: int = memory.ctypes.data
        self.call = memory[_CALL_AT : _CALL_AT + CALL_BYTES].data
        self.text = memory[_TEXT_AT : _TEXT_AT + _TEXT_BYTES]
        self.table = memory[_TABLE_AT : _TABLE_AT + 16 * (size + 1)].view(np.int64)
        mail_at = _TABLE_AT + 16 * (size + 1)
        # A row a peer: posted, taken, length posted (two words), length expected (two words), two unused.
        self.mail = memory[mail_at : mail_at + 32 * size].view(np.uint32).reshape(size, 8)
        self.mail_address = self.address + mail_at
        self.staging = memory[-STAGING_BYTES:]

    @staticmethod
    def nbytes(size: int) -> int:
        head = _TABLE_AT + 16 * (size + 1) + 32 * size
        return -(-head // _PAGE) * _PAGE + STAGING_BYTES


_POSTED, _TAKEN, _LENGTH, _EXPECTED = 0, 1, 2, 4


class ShmCommunicator(DirectCommunicator):
    """One rank's end of a control segment."""

    def __init__(self, links: Links, rank: int, segment: Segment, spin_s: float) -> None:
        self.rank, self.size = rank, len(links.members)
        self._links, self._segment, self._spin_s = links, segment, spin_s
        step = _Region.nbytes(self.size)
        self._regions = [
            _Region(segment.bytes[r * step : (r + 1) * step], self.size) for r in range(self.size)
        ]
        self._own = self._regions[rank]
        self._others = [(r, region) for r, region in enumerate(self._regions) if r != rank]
        self._count = 0
        self._buffers = 0
        self._closed = self._aborted = False
        self._pair = ""  # what a sendrecv is at, for errors
        self.group = object()
        self._fence = threading.Lock()
        # `abort` may come from any thread while this one closes.
        self._ending = threading.Lock()

    @classmethod
    def start(cls, links: Links, rank: int, spin_s: float) -> ShmCommunicator:
        """The first communicator of a job: rank 0 makes the control segment and passes it to all."""
        size = len(links.members)
        if rank == 0:
            segment = Segment.create(size * _Region.nbytes(size))
            for member in range(1, size):
                links.send(member, "control", [segment.descriptor])
        else:
            _, (descriptor,) = links.receive(0, 1)
            segment = Segment(descriptor, size * _Region.nbytes(size))
        return cls(links, rank, segment, spin_s)

    # -- meeting -----------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Say that this rank has come as far as here, and wait until every other rank has."""
        self._count = count = (self._count + 1) & 0xFFFFFFFF
        own = self._own
        self._order_stores()
        own.words[0] = count
        futex.wake(own.address)
        for _, region in self._others:
            words = region.words
            if (words[0] - count) & 0x80000000:
                self._wait(words, 0, region.address, count, None)
        self._order_stores()

    def _order_stores(self) -> None:
        if not _ORDERED_STORES:
            with self._fence:
                pass

    def _wait(self, words: memoryview, index: int, address: int, target: int, awaited: int | None) -> None:
        """Wait until a word reaches `target`: look for a while, then sleep.

        Args:
            awaited: the rank whose mail this is; None where all ranks are waited for (counters).
        """
        deadline = time.perf_counter() + self._spin_s
        while time.perf_counter() < deadline:
            if not (words[index] - target) & 0x80000000:
                return
            futex.yield_core()
        while True:
            value = words[index]
            if not (value - target) & 0x80000000:
                return
            lost = self._find_lost(awaited)
            # What a rank wrote before it ended counts: look once more after having seen its end.
            if lost is not None and (words[index] - target) & 0x80000000:
                raise lost
            futex.wait(address, value, _SLICE)

    def _find_lost(self, awaited: int | None) -> PeerLost | None:
        """The rank because of which a wait can't end: it failed, was killed, or left without this call."""
        self._check_open()
        dead = self._links.processes.dead()
        for rank, region in self._others:
            state, member = region.words[1], self._links.members[rank]
            if state == _FAILED:
                return PeerLost(*self._read_reason(region), self._at())
            if state == _LIVE and member in dead:
                return PeerLost(member, "was killed or ended without a word", self._at())
            needed = rank == awaited if awaited is not None else (region.words[0] - self._count) & 0x80000000
            if state == _ENDED and needed:
                return PeerLost(*self._read_reason(region), self._at())
        return None

    def _check_open(self) -> None:
        if self._aborted:
            raise CommError(f"this rank has told the others that it can't go on, before {self._at()}")
        if self._closed:
            raise CommError(f"this communicator was closed: call overlap.init() anew before {self._at()}")

    def _check_set_up(self) -> None:
        """While this rank waits for a message from rank 0."""
        if (lost := self._find_lost(0)) is not None:
            raise lost

    def _at(self) -> str:
        """What this rank is doing, in words."""
        return self.doing or self._pair or str(Call.unpack(bytes(self._own.call)))

    def _read_reason(self, region: _Region) -> tuple[int, str]:
        culprit, length = struct.unpack("<iI", region.text[:8].tobytes())
        return culprit, region.text[8 : 8 + length].tobytes().decode(errors="replace")

    def _end(self, state: int, culprit: int, reason: str) -> None:
        """Say once how this rank ends: what others may be reading is not written again."""
        with self._ending:
            if self._own.words[1] != _LIVE:
                return
            text = reason.encode(errors="replace")[: _TEXT_BYTES - 8]
            data = struct.pack("<iI", culprit, len(text)) + text
            self._own.text[: len(data)] = np.frombuffer(data, np.uint8)
            self._own.words[1] = state
        futex.wake(self._own.address)
        for peer in range(self.size):
            futex.wake(self._own.mail_address + 32 * peer)
            futex.wake(self._own.mail_address + 32 * peer + 4)

    def _arrive(self, call: Call) -> None:
        data = call.pack()
        self._own.call[:] = data
        self._pair = ""
        if self._closed or self._aborted:
            self._check_open()
        if self.size == 1:
            return
        self._sync()
        if any(region.call != data for _, region in self._others):
            calls = [Call.unpack(bytes(region.call)) for region in self._regions]
            self._sync()
            check_equal(calls)

    def _leave(self) -> None:
        if self.size > 1:
            self._sync()

    # -- memory ------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Buffer:
        check_allocation(nbytes)
        self._arrive(Call("allocate", length=nbytes, tag=self.tag))
        step = -(-nbytes // _PAGE) * _PAGE
        segment, error = self._share_segment(self.size * step)
        # Nobody goes on with memory that another rank could not map.
        fine = self._exchange_table(Call("allocate", length=nbytes, tag=self.tag), [segment is not None])
        lacking = [self._links.members[rank] for rank, (flag,) in enumerate(fine) if not flag]
        if segment is None or lacking:
            raise MemoryError(
                f"{self.size} x {nbytes} bytes of shared memory could not be mapped on every rank: "
                # The first makes it: where it could not, none of the others could have.
                f"rank {lacking[0]} could not. Free memory there, raise its limit (the container's, or "
                "`ulimit -v`), start fewer ranks on this host, or train a smaller model"
            ) from error
        self._buffers += 1
        parts = tuple(segment.bytes[r * step : r * step + nbytes] for r in range(self.size))
        return Buffer(self._buffers, parts, self.rank, self.group)

    def _share_segment(self, nbytes: int) -> tuple[Segment | None, OSError | ValueError | None]:
        """Rank 0 makes a segment and passes it on; where it could not, it passes nothing."""
        segment: Segment | None = None
        try:
            if self.rank == 0:
                segment = Segment.create(nbytes)
            else:
                _, descriptors = self._links.receive(0, 1, self._check_set_up)
                segment = Segment(descriptors[0], nbytes) if descriptors else None
        except (OSError, ValueError) as failed:
            error: OSError | ValueError | None = failed
        else:
            error = None
        if self.rank == 0:
            for member in range(1, self.size):
                self._links.send(member, "buffer", [segment.descriptor] if segment else [])
        return segment, error

    def _exposed(
        self, call: Call, span: Span, give: slice, take: slice
    ) -> Iterator[tuple[int, Sequence[np.ndarray]]]:
        if span.place is not None or self.size == 1:
            self._arrive(call)
            yield 0, span.peers or (span.array,)
            self._leave()
            return
        step = STAGING_BYTES // span.dtype.itemsize
        staging = [region.staging.view(span.dtype.storage) for region in self._regions]
        # An all-to-all's spans differ in length: the call says how far the longest goes.
        for start in range(0, call.length, step) if call.length else (0,):
            end = min(start + step, call.length)
            given = slice(max(give.start, start), min(give.stop, end))
            if given.start < given.stop:
                staging[self.rank][given.start - start : given.stop - start] = span.array[given]
            self._arrive(call)
            yield start, [view[: end - start] for view in staging]
            self._leave()
            taken = slice(max(take.start, start), min(take.stop, end))
            if taken.start < taken.stop:
                span.array[taken] = staging[self.rank][taken.start - start : taken.stop - start]

    def _exchange_table(self, call: Call, numbers: Sequence[int]) -> list[list[int]]:
        self._own.table[: len(numbers)] = numbers
        self._arrive(call)
        tables: list[list[int]] = [region.table[: len(numbers)].tolist() for region in self._regions]
        self._leave()
        return tables

    # -- pairs -------------------------------------------------------------------------------------------

    def _exchange_pair(self, out: np.ndarray | None, dest: int, into: np.ndarray | None, source: int) -> None:
        """A piece at a time: post mine, take theirs, wait until mine is taken; so no circle can block."""
        self._pair = "sendrecv"
        self._check_open()
        rounds_out, rounds_in = _rounds(out), _rounds(into)
        mismatch: MismatchError | None = None
        for number in range(max(rounds_out, rounds_in)):
            start = number * STAGING_BYTES
            if out is not None and number < rounds_out:
                self._post(out, start, dest)
            if into is not None and number < rounds_in:
                mismatch = self._take(into, start, source)
                rounds_in = 0 if mismatch else rounds_in
            if out is not None and number < rounds_out:
                refused = self._until_taken(len(out), dest)
                mismatch = mismatch or refused
                rounds_out = 0 if refused else rounds_out
        if mismatch is not None:
            raise mismatch

    def _post(self, out: np.ndarray, start: int, dest: int) -> None:
        piece = out[start : start + STAGING_BYTES]
        self._own.staging[: len(piece)] = piece
        row = self._own.mail[dest]
        row[_LENGTH : _LENGTH + 2].view(np.int64)[0] = len(out)
        self._order_stores()
        row[_POSTED] = (int(row[_POSTED]) + 1) & 0xFFFFFFFF
        futex.wake(self._own.mail_address + 32 * dest)

    def _take(self, into: np.ndarray, start: int, source: int) -> MismatchError | None:
        own, region = self._own.mail[source], self._regions[source]
        theirs = region.mail[self.rank]
        target = (int(own[_TAKEN]) + 1) & 0xFFFFFFFF
        self._wait(theirs.data, _POSTED, region.mail_address + 32 * self.rank, target, source)
        self._order_stores()
        length = int(theirs[_LENGTH : _LENGTH + 2].view(np.int64)[0])
        matches = length == len(into)
        if matches:
            piece = into[start : start + STAGING_BYTES]
            piece[:] = region.staging[: len(piece)]
        own[_EXPECTED : _EXPECTED + 2].view(np.int64)[0] = len(into)
        self._order_stores()
        own[_TAKEN] = target
        futex.wake(self._own.mail_address + 32 * source + 4)
        return None if matches else other_length(source, length, self.rank, len(into))

    def _until_taken(self, length: int, dest: int) -> MismatchError | None:
        region, target = self._regions[dest], int(self._own.mail[dest][_POSTED])
        theirs = region.mail[self.rank]
        self._wait(theirs.data, _TAKEN, region.mail_address + 32 * self.rank + 4, target, dest)
        self._order_stores()
        expected = int(theirs[_EXPECTED : _EXPECTED + 2].view(np.int64)[0])
        return None if expected == length else other_length(self.rank, length, dest, expected)

    # -- groups and the end ------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        check_color(color, key)
        wishes = self._exchange_table(Call("split", tag=self.tag), [color is not None, color or 0, key])
        return self._split(wishes, color)

    def _split(self, wishes: list[list[int]], color: int | None) -> Communicator | None:
        colors = sorted({theirs[1] for theirs in wishes if theirs[0]})
        groups = {
            each: [r for _, r in sorted((t[2], r) for r, t in enumerate(wishes) if t[0] and t[1] == each)]
            for each in colors
        }
        made = _make_groups(self._links, groups) if self.rank == 0 else {}
        if color is None:
            return None
        group = groups[color]
        members = [self._links.members[r] for r in group]
        if self.rank == 0:
            descriptors = made[0]
        else:
            _, descriptors = self._links.receive(0, 1 + len(group), self._check_set_up)
        segment = Segment(descriptors[0], len(group) * _Region.nbytes(len(group)))
        rank = group.index(self.rank)
        ends = range(1, len(group)) if rank == 0 else [0]
        sockets = {end: socket.socket(fileno=fd) for end, fd in zip(ends, descriptors[1:], strict=True)}
        return ShmCommunicator(Links(sockets, members, self._links.processes), rank, segment, self._spin_s)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        if not self._closed:
            self._aborted = True
            self._end(_FAILED, self._links.members[self.rank] if culprit is None else culprit, reason)

    def close(self, reason: str = "ended without an error") -> None:
        if self._closed:
            return
        self._closed = True
        self._end(_ENDED, self._links.members[self.rank], reason)
        self._links.close()


def _rounds(data: np.ndarray | None) -> int:
    return 0 if data is None else max(1, -(-len(data) // STAGING_BYTES))


def _make_groups(links: Links, groups: dict[int, list[int]]) -> dict[int, list[int]]:
    """Rank 0's part of a split: a control segment and a star of sockets for each group, sent to its ranks.

    Returns rank 0's own descriptors, under 0, if it is in a group.
    """
    own: dict[int, list[int]] = {}
    for group in groups.values():
        size = len(group)
        segment = create_file(size * _Region.nbytes(size))
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in group[1:]]
        packets = [[segment] + [pair[0].fileno() for pair in pairs]]
        packets += [[segment, pair[1].fileno()] for pair in pairs]
        for rank, packet in zip(group, packets, strict=True):
            if rank == 0:
                own[0] = [os.dup(descriptor) for descriptor in packet]
            else:
                links.send(rank, "group", packet)
        os.close(segment)
        for pair in pairs:
            pair[0].close()
            pair[1].close()
    return own
