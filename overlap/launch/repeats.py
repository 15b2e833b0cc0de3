"""Warnings of several ranks: the first of equal ones is shown, the others are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN = 80


class Repeats:
    """Which ranks have given which warning.

    >>> repeats = Repeats()
    >>> [repeats.take(rank, {"message": "too slow", "text": "a.py:1: too slow"}) for rank in (0, 2, 1)]
    [b'[0] a.py:1: too slow\\n', b'', b'']
    >>> repeats.lines()
    ['2 more ranks (1, 2) warned of the same: too slow']
    """

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, str], list[int]] = {}

    def take(self, rank: int, head: Mapping[str, Any]) -> bytes:
        """Note a rank's warning; returns what is to be shown of it now, with the rank before each line.

        The rank that came first may repeat itself: it does so only where its warning filters say so.
        """
        key = str(head.get("message")), str(head.get("text"))
        ranks = self._ranks.setdefault(key, [rank])
        if rank != ranks[0]:
            if rank not in ranks:
                ranks.append(rank)
            return b""
        return "".join(f"[{rank}] {line}\n" for line in key[1].splitlines()).encode(errors="replace")

    def lines(self) -> list[str]:
        """One line a warning that came from further ranks; then all is forgotten."""
        said = []
        for (message, _), (_, *others) in self._ranks.items():
            if others:
                ranks = f"{len(others)} more rank{'s' if len(others) > 1 else ''}"
                which = ", ".join(map(str, sorted(others)))
                said.append(f"{ranks} ({which}) warned of the same: {' '.join(message.split())[:_SHOWN]}")
        self._ranks.clear()
        return said
