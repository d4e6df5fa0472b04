"""The last batches that were published, for readers that missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NewType

Seq = NewType("Seq", int)
"""A batch's number: without a hole, as long as a bridge lives."""

HISTORY_BYTES: Final = 64 << 20
"""Most bytes of batches that are kept, however many may be; the last one always is."""


class History:
    """Numbers batches as they are added, from ``first`` on; keeps the last ``steps`` of them."""

    def __init__(self, steps: int, first: int = 0, max_bytes: int = HISTORY_BYTES) -> None:
        self._steps = steps
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._bytes = 0
        self._next = first

    @property
    def next(self) -> Seq:
        """The number of the next batch."""
        return Seq(self._next)

    @property
    def oldest(self) -> Seq:
        """The number of the oldest batch that is held; the next one's where none is."""
        return Seq(self._next - len(self._payloads))

    def add(self, payload: bytes) -> Seq:
        """Its number."""
        number = self.next
        self._next += 1
        self._payloads.append(payload)
        self._bytes += len(payload)
        while len(self._payloads) > self._steps or (self._bytes > self._max_bytes and len(self._payloads) > 1):
            self._bytes -= len(self._payloads.popleft())
        return number

    def since(self, start: int) -> Iterator[tuple[Seq, bytes]]:
        """What is held from number ``start`` on, in order."""
        oldest = self.oldest
        for place in range(max(0, start - oldest), len(self._payloads)):
            yield Seq(oldest + place), self._payloads[place]
