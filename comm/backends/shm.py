"""Shared memory on one host: every rank reads the others' buffers and writes its share of the result to all.

Each communicator has a control segment with a region a rank:

    counter   u32   how many times this rank has arrived or left; a futex that the others wait on
    state     u32   LIVE, ENDED (left in good order) or FAILED, with the culprit's rank and a text
    call            what this rank is about to do
    table           numbers for all-to-all
    mail            for each peer: posted, length, taken, verdict
    staging         for memory that the others can't read

A rank writes only to its own region (and its share of results), so no word has two writers. x86 keeps stores in
order; elsewhere a lock's acquire and release around each counter orders them.
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

from .. import futex
from ..errors import CommError, MismatchError, PeerLost
from ..rendezvous import Links
from ..shared_memory import Segment
from ..span import Buffer, Span
from .base import Communicator
from .direct import CALL_BYTES, Call, DirectCommunicator, check_equal

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
        self.words = memoryview(memory[:_CALL_AT]).cast("I")
        self.address: int = memory.ctypes.data
        self.call = memoryview(memory[_CALL_AT : _CALL_AT + CALL_BYTES])
        self.text = memory[_TEXT_AT : _TEXT_AT + _TEXT_BYTES]
        self.table = memory[_TABLE_AT : _TABLE_AT + 16 * (size + 1)].view(np.int64)
        mail_at = _TABLE_AT + 16 * (size + 1)
        # A row a peer: posted, taken, verdict, (pad), length in two words.
        self.mail = memory[mail_at : mail_at + 32 * size].view(np.uint32).reshape(size, 8)
        self.mail_address = self.address + mail_at
        self.staging = memory[-STAGING_BYTES:]

    @staticmethod
    def nbytes(size: int) -> int:
        head = _TABLE_AT + 16 * (size + 1) + 32 * size
        return -(-head // _PAGE) * _PAGE + STAGING_BYTES


_POSTED, _TAKEN, _VERDICT = 0, 1, 2


class ShmCommunicator(DirectCommunicator):
    """One rank's end of a control segment."""

    def __init__(self, links: Links, rank: int, segment: Segment, spin_s: float) -> None:
        self.rank, self.size = rank, len(links.members)
        self._links, self._segment, self._spin_s = links, segment, spin_s
        step = _Region.nbytes(self.size)
        self._regions = [_Region(segment.bytes[r * step : (r + 1) * step], self.size) for r in range(self.size)]
        self._own = self._regions[rank]
        self._others = [(r, region) for r, region in enumerate(self._regions) if r != rank]
        self._count = 0
        self._buffers = 0
        self._closed = False
        self._fence = threading.Lock()

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
        if not _ORDERED_STORES:
            with self._fence:
                pass
        own.words[0] = count
        futex.wake(own.address)
        for rank, region in self._others:
            words = region.words
            if (words[0] - count) & 0x80000000:
                self._wait(words, 0, region.address, count, rank)
        if not _ORDERED_STORES:
            with self._fence:
                pass

    def _wait(self, words: memoryview, index: int, address: int, target: int, rank: int) -> None:
        """Wait until a word of rank `rank` reaches `target`: look for a while, then sleep."""
        deadline = time.perf_counter() + self._spin_s
        while time.perf_counter() < deadline:
            if not (words[index] - target) & 0x80000000:
                return
            futex.yield_core()
        while True:
            value = words[index]
            if not (value - target) & 0x80000000:
                return
            self._check_peers(rank, words, index, target)
            futex.wait(address, value, _SLICE)

    def _check_peers(self, awaited: int, words: memoryview, index: int, target: int) -> None:
        if self._closed:
            raise CommError(f"the communicator was closed while this rank was in {self.doing or 'a call'}")
        dead = {self._links.members.index(r) for r in self._links.processes.dead() if r in self._links.members}
        for rank, region in self._others:
            state = region.words[1]
            if state == _FAILED:
                culprit, reason = self._read_reason(region)
                raise PeerLost(culprit, reason, self.doing)
            # What it wrote before it died counts: look once more after having seen it dead.
            if state == _LIVE and rank in dead and (words[index] - target) & 0x80000000:
                raise PeerLost(self._links.members[rank], "was killed or ended without a word", self.doing)
            if state == _ENDED and rank == awaited and (words[index] - target) & 0x80000000:
                raise PeerLost(*self._read_reason(region), self.doing)

    def _read_reason(self, region: _Region) -> tuple[int, str]:
        culprit, length = struct.unpack("<iI", region.text[:8].tobytes())
        return culprit, region.text[8 : 8 + length].tobytes().decode(errors="replace")

    def _write_reason(self, state: int, culprit: int, reason: str) -> None:
        text = reason.encode()[: _TEXT_BYTES - 8]
        data = struct.pack("<iI", culprit, len(text)) + text
        self._own.text[: len(data)] = np.frombuffer(data, np.uint8)
        self._own.words[1] = state
        futex.wake(self._own.address)
        for peer in range(self.size):
            futex.wake(self._own.mail_address + 32 * peer)
            futex.wake(self._own.mail_address + 32 * peer + 4)

    def _arrive(self, call: Call) -> None:
        if self._closed:
            raise CommError("this communicator is closed")
        if self.size == 1:
            return
        data = call.pack()
        self._own.call[:] = data
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
        if nbytes < 0:
            raise ValueError(f"nbytes must be at least 0, not {nbytes!r}")
        self._arrive(Call("allocate", count=nbytes))
        step = -(-nbytes // _PAGE) * _PAGE
        if self.rank == 0:
            segment = Segment.create(self.size * step)
            for member in range(1, self.size):
                self._links.send(member, "buffer", [segment.descriptor])
        else:
            _, (descriptor,) = self._links.receive(0, 1)
            segment = Segment(descriptor, self.size * step)
        self._leave()
        self._buffers += 1
        parts = tuple(segment.bytes[r * step : r * step + nbytes] for r in range(self.size))
        return Buffer(self._buffers, parts, self.rank)

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
        for start in range(0, call.count, step) if call.count else (0,):
            end = min(start + step, call.count)
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

    def sendrecv(
        self, send: Span | None, dest: int | None, recv: Span | None, source: int | None
    ) -> None:
        """A piece at a time: post mine, take theirs, wait until mine is taken; so no circle can block."""
        out = _bytes_of(send) if send is not None else np.empty(0, np.uint8)
        into = _bytes_of(recv) if recv is not None else np.empty(0, np.uint8)
        for name, span, peer in (("dest", send, dest), ("source", recv, source)):
            if (span is None) != (peer is None):
                raise ValueError(f"{name}={peer!r} needs a span, and a span needs {name}")
            if peer is not None:
                self._check_rank(name, peer)
        if dest == source == self.rank:
            np.copyto(into, out)
            return
        rounds_out = _rounds(len(out)) if send is not None else 0
        rounds_in = _rounds(len(into)) if recv is not None else 0
        for number in range(max(rounds_out, rounds_in)):
            start = number * STAGING_BYTES
            if dest is not None and number < rounds_out:
                self._post(out, start, dest)
            if source is not None and number < rounds_in:
                self._take(into, start, source)
            if dest is not None and number < rounds_out:
                self._until_taken(len(out), dest)

    def _post(self, out: np.ndarray, start: int, dest: int) -> None:
        piece = out[start : start + STAGING_BYTES]
        self._own.staging[: len(piece)] = piece
        row = self._own.mail[dest]
        row[4:6].view(np.int64)[0] = len(out)
        row[_POSTED] = (int(row[_POSTED]) + 1) & 0xFFFFFFFF
        futex.wake(self._own.mail_address + 32 * dest)

    def _take(self, into: np.ndarray, start: int, source: int) -> None:
        own, theirs = self._own.mail[source], self._regions[source]
        target = (int(own[_TAKEN]) + 1) & 0xFFFFFFFF
        words = memoryview(theirs.mail[self.rank])
        self._wait(words, _POSTED, theirs.mail_address + 32 * self.rank, target, source)
        length = int(theirs.mail[self.rank][4:6].view(np.int64)[0])
        matches = length == len(into)
        if matches:
            piece = into[start : start + STAGING_BYTES]
            piece[:] = theirs.staging[: len(piece)]
        own[_VERDICT] = 0 if matches else len(into) + 1
        own[_TAKEN] = target
        futex.wake(self._own.mail_address + 32 * source + 4)
        if not matches:
            raise _other_length(source, length, self.rank, len(into))

    def _until_taken(self, length: int, dest: int) -> None:
        theirs = self._regions[dest]
        words = memoryview(theirs.mail[self.rank])
        target = int(self._own.mail[dest][_POSTED])
        self._wait(words, _TAKEN, theirs.mail_address + 32 * self.rank + 4, target, dest)
        if words[_VERDICT]:
            raise _other_length(self.rank, length, dest, words[_VERDICT] - 1)

    # -- groups and the end ------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._arrive(Call("barrier", tag=self.tag))
        self._leave()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        wishes = self._exchange_table(Call("split"), [color is not None, color or 0, key])
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
            _, descriptors = self._links.receive(0, 1 + len(group))
        segment = Segment(descriptors[0], len(group) * _Region.nbytes(len(group)))
        rank = group.index(self.rank)
        ends = range(1, len(group)) if rank == 0 else [0]
        sockets = {end: socket.socket(fileno=fd) for end, fd in zip(ends, descriptors[1:], strict=True)}
        return ShmCommunicator(Links(sockets, members, self._links.processes), rank, segment, self._spin_s)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        if not self._closed:
            self._write_reason(_FAILED, self._links.members[self.rank] if culprit is None else culprit, reason)

    def close(self, reason: str = "ended without an error") -> None:
        if self._closed:
            return
        self._closed = True
        if self._own.words[1] == _LIVE:
            self._write_reason(_ENDED, self._links.members[self.rank], reason)
        self._links.close()


def _rounds(nbytes: int) -> int:
    return max(1, -(-nbytes // STAGING_BYTES))


def _bytes_of(span: Span) -> np.ndarray:
    return span.array.view(np.uint8)


def _other_length(source: int, sent: int, dest: int, expected: int) -> MismatchError:
    return MismatchError(
        f"rank {source} sends {sent} bytes, but rank {dest} receives {expected}; give the same number on both"
    )


def _make_groups(links: Links, groups: dict[int, list[int]]) -> dict[int, list[int]]:
    """Rank 0's part of a split: a control segment and a star of sockets for each group, sent to its ranks.

    Returns rank 0's own descriptors, under 0, if it is in a group.
    """
    own: dict[int, list[int]] = {}
    for group in groups.values():
        size = len(group)
        segment = os.memfd_create("overlap", os.MFD_CLOEXEC)
        os.ftruncate(segment, size * _Region.nbytes(size))
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
