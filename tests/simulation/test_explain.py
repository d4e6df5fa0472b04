"""Explanations on random walks: the reason of a miss is the last entry in the log of what happened to its block."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, TypeVar, cast

import pytest

from kvtier.events import Event
from kvtier.explanation import Explanation, explanation_from_wire, why_gone, why_missed, with_past
from kvtier.types import Cursor
from kvtier.v1 import admin_pb2
from kvtier.watch import Watch
from kvtierd.core.events import REMOVED, STORED, BlockEvent, Cause, EventType
from kvtierd.core.ids import GroupId, Key
from kvtierd.service.wire import TIER_TO_WIRE
from tests.simulation.chooser import Chooser
from tests.simulation.setup import Setup
from tests.simulation.violation import require
from tests.simulation.walk import walk
from tests.simulation.world import World

CACHE: Final = "walked"
GONE: Final = (
    Cause.CAPACITY,
    Cause.EXPLICIT,
    Cause.ANCESTOR,
    Cause.RESET,
    Cause.CORRUPT,
    Cause.LOST,
)
OTHERS: Final = ("hit", "never stored", "stored without the salt", "in another group", "hollow")
_STATES: Final = admin_pb2.CopyState.ValueType
T = TypeVar("T")


class Log:
    """Stands for the watch of a key from the oldest event on."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self.cursor: Cursor | None = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._events:
            self.cursor = event.cursor
            yield event

    async def aclose(self) -> None:
        pass


class ExplainedWorld(World):
    """Asks for the reason of a random request's miss in each step. Keeps a log of the events, and the last entry of
    each block that has gone."""

    def __init__(self, setup: Setup, *, inspect: bool = True) -> None:
        self.logs: dict[Key, list[Event]] = {key: [] for key in setup.forest.keys}
        self.stored: set[tuple[GroupId, Key]] = set()
        self.gone: dict[tuple[GroupId, Key], tuple[int, Cause]] = {}
        self.hollow: set[tuple[GroupId, Key]] = set()
        """Stored blocks without bytes, and blocks that have gone."""
        self.events = 0
        self.random = random.Random(len(setup.forest.keys))
        super().__init__(setup, inspect=inspect)

    def _take_event(self, event: BlockEvent) -> None:
        super()._take_event(event)
        self.events += 1
        told = Event(
            CACHE, event.group, epoch=1, event_id=self.events, type=event.type, cause=event.cause, time_ns=event.time_ns
        )
        for key in event.blocks.keys or self.logs:  # an event without blocks passes every filter
            self.logs[key].append(replace(told, packed_keys=key if event.blocks.keys else b""))
        blocks = {(event.group, key) for key in event.blocks.keys}
        empty = {
            (event.group, key)
            for key, where in zip(event.blocks.keys, event.blocks.residencies, strict=True)
            if not where
        }
        self.hollow = self.hollow - blocks | empty
        if event.type is STORED:
            self.stored |= blocks
        elif event.type in (REMOVED, EventType.CLEARED):
            blocks = blocks or {place for place in self.stored if place[0] == event.group}
            self.stored -= blocks
            self.gone.update(dict.fromkeys(blocks, (event.time_ns, event.cause)))

    def progress(self, choose: Chooser) -> None:
        super().progress(choose)
        chain = self.forest.chain(self.random.choice(self.forest.keys))
        plain = self.core.match((), chain).blocks
        salted = self.random.random() < 0.1
        asked = tuple(Key(hashlib.sha256(key).digest()) for key in chain) if salted else chain
        found = 0 if salted else plain
        if found == len(chain):
            self.seen["explained: hit"] += 1
        else:
            self._explain(asked[found], found, {"without the salt": plain} if salted else {})

    def _explain(self, key: Key, found: int, variants: dict[str, int]) -> None:
        told = self._told(key)
        if all(end.cache != CACHE for end in told.endings()):  # as explain_request does
            log = Log(self.logs.get(key, []))
            told = _now(with_past(replace(told, as_of=Cursor(1, self.events)), cast(Watch, log)))
        why = why_missed(CACHE, len(self.sites), told, variants, found)
        lacking = [group for group in self.sites if (group, key) not in self.stored]
        hollow = any((group, key) in self.hollow & self.stored for group in self.sites)
        require(bool(lacking) or hollow, "the missing block is in every group")
        reasons = {self.gone[group, key] for group in lacking if (group, key) in self.gone}
        if reasons:
            (cause,) = {cause for at, cause in reasons if why.startswith(_gone(at, cause))} or [None]
            require(cause is not None, f"{why!r}, but the log says {reasons}")
            self.seen[f"explained: {cause}"] += 1
        elif hollow:
            require(why == "Its bytes were lost, and it is about to go with the blocks under it.", why)
            self.seen["explained: hollow"] += 1
        elif len(lacking) < len(self.sites):
            require(why == f"Window groups {', '.join(map(str, lacking))} lack it.", why)
            self.seen["explained: in another group"] += 1
        elif any(variants.values()):
            require(why == f"The same tokens are stored without the salt: {variants['without the salt']} blocks.", why)
            self.seen["explained: stored without the salt"] += 1
        else:
            require(why == "It was never stored, or that is longer ago than the log goes back.", why)
            self.seen["explained: never stored"] += 1

    def _told(self, key: Key) -> Explanation:
        """The answer of the daemon, without the log."""
        answer = admin_pb2.ExplainResponse(keys=key)
        for group in self.sites:
            if (now := self.core.explain(group, key)) is not None:
                copies = [
                    admin_pb2.ExplainedCopy(tier=TIER_TO_WIRE[copy.tier], state=_STATES(copy.phase + 1))
                    for copy in now.copies
                ]
                answer.blocks.add(cache=CACHE, group=group, copies=copies)
            elif (left := self.core.departure(group, key)) is not None:
                require(self.gone[group, key] == left[:2], f"the core says {left}, not {self.gone[group, key]}")
                require(left.cause is Cause.CAPACITY or not left.session, "another cause than room is for a session")
                answer.departures.add(cache=CACHE, group=group, cause=left.cause, time_ns=left.time_ns)
        return explanation_from_wire(key, answer)


def _gone(at: int, cause: Cause) -> str:
    return f"Gone since {datetime.fromtimestamp(at / 1e9).isoformat(' ', 'milliseconds')}. {why_gone(cause)}"


def _now(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("the coroutine waits")


def explained(seeds: range, steps: int) -> Counter[str]:
    """Walks. Returns the number of requests by what their explanation said."""
    seen = sum((walk(seed, steps, inspect=False, kind=ExplainedWorld).seen for seed in seeds), Counter[str]())
    return Counter({what: times for what, times in seen.items() if what.startswith("explained: ")})


def test_thousands_of_requests_are_explained_as_the_log_says() -> None:
    told = explained(range(20), 500)
    assert told.total() >= 5_000
    wanted = [f"explained: {each}" for each in (*GONE, *OTHERS)]
    assert [each for each in wanted if not told[each]] == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_thousand_requests_are_explained_as_the_log_says(part: int) -> None:
    assert explained(range(200 + 25 * part, 225 + 25 * part), 1_000).total() >= 10_000
