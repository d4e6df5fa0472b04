"""Copies that touch the same bytes must be ordered: by their stream, or because the host saw the first done before it
asked for the second. Two that are not are a race, whether or not it goes well this time.

Each stream counts what it was given. What the host has seen done is known to every stream from then on. Only what this
process asked for is judged.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from ._refusal import Refusal, invalid

Given = tuple[int, int]
"""A stream, and how much it had been given."""
Span = tuple[int, int]
"""First address, and the one after the last."""


@dataclass(slots=True, frozen=True)
class _Access:
    number: int
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    bounds: Span


class Races:
    """Not thread-safe: the caller holds the lock of the fake."""

    def __init__(self, *, overtaken: bool) -> None:
        """``overtaken``: only writes are judged."""
        self._overtaken = overtaken
        self._given: Counter[int] = Counter()
        self._seen: dict[int, int] = {}
        self._open: dict[int, deque[_Access]] = {}

    def given(self, stream: int, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        """Work for ``stream``. Raises :class:`Refusal` where it races with earlier work."""
        reads, writes = () if self._overtaken else tuple(reads), tuple(writes)
        spans = reads + writes
        bounds = min(first for first, _ in spans), max(end for _, end in spans)
        access = _Access(self._given[stream] + 1, reads, writes, bounds)
        for other, accesses in self._open.items():
            while accesses and accesses[0].number <= self._seen.get(other, 0):
                accesses.popleft()
            for earlier in accesses if other != stream else ():
                if _meet(earlier.bounds, access.bounds):
                    _check(earlier, access)
        self._given[stream] = access.number
        self._open.setdefault(stream, deque()).append(access)

    def recorded(self, stream: int) -> Given:
        """What an event that is recorded now stands for."""
        return stream, self._given[stream]

    def saw(self, event: Given) -> None:
        """The host was told that the event is done."""
        stream, number = event
        self._seen[stream] = max(number, self._seen.get(stream, 0))

    def gone(self, stream: int) -> None:
        """Its number may be given to another stream. What it still does is not judged any more."""
        self._given.pop(stream, None)
        self._open.pop(stream, None)
        self._seen.pop(stream, None)


def check_batch(copies: Iterable[tuple[int, int, int]]) -> None:
    """In one call copies have no order: no byte that one writes may another touch."""
    spans = [(dst, dst + nbytes, True) for dst, _, nbytes in copies]
    spans += [(src, src + nbytes, False) for _, src, nbytes in copies]
    end_read = end_written = 0
    for first, end, writes in sorted(spans):
        if first < end_written or (writes and first < end_read):
            raise invalid(f"copies of one call meet at {first:#x}")
        if writes:
            end_written = max(end_written, end)
        else:
            end_read = max(end_read, end)


def _check(earlier: _Access, later: _Access) -> None:
    for first, second in ((earlier.writes, later.reads + later.writes), (earlier.reads, later.writes)):
        for one in first:
            for other in second:
                if _meet(one, other):
                    raise Race(f"unordered with earlier work of another stream on {max(one[0], other[0]):#x}")


def _meet(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class Race(Refusal):
    """A copy that CUDA would take, and that would now and then yield wrong bytes. The fake refuses it aloud."""

    def __init__(self, why: str) -> None:
        refusal = invalid(why)
        super().__init__(refusal.code, why)
