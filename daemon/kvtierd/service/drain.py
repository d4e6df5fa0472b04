"""``kvtier.v1.Events.Drain``: a cache's events as TensorRT-LLM's JSON, pulled by whoever asks instead of pushed.

A drain is a watcher of one cache that nobody reads but its session's calls: it begins with a snapshot, and with another
one after a gap. Between calls it holds what it remembers of the cache, one batch of its watch, and the last answer, in
case that did not arrive.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc

from kvtier.abi.block_tokens import BlockTokens
from kvtier.abi.trtllm import Json, TrtllmTeller
from kvtier.v1 import events_pb2
from kvtierd.core.ids import GroupId, SessionId
from kvtierd.rights import Right
from kvtierd.service import validate, wire
from kvtierd.service.calls import StreamVerb, Verb
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import CallRefused, bad_argument, refused
from kvtierd.service.sessions import Session, session_ended

MOST_EVENTS: Final = 4096
"""Of an answer."""

ANSWER_BYTES: Final = 1 << 20
"""An answer is closed once it is so long."""

COMPANY_S: Final = 0.005
"""Once there is something to answer, so long is waited for more of it."""

SESSION_DRAINS: Final = 16
REMEMBERED_SLOTS: Final = 1 << 20
"""Most slots of all caches that are drained, each counted for each drain: a block costs about 300 bytes."""

_SEEING: Final = frozenset({Right.WATCH, Right.TOKENS})

_Batches = Callable[[], AsyncGenerator[bytes, None]]
"""A watch that begins with a snapshot."""


@dataclass(slots=True, frozen=True)
class _Told:
    """A stored, updated or removed event, or a slice, as :mod:`kvtier.abi.trtllm` reads it."""

    group: int
    event_hash: str
    window_tokens: int
    packed_keys: bytes
    packed_hashes: bytes
    residency: bytes
    priorities: bytes
    packed_parents: bytes
    packed_parent_hashes: bytes
    packed_tokens: Sequence[events_pb2.BlockTokens]

    @property
    def tokens(self) -> Iterable[BlockTokens]:
        """Unpacked as they are asked for: all at once they would hold up the loop."""
        return map(_unpacked, self.packed_tokens) if self.packed_tokens else ()

    @classmethod
    def of(cls, message: events_pb2.Event | events_pb2.SnapshotSlice) -> _Told:
        return cls(
            message.group,
            message.event_hash,
            message.window_tokens,
            message.keys,
            message.event_hashes,
            message.residency,
            message.priorities,
            message.parents,
            message.parent_hashes,
            message.tokens,
        )


@dataclass(slots=True, frozen=True)
class _Answer:
    """Events [start, end), some of which may be lost."""

    start: int
    end: int
    body: str
    lost: int

    def message(self) -> events_pb2.DrainResponse:
        return events_pb2.DrainResponse(events=self.body, next_event_id=self.end, lost=self.lost)


class Drain:
    """``slots``: by group, of each tier that the cache has, the fastest first; none while it is not open."""

    def __init__(self, batches: _Batches, slots: Callable[[GroupId], list[int]]) -> None:
        self._batches = batches
        self._slots = slots
        self._teller = TrtllmTeller()
        self._batch: asyncio.Queue[events_pb2.WatchBatch | None] = asyncio.Queue(1)
        self._over: Exception | None = None
        """Why no batch will come any more."""
        self._forgotten = False
        """Nor is what came told any more."""
        self._telling: Iterator[Json] = iter(())
        self._ready: deque[tuple[int, str]] = deque()
        self._ready_bytes = 0
        self._begun: set[int] = set()
        """Groups of which the present snapshot has said that they exist."""
        self._lost = 0
        self._last = _Answer(0, 0, "[]", 0)
        self._turn = asyncio.Lock()

    @property
    def answered(self) -> bool:
        """Whether any event was."""
        return self._last.end > 0

    async def read(self, session: Session) -> None:
        """Follows the cache until the session ends, or something is wrong, which the next call is told."""
        try:
            async with session.streaming():
                while True:
                    async with aclosing(self._batches()) as batches:
                        async for raw in batches:
                            batch = events_pb2.WatchBatch.FromString(raw)
                            await self._batch.put(batch)
                            if batch.HasField("gap"):
                                break  # a snapshot says what was missed
        except asyncio.CancelledError:
            self._stop(session_ended())
            raise
        except Exception as error:  # noqa: BLE001  it is raised in the next call
            self._stop(error)

    def forget(self, why: Exception) -> None:
        """Nothing that it still has is told to anybody; who waits for an answer is told why."""
        self._over, self._forgotten = why, True
        self._ready.clear()
        self._ready_bytes = 0
        while not self._batch.empty():
            self._batch.get_nowait()
        self._batch.put_nowait(None)

    def _stop(self, why: Exception) -> None:
        self._over = self._over or why
        if self._batch.empty():
            self._batch.put_nowait(None)  # for a call that waits

    async def answer(self, next_id: int, wait_s: float, most: int) -> events_pb2.DrainResponse:
        """What there is from ``next_id`` on. Raises INVALID_ARGUMENT for a number that no answer has given, and what
        its watch did."""
        async with self._turn:
            last = self._last
            if next_id == last.start < last.end:
                return last.message()
            if next_id != last.end:
                limit = f"{last.end}, as the last answer said; {last.start} to have that again; or 0 to begin anew"
                raise bad_argument("next_event_id", next_id, limit)
            await self._fill(wait_s, most)
            self._last = self._taken(last.end, most)
            return self._last.message()

    async def _fill(self, wait_s: float, most: int) -> None:
        # What is ready stays so: a call that is cancelled here takes nothing with it.
        end = asyncio.get_running_loop().time() + wait_s
        while len(self._ready) < most and self._ready_bytes < ANSWER_BYTES:
            if self._over is not None and self._forgotten:
                raise self._over
            event = next(self._telling, None)
            if event is not None:
                text = json.dumps(event, separators=(",", ":"))
                self._ready.append((event["event_id"], text))
                self._ready_bytes += len(text)
                await asyncio.sleep(0)  # each of them takes up to a millisecond of the loop
                continue
            patience = 0.0 if self._ready else end - asyncio.get_running_loop().time()
            batch = await self._next(max(patience, COMPANY_S))
            if batch is None:
                return
            self._telling = self._tell(batch)

    async def _next(self, patience_s: float) -> events_pb2.WatchBatch | None:
        """None where none came."""
        if self._over is not None and self._batch.empty():
            raise self._over
        try:
            async with asyncio.timeout(patience_s):
                batch = await self._batch.get()
        except TimeoutError:
            return None
        return batch if batch is not None else await self._next(patience_s)

    def _taken(self, start: int, most: int) -> _Answer:
        """All that is ready, or the first ``most`` of it."""
        ready = [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        self._ready_bytes -= sum(len(text) for _, text in ready)
        lost, self._lost = self._lost, 0
        end = ready[-1][0] + 1 if ready else start
        return _Answer(start, end, f"[{','.join(text for _, text in ready)}]", lost)

    def _tell(self, batch: events_pb2.WatchBatch) -> Iterator[Json]:
        for event in batch.events:
            yield from self._of_event(event)
        if batch.HasField("slice"):
            told = _Told.of(batch.slice)
            if told.group not in self._begun:
                self._begun.add(told.group)
                yield from self._teller.created(told, self._slots(GroupId(told.group)))
            yield from self._teller.stored(told)
        if batch.HasField("gap"):
            count = batch.gap.last_id - batch.gap.first_id + 1
            self._lost += count
            self._teller.lost(count)
            self._begun.clear()
            yield from self._teller.begin()

    def _of_event(self, event: events_pb2.Event) -> Iterator[Json]:
        teller = self._teller
        match event.type:
            case events_pb2.EVENT_TYPE_CREATED:
                self._begun.add(event.group)
                yield from teller.created(event, event.num_blocks_per_cache_level)
            case events_pb2.EVENT_TYPE_STORED:
                yield from teller.stored(_Told.of(event))
            case events_pb2.EVENT_TYPE_UPDATED:
                moved_from = wire.TIER_FROM_WIRE.get(event.moved_from)
                yield from teller.updated(_Told.of(event), moved_from)
            case events_pb2.EVENT_TYPE_REMOVED:
                yield from teller.removed(_Told.of(event))
            case events_pb2.EVENT_TYPE_CLEARED:
                yield from teller.cleared(event)


@dataclass(slots=True, frozen=True)
class _Begun:
    """``rights``: that its session had when it began, of those that decide what it may be told."""

    session: Session
    drain: Drain
    task: asyncio.Task[None]
    rights: frozenset[Right]


class Drains:
    """All drains, by session and cache. Loop thread only."""

    def __init__(self, watch: StreamVerb, catalog: Catalog, sees: Callable[[Session, str], frozenset[Right]]) -> None:
        """``sees``: which rights a session has on the cache of a name."""
        self._watch: Final = watch
        self._catalog: Final = catalog
        self._sees: Final = sees
        self._drains: Final[dict[tuple[SessionId, str], _Begun]] = {}

    def verbs(self) -> Mapping[str, Verb]:
        return {"Drain": self.drain}

    async def drain(self, session: Session, request: events_pb2.DrainRequest) -> events_pb2.DrainResponse:
        name = validate.cache_name(request.name)
        wait_s = validate.count("timeout_ns", request.timeout_ns, 0, validate.MAX_TIMEOUT_NS) / 1e9
        most = validate.count("max_events", request.max_events, 0, MOST_EVENTS) or MOST_EVENTS
        key = session.id, name
        found = self._drains.get(key)
        if found is not None and not request.next_event_id and found.drain.answered:
            await self._end(key)
            found = None
        if found is None:
            if request.next_event_id:
                raise _no_drain(f"nothing of cache {name} was drained by this session")
            found = self._begin(session, name)
        return await found.drain.answer(request.next_event_id, wait_s, most)

    def rights_changed(self) -> None:
        """What was read with a right that its session has no more is not told: such a drain is over."""
        for (_, name), begun in list(self._drains.items()):
            if not begun.rights <= self._sees(begun.session, name):
                begun.task.cancel()
                begun.drain.forget(_no_drain(f"rights on cache {name} were taken away"))
                del self._drains[begun.session.id, name]

    async def close(self) -> None:
        """Ends them all."""
        for key in list(self._drains):
            await self._end(key)

    def _begin(self, session: Session, name: str) -> _Begun:
        self._require_room(session, name)
        request = events_pb2.WatchRequest(snapshot=True, filter=events_pb2.WatchFilter(caches=[name]))
        drain = Drain(partial(self._watch, session, request), partial(self._slots, name))
        task = asyncio.create_task(drain.read(session), name=f"drain of {name}")
        key = session.id, name
        begun = self._drains[key] = _Begun(session, drain, task, self._sees(session, name) & _SEEING)
        task.add_done_callback(partial(self._ended, key))
        return begun

    def _require_room(self, session: Session, name: str) -> None:
        of_session = sum(owner == session.id for owner, _ in self._drains)
        if of_session >= SESSION_DRAINS:
            says = f"a session drains at most {SESSION_DRAINS} caches"
            raise refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_DRAINS", says)
        taken = sum(self._weight(other) for _, other in self._drains)
        if taken and taken + self._weight(name) > REMEMBERED_SLOTS:
            says = f"drains remember {taken} slots of caches, and {self._weight(name)} of {name} would be too many"
            raise refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_DRAINS", f"{says}: {REMEMBERED_SLOTS} at most")

    def _weight(self, name: str) -> int:
        cache = self._catalog.named(name)
        return 0 if cache is None else sum(sum(counts) for counts in cache.slots.values())

    def _slots(self, name: str, group: GroupId) -> list[int]:
        cache = self._catalog.named(name)
        return [] if cache is None else [cache.slots[tier][group] for tier in sorted(cache.slots)]

    async def _end(self, key: tuple[SessionId, str]) -> None:
        task = self._drains.pop(key).task
        task.cancel()
        await asyncio.wait([task])

    def _ended(self, key: tuple[SessionId, str], task: asyncio.Task[None]) -> None:
        found = self._drains.get(key)
        if found is not None and found.task is task:
            del self._drains[key]


def _no_drain(why: str) -> CallRefused:
    return refused(grpc.StatusCode.NOT_FOUND, "NO_DRAIN", f"{why}: begin with next_event_id = 0")


def _unpacked(tokens: events_pb2.BlockTokens) -> BlockTokens:
    return BlockTokens.unpacked(
        tokens.token_ids,
        tokens.extra_ids,
        tokens.lora_id if tokens.HasField("lora_id") else None,
        tokens.cache_salt if tokens.HasField("cache_salt") else None,
        tokens.mm_digests,
        tokens.mm_offsets,
    )
