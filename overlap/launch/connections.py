"""A launcher's connections to its ranks: who may talk, and what is on its way."""

from __future__ import annotations

import hmac
import json
import selectors
from typing import Any, Protocol

from .wire import Connection, Listener


class Correspondent(Protocol):
    """Who is told what comes over a job's connections."""

    def on_frame(self, connection: Connection, head: dict[str, Any] | None, frame: bytes) -> None:
        """A frame came; `head` is its JSON where it is its connection's first, which showed the job's id."""

    def on_stranger(self, what: str) -> None:
        """A connection was dropped, because it is not one of this job's."""


class Connections:
    """All connections of one job, served by its selector; nothing here blocks."""

    def __init__(self, job: str, size: int, selector: selectors.BaseSelector, owner: Correspondent) -> None:
        self._job, self._size, self._selector, self._owner = job, size, selector, owner
        self._open: list[Connection] = []
        self._listener = Listener()
        self.name = self._listener.name
        selector.register(self._listener.sock, selectors.EVENT_READ, lambda events: self._accept())

    def catch_up(self) -> None:
        """Handle all frames that are there now."""
        self._accept()
        for connection in list(self._open):
            self._serve(connection, selectors.EVENT_READ)

    def send(self, connection: Connection, payload: bytes) -> None:
        """Send a frame; what the other end does not take now is sent when it does."""
        connection.send(payload)
        if connection.flush() and connection in self._open:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._register(connection, events)

    def close(self) -> None:
        """Close all connections, and stop listening."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except PermissionError as error:
                self._owner.on_stranger(str(error))
                continue
            if connection is None:
                return
            self._open.append(connection)
            self._register(connection, selectors.EVENT_READ)

    def _register(self, connection: Connection, events: int) -> None:
        def serve(ready: int) -> None:
            self._serve(connection, ready)

        if connection.sock in self._selector.get_map():
            self._selector.modify(connection.sock, events, serve)
        else:
            self._selector.register(connection.sock, events, serve)

    def _serve(self, connection: Connection, events: int) -> None:
        if connection not in self._open:
            return  # dropped by a handler that ran before, in the same turn
        if events & selectors.EVENT_WRITE and not connection.flush():
            self._register(connection, selectors.EVENT_READ)
        try:
            frames, over = connection.receive()
            for frame in frames:
                head = None if connection.trusted else self._introduction(connection, frame)
                self._owner.on_frame(connection, head, frame)
        except ValueError as error:
            self._owner.on_stranger(str(error))
            over = True
        if over:
            self._open.remove(connection)
            self._selector.unregister(connection.sock)
            connection.close()

    def _introduction(self, connection: Connection, frame: bytes) -> dict[str, Any]:
        """Read a connection's first frame, which must show the job's id and a rank of it."""
        try:
            head = json.loads(frame)
            # Ranks that live for many calls put a call's number behind the id.
            job, rank = str(head["job"]).partition("-")[0], int(head["rank"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("its first message is not one of overlap's") from None
        if not hmac.compare_digest(job.encode(), self._job.encode()) or not 0 <= rank < self._size:
            raise ValueError("it belongs to another job")
        connection.trusted, connection.rank = True, rank
        return dict(head)
