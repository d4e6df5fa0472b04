"""Somebody who keeps books of every block by events alone, believes none that says nothing new, and compares."""

from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import NamedTuple

from kvtier import AsyncClient, Cache, Cause, Cursor, Event, EventType, Gap, Tier
from kvtier.events import WatchItem
from tests.integration.following import Following
from tests.integration.seeing import last_event
from tests.integration.waiting import eventually


class Entry(NamedTuple):
    """What was last said of a block."""

    residency: int
    priority: int
    parent: bytes | None


class Told(NamedTuple):
    """One change of one block, or of a whole group: ``before`` and ``after`` are residency sets, of a group those of
    all its blocks together."""

    type: EventType
    cause: Cause | int
    before: int
    after: int


Blocks = dict[bytes, Entry]


class Books(Following):
    """Follows everything from the oldest event on. ``told``: how often which change was told of.

    Every event must be news: what is stored was not there, what is updated was and is now elsewhere or of another
    priority, what is removed was there. Parents are stored before their children and go after them.
    """

    def __init__(self, client: AsyncClient) -> None:
        super().__init__(client.watch(oldest=True, heartbeat_s=0.2, heartbeats=True))
        self.told: Counter[Told] = Counter()
        self.gaps: list[Gap] = []
        self._groups: dict[tuple[str, int], Blocks] = {}
        self._client = client

    def take(self, item: WatchItem) -> None:
        if isinstance(item, Gap):
            assert item.reason == "unclean-stop", item
            self.gaps.append(item)
        elif isinstance(item, Event):
            self._enter(item)
        if self._watch.cursor is not None:
            self.cursor = max(self.cursor, self._watch.cursor)

    async def causes(self, wanted: Callable[[Told], object]) -> set[Cause | int]:
        """Of all changes so far that are ``wanted``."""
        await self.reach(await last_event(self._client))
        return {told.cause for told in self.told if wanted(told)}

    async def agree(self, *caches: Cache) -> None:
        """That these caches' own listings say the same of every block, and the books have no other."""
        for cache in caches:
            listed = await eventually(lambda: self._listed(cache), lambda found: found is not None)  # noqa: B023
            assert listed is not None
            known = self._groups.get((cache.name, cache.group), {})
            differ = {key: (known.get(key), listed.get(key)) for key in known.keys() | listed.keys()}
            assert {key: pair for key, pair in differ.items() if pair[0] != pair[1]} == {}

    def has(self, cache: str) -> bool:
        """Any block of it."""
        return any(blocks for (name, _), blocks in self._groups.items() if name == cache)

    async def _listed(self, cache: Cache) -> Blocks | None:
        """A listing of the moment that the books are at; None where they have gone on since."""
        as_of, listed = await self._quiet(cache)
        await self.reach(as_of)
        return listed if self.cursor == as_of else None

    async def _quiet(self, cache: Cache) -> tuple[Cursor, Blocks]:
        """A listing of one moment, after which nothing has been entered yet."""

        async def still() -> tuple[set[Cursor], Blocks]:
            cursors, listed = await _listing(cache)
            return (cursors if self.cursor <= max(cursors) else set()), listed

        cursors, listed = await eventually(still, lambda found: len(found[0]) == 1)
        return cursors.pop(), listed

    def _enter(self, event: Event) -> None:
        blocks = self._groups.setdefault((event.cache, event.group), {})
        match event.type:
            case EventType.STORED:
                for key, parent, residency, priority in zip(
                    event.keys, event.parents, event.residency, event.priorities, strict=True
                ):
                    assert key not in blocks, f"{event} stores what is stored"
                    assert residency, f"{event} stores nowhere"
                    assert parent is None or parent in blocks, f"{event} stores before the parent"
                    self._change(event, blocks, key, Entry(residency, priority, parent))
            case EventType.UPDATED:
                for key, residency, priority in zip(event.keys, event.residency, event.priorities, strict=True):
                    assert key in blocks, f"{event} updates what is not there"
                    now = Entry(residency, priority, blocks[key].parent)
                    assert now != blocks[key], f"{event} says nothing new"
                    assert residency, f"{event} leaves it nowhere"
                    self._change(event, blocks, key, now)
            case EventType.REMOVED:
                for key in event.keys:
                    assert key in blocks, f"{event} removes what is not there"
                    assert all(other.parent != key for other in blocks.values()), f"{event} removes before the children"
                    self.told[Told(event.type, event.cause, blocks[key].residency, 0)] += 1
                    del blocks[key]
            case EventType.CREATED | EventType.CLEARED:
                gone = reduce(or_, (entry.residency for entry in blocks.values()), 0)
                self.told[Told(event.type, event.cause, gone, 0)] += 1
                if event.type is EventType.CLEARED:
                    blocks.clear()

    def _change(self, event: Event, blocks: Blocks, key: bytes, now: Entry) -> None:
        before = blocks[key].residency if key in blocks else 0
        if event.moved_from is not None and event.moved_to is not None:
            assert before & event.moved_from.bit, f"{event} moves from where it is not"
            assert now.residency & event.moved_to.bit and not before & event.moved_to.bit, f"{event} moves nothing"
            assert event.moved_bytes > 0, event
        self.told[Told(event.type, event.cause, before, now.residency)] += 1
        blocks[key] = now


async def _listing(cache: Cache) -> tuple[set[Cursor], Blocks]:
    cursors: set[Cursor] = set()
    listed: Blocks = {}
    async for page in cache.pages():
        cursors.add(page.as_of)
        listed.update((block.key, Entry(block.residency, block.priority, block.parent)) for block in page.blocks)
    return cursors, listed


def moved(src: Tier, dst: Tier) -> Callable[[Told], bool]:
    """Changes that brought a block from one tier into another."""
    return lambda told: bool(told.before & src.bit and told.after & dst.bit and not told.before & dst.bit)
