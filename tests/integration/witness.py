"""A watcher that follows its daemon through any number of deaths, and holds every item against what was promised."""

from collections import defaultdict, deque

from kvtier import AsyncClient, Cause, Cursor, Event, EventType, Gap, Tier
from kvtier.cache import Cache
from kvtier.events import WatchItem
from tests.integration.following import Following
from tests.integration.residency import ResidencyTable
from tests.integration.waiting import eventually


class Witness(Following):
    """Reads all events from the oldest held on. ``async with``; a broken promise is raised by whatever waits next.

    Promised: inside an epoch, over clean restarts too, ids follow each other without a hole; between two epochs comes
    one gap that begins where the first was left, ends where the second begins and says "unclean-stop".
    """

    def __init__(self, client: AsyncClient) -> None:
        super().__init__(client.watch(oldest=True, heartbeat_s=0.5))
        self.events = 0
        self.gaps: list[Gap] = []
        self.on_disk_before: dict[str, set[bytes]] = {}
        """By cache: what the last event of the daemon's life before this one left on disk."""
        self.recovered: dict[str, set[bytes]] = {}
        """By cache: what was announced as found on disk in the present life."""
        self.left_disk: dict[str, set[bytes]] = defaultdict(set)
        """By cache: what was ever announced to have left the disk."""
        self._newest = ResidencyTable()
        self._settled = ResidencyTable()
        self._unsettled: deque[Event] = deque()
        self._bridge: Gap | None = None

    def take(self, item: WatchItem) -> None:
        match item:
            case Event():
                self._take_event(item)
            case Gap():
                self._take_gap(item)

    async def more(self, count: int) -> None:
        """Returns after ``count`` more events."""
        end = self.events + count
        await self.until(lambda: self.events >= end)

    async def assert_agrees(self, cache: Cache) -> None:
        """That a listing of a quiet cache, and the events up to its cursor, say the same of every block."""
        listed: dict[bytes, int] = {}

        async def listing() -> set[Cursor]:
            listed.clear()
            cursors = set()
            async for page in cache.pages():
                cursors.add(page.as_of)
                listed.update((block.key, block.residency) for block in page.blocks)
            return cursors

        (as_of,) = await eventually(listing, lambda cursors: len(cursors) == 1)
        await self.reach(as_of)
        while self._unsettled and self._unsettled[0].cursor <= as_of:
            self._settled.apply(self._unsettled.popleft())
        assert self._settled.blocks(cache.name, cache.group) == listed

    def _take_gap(self, gap: Gap) -> None:
        assert gap.reason == "unclean-stop", gap
        assert (gap.epoch, gap.first_id) == (self.cursor.epoch, self.cursor.id + 1), (gap, self.cursor)
        assert gap.last_id >= self.cursor.id, gap
        self.gaps.append(gap)
        self._bridge = gap

    def _take_event(self, event: Event) -> None:
        if event.epoch == self.cursor.epoch:
            assert event.event_id == self.cursor.id + 1, (event.cursor, self.cursor)
        elif self.cursor.epoch:
            assert self._bridge is not None, f"from {self.cursor} to {event.cursor} without a word"
            assert event.epoch > self._bridge.epoch
            assert event.event_id == self._bridge.last_id + 1, (event.cursor, self._bridge)
            self._bridge = None
        self.cursor = event.cursor
        self.events += 1
        self._note_disk(event)
        self._newest.apply(event)
        self._unsettled.append(event)

    def _note_disk(self, event: Event) -> None:
        before = self._newest.blocks(event.cache, event.group)
        match event.type:
            case EventType.CREATED:
                self.on_disk_before[event.cache] = {key for key, where in before.items() if where & Tier.DISK.bit}
                self.recovered[event.cache] = set()
            case EventType.STORED if event.cause is Cause.RECOVERED:
                self.recovered[event.cache].update(event.keys)
            case EventType.REMOVED:
                self.left_disk[event.cache].update(key for key in event.keys if before[key] & Tier.DISK.bit)
            case EventType.UPDATED:
                pairs = zip(event.keys, event.residency, strict=True)
                self.left_disk[event.cache].update(key for key, now in pairs if before[key] & ~now & Tier.DISK.bit)
            case _:
                pass
