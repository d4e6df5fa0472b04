"""The scheduler's access to the daemon: lookups in shared memory, and calls in the background.

A background thread opens the cache, reserves slots ahead of need, and commits the blocks that the workers have written.
The scheduler's thread looks up blocks, and takes slots that are already reserved.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.keys import KEY_BYTES
from kvtier.cache import Cache
from kvtier.client import AsyncClient
from kvtier.deadline import Backoff
from kvtier.engine.client import EngineClient, PendingReset, opened
from kvtier.engine.layout import Layout
from kvtier.engine.options import Complaints, EngineOptions
from kvtier.engine.work import Placed
from kvtier.errors import InvalidArgument, KvtierError, RetryableError
from kvtier.events import WatchItem
from kvtier.groups import AcrossLease
from kvtier.lease import STAYS_BLANK, WriteLease
from kvtier.mirror.follower import follow
from kvtier.sync import Client
from kvtier.types import BlockResult, CacheOptions, Tier, WriteTicket
from kvtier.verbs import Hint
from kvtier.wire import MAX_KEYS

CALL_S: Final = 5.0
_DOUBT_S: Final = 0.2
_LEAST_PIN_S: Final = 0.01
_EXPLAIN_S: Final = 1.0
"""Least seconds from the end of an explanation to the next."""
_MOST_OF_TIER: Final = 4
"""Reserved slots and slots being saved are at most one in this many of the tier: loads need slots, too."""
_MOST_AHEAD: Final = 1 << 16

_OUTCOMES: Final = {
    BlockResult.OK: "blocks saved",
    BlockResult.EXISTS: "not saved: stored by another request",
    BlockResult.PARENT_MISSING: "not saved: an earlier block has been evicted",
}

_log = logging.getLogger("kvtier.engine")


class Slot(NamedTuple):
    """A reserved slot: its place in a lease."""

    lease: WriteLease
    ticket: WriteTicket
    place: int


def placed(slots: Iterable[Slot], pages: Iterable[int]) -> tuple[Placed, ...]:
    """Returns slots with their pages for the workers, one value per lease."""
    of_leases = groupby(zip(slots, pages, strict=True), key=lambda pair: pair[0].ticket)
    found = ((ticket, [*some]) for ticket, some in of_leases)
    return tuple(
        Placed(ticket, tuple([ticket.slots[slot.place] for slot, _ in some]), tuple([page for _, page in some]))
        for ticket, some in found
    )


class NewBlock(NamedTuple):
    """A block to be stored; a parent of zeros means none. ``tokens``: token ids of 4 bytes, or none."""

    key: bytes
    parent: bytes
    tokens: bytes
    slot: Slot


@dataclass(slots=True, frozen=True)
class _Tokens:
    """The tokens of a commit, in the place of its prompt."""

    packed: bytes

    def told(self, keys: bytes, options: CacheOptions) -> dict[str, Any]:
        return {"tokens": self.packed}

    def parent_of(self, key: bytes) -> None:
        return None


@dataclass(slots=True)
class Writing:
    """A save: by group, the blocks that the workers write and the commit stores. ``incomplete``: some are not stored.
    ``hints``: told after the commit."""

    blocks: dict[int, list[NewBlock]]
    incomplete: bool = False
    hints: Sequence[Hint] = ()
    done: threading.Event = field(default_factory=threading.Event)


class Leader:
    """Made by :class:`kvtier.engine.Planner`. Only :meth:`close` and :meth:`pin` wait; no method raises."""

    def __init__(
        self, layout: Layout, options: EngineOptions, watcher: Callable[[WatchItem], None] | None = None
    ) -> None:
        """``watcher``: called in the leader's own thread with the cache's snapshot and events, if the option ``events``
        is on.

        Raises :class:`InvalidArgument`, and with ``on_error = "fail"`` the error of opening the cache.
        """
        self.layout: Final = layout
        self.options: Final = options
        self.complaints: Final = Complaints(_log)
        self.name: Final = layout.cache(options.cache)
        self.block_s = options.recompute_seconds_per_block or 0.0
        """Seconds to compute a block: the store's blocks are fetched only if that is faster; 0 = always."""
        self._connection: Final = EngineClient(_log, self.name, partial(Client, options.address, timeout=CALL_S))
        self._reset: Final = PendingReset(self.name, options.address)
        self._groups: Final = range(len(layout.groups))
        self._full: Final = [group for group in self._groups if not layout.groups[group].window] or [0]
        self._cache: Cache | None = None
        self._late: Future[AcrossLease] | None = None
        """The last hold that was not granted in time."""
        self._leases: Final[list[list[WriteLease]]] = [[] for _ in self._groups]
        """Leases that the leader still holds, by group."""
        self._free: Final[list[deque[Slot]]] = [deque() for _ in self._groups]
        """Slots that no save has taken, and slots of leases that have ended, by group."""
        self._target: Final = [options.reserve_blocks for _ in self._groups]
        self._written: Final[deque[Writing]] = deque()
        self._watcher: Final = watcher if options.events else None
        self._watching: asyncio.Task[None] | None = None
        self._explains_at = 0.0
        """Monotonic time from which the next miss may be explained."""
        self._wake: Final = asyncio.Event()
        self._serving: Future[None] | None = None
        try:
            self._connection.open(self._open, fail=options.on_error == "fail")
        except KvtierError as error:
            if options.on_error == "fail":
                raise
            self._connection.begin(error)

    # -- the scheduler's thread ------------------------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        """Whether the cache is open and the daemon answered the last call."""
        return self._cache is not None and self._connection.connected

    def prefix_length(self, keys: bytes, *, counts: bool = False, stateless: bool = False) -> int:
        """Looks up the longest prefix of a chain that all groups can serve, in mapped memory. While the daemon does not
        answer, only blocks in memory count.

        Args:
            counts: a request's first lookup, which the hit ratio counts.
            stateless: groups with full attention only.
        """
        cache = self._cache
        if cache is None or self._reset.due:
            return 0
        groups = self._full if stateless else range(len(cache.spec.groups))
        if counts:
            cache.reader.ask_anew(keys)
        return cache.reader.prefix_length(keys, groups, for_save=not counts) or 0

    @property
    def keeps_tokens(self) -> bool:
        return self._cache is not None and self._cache.info.options.keep_tokens

    def stored(self, keys: bytes, group: int) -> bytes:
        """Returns a byte for each block of a group: not 0 if the block is certainly stored."""
        cache = None if self._reset.due else self._cache
        return (cache and cache.reader.probe(keys, group)) or bytes(len(keys) // KEY_BYTES)

    def on_disk(self, keys: bytes) -> NDArray[np.bool_]:
        """Returns for each stored block whether only the disk has it, in the first full-attention group."""
        residency = np.frombuffer(self.stored(keys, self._full[0]), np.uint8)
        return np.equal(residency, Tier.DISK.bit)

    def bring(self, keys: bytes, told: Callable[[float], None]) -> None:
        """Brings blocks of the first full-attention group to memory, in the background. ``told``: called with the
        seconds, on the leader's own thread, if all came."""

        async def bring() -> None:
            started = time.monotonic()
            results = await cache.move(keys, Tier.HOST, timeout=CALL_S)
            if set(results) == {BlockResult.OK}:
                told(time.monotonic() - started)

        if self._cache is not None:
            cache = self._cache.in_group(self._full[0])
            self._soon(bring, "the speed of the disk could not be measured")

    def sources(self, keys: bytes) -> dict[str, int]:
        """Counts the stored blocks by the fastest tier that has them, in the first full-attention group."""
        disk = int(np.count_nonzero(self.on_disk(keys)))
        return {"host": len(keys) // KEY_BYTES - disk, "disk": disk}

    def take(self, group: int, count: int) -> list[Slot]:
        """Takes up to ``count`` reserved slots of a group."""
        taken: list[Slot] = []
        with suppress(IndexError):
            while len(taken) < count:
                slot = self._free[group].popleft()
                if self._is_held(slot.lease):
                    taken.append(slot)
        if len(taken) < count:
            self._target[group] = min(2 * max(self._target[group], count), _MOST_AHEAD)
        self._look()
        return taken

    def give_back(self, group: int, slots: Sequence[Slot]) -> None:
        self._free[group].extendleft(reversed(slots))

    def free_slots(self, group: int) -> int:
        """Returns the number of slots that :meth:`take` could take."""
        return sum(self._is_held(slot.lease) for slot in list(self._free[group]))

    def commit(self, writing: Writing) -> None:
        """Queues the commit of a save that all ranks have written. ``writing.done`` is set when the commit is over."""
        self._written.append(writing)
        self._look()

    def leave_out(self, writing: Writing, lost: Mapping[int, Collection[int]]) -> None:
        """Leaves blocks out of a save before its commit. Their slots serve other blocks. ``lost``: by group, places."""
        for group, places in lost.items():
            blocks = writing.blocks.pop(group)
            self.give_back(group, [block.slot for place, block in enumerate(blocks) if place in places])
            if kept := [block for place, block in enumerate(blocks) if place not in places]:
                writing.blocks[group] = kept
        writing.incomplete = True

    def drop(self, writing: Writing) -> None:
        """Drops a save that a rank could not write, or whose pages were taken away. Its slots serve other blocks."""
        self._not_saved("the pages were taken away, or could not be copied", writing)
        self.doubt()
        for group, blocks in writing.blocks.items():
            self.give_back(group, [block.slot for block in blocks])
        writing.blocks = {}
        writing.done.set()

    def pin(self, keys: bytes) -> AcrossLease | None:
        """Holds a prefix, of at most ``MAX_KEYS`` blocks, in the host tier. Waits for at most ``pin_wait`` seconds.
        Returns None without a hold.

        While the daemon still owes the answer to an earlier call, returns None at once.
        """
        wait = self.options.pin_wait
        if not (self._late is None or self._late.done()):
            return None
        asked = self._acquiring(keys[: MAX_KEYS * KEY_BYTES], min_blocks=1, timeout=max(wait, _LEAST_PIN_S))
        if asked is None:
            return None
        try:
            return asked.result(wait)
        except KvtierError as error:
            self.complaints.add("a hit could not be pinned", error)
        except TimeoutError:
            self._late = asked
            self.unpin_later(asked)
        return None

    @property
    def has_store(self) -> bool:
        return self._cache is not None and self._cache.info.remote

    def fetch(self, keys: bytes, wait: float) -> Future[AcrossLease] | None:
        """Begins to fetch a prefix from the store and to hold it in the host tier. None: the daemon does not answer."""
        return self._acquiring(keys, recompute_seconds_per_block=self.block_s, timeout=wait)

    def _acquiring(self, keys: bytes, **wanted: Any) -> Future[AcrossLease] | None:
        cache, client = self._cache, self._connection.client
        if cache is None or client is None or not self.answers:
            return None

        async def acquire() -> AcrossLease:
            return await cache.across.acquire(keys, Tier.HOST, **wanted)

        with suppress(KvtierError):  # closed
            return client.submit(acquire)
        return None

    def note_why_not_fetched(self, keys: bytes, blocks: int) -> None:
        """Counts, in the background, the reason why a fetch brought no more than ``blocks`` blocks."""
        cache, price = self._cache, self.block_s

        async def look() -> None:
            reach = (await cache.across.match(keys, remote=True)).remote_blocks if cache is not None and price else 0
            why = "to recompute is cheaper" if reach > blocks else "the store has no more"
            self.complaints.note(f"not fetched: {why}")

        self._soon(look, "the store could not be asked")

    def explain_miss(self, request: str, keys: bytes) -> None:
        """Logs, in the background, why a block of a request is missing, for the share of requests in the options."""
        client = self._connection.client
        if random.random() >= self.options.explain_misses or client is None or time.monotonic() < self._explains_at:
            return
        self._explains_at = math.inf  # one at a time

        async def explain() -> None:
            first = keys[: MAX_KEYS * KEY_BYTES]
            try:
                told = await client.inner.explain_request(self.name, first, past=False, timeout=CALL_S)
                if told.miss is not None:  # else the request has been stored meanwhile
                    at = f"block {told.blocks} of {told.asked} is missing in {told.cache}"
                    _log.info("request %s: %s: %s", request, at, told.why)
            finally:
                self._explains_at = time.monotonic() + _EXPLAIN_S

        self._soon(explain, "a miss could not be explained")

    def unpin_later(self, asked: Future[AcrossLease]) -> None:
        """Gives back, in the background, a hold that is not granted yet."""

        async def give_back() -> None:
            await (await asyncio.wrap_future(asked)).release()

        self._soon(give_back, "a prefix could not be held in time")

    def unpin(self, lease: AcrossLease) -> None:
        """Gives a hold back, in the background."""
        self._soon(lease.release, "a hold could not be given back")

    def forget(self, key: bytes) -> None:
        """Drops the state of a block, in the background. A state that is held stays."""
        if (cache := self._cache) is not None:
            for group in self.layout.states:
                self._soon(partial(cache.in_group(group).drop, key), "a state could not be dropped")

    def reset(self) -> None:
        """Forgets every block of the cache: earlier blocks are no longer offered, nor by the next engine. Asks the
        daemon in the background until it has carried out the reset."""
        self._reset.begin()
        self._soon(self._carry_out_reset, "the cache could not be reset")

    def doubt(self) -> None:
        """Asks after a failed copy whether the daemon answers. While it does not, only blocks in memory are offered."""
        if (client := self._connection.client) is not None:
            stats = partial(client.inner.stats, timeout=_DOUBT_S)
            self._soon(stats, "the daemon did not answer after a copy had failed")

    def close(self) -> None:
        """Ends the session, which gives all slots back to the daemon."""
        if self._serving is not None:
            self._serving.cancel()
        self._connection.close()

    # -- the leader's own thread -----------------------------------------------------------------------------------

    def _is_held(self, lease: WriteLease) -> bool:
        return not lease.released and lease.binding.session == lease.cache.session_number

    def _soon(self, work: Callable[[], Coroutine[Any, Any, object]], fault: str) -> None:
        """Runs ``work`` on the leader's own thread, without waiting for it."""

        async def run() -> None:
            try:
                await work()
            except KvtierError as error:
                self.complaints.add(fault, error)

        if (client := self._connection.client) is not None:
            with suppress(KvtierError):  # closed: the daemon has everything back
                client.submit(run)

    def _look(self) -> None:
        if (client := self._connection.client) is not None:
            with suppress(KvtierError):  # closed
                client.thread.call_soon(self._wake.set)

    async def _serve(self, cache: Cache, client: AsyncClient) -> None:
        self._soon(self._carry_out_reset, "the cache could not be reset")
        if self._watcher is not None:
            self._watching = asyncio.create_task(self._watch(client, self._watcher))
        while True:
            self._wake.clear()
            while self._written:
                if client.connected:
                    await self._commit(self._written.popleft())
                else:  # the bytes stay in their slots
                    await asyncio.sleep(_DOUBT_S)
            await self._refill(cache)
            if not self._written:
                await self._wake.wait()

    async def _carry_out_reset(self) -> None:
        """Asks for due resets until the daemon has carried them out. Blocks committed meanwhile go with them."""
        backoff = Backoff(0.1, 5.0)
        while self._cache is not None and self._reset.due:
            why: object = "somebody holds or pins blocks"
            try:
                if await self._reset.carry_out(self._cache):
                    continue  # a later reset may be due
            except KvtierError as error:
                why = error
            self.complaints.add("the cache could not be reset yet", why)
            await asyncio.sleep(backoff.next())

    async def _watch(self, client: AsyncClient, watcher: Callable[[WatchItem], None]) -> None:
        backoff = Backoff(0.1, 5.0)
        while not client.closed:
            try:
                await follow(client, self.name, watcher)
            except (KvtierError, ValueError) as error:
                if not client.closed:
                    self.complaints.add("routers do not hear of the cache's blocks", error)
            await asyncio.sleep(backoff.next())

    def _open(self, client: Client) -> None:
        options = CacheOptions(write_policy=self.options.policy)
        name, spec = self.name, self.layout.spec
        cache = client.open_cache(name, spec, budgets=self.options.budgets, options=options).inner
        if self._reset.due and not client.thread.run(lambda: self._reset.carry_out(cache)):
            raise RetryableError("blocks that were to be forgotten are held or pinned", reason="HELD")
        if not cache.mapped or Tier.HOST in cache.unmapped or Tier.HOST not in cache.tiers:
            limit = "a daemon on this host with a host tier: an engine's pages are copied through its memory"
            raise InvalidArgument("kvtier setting address", client.address, limit)
        client.thread.run(lambda: self._refill(cache))
        self._cache = cache
        _log.info("%s", opened(cache.info, client.address, self.layout.weights))
        self._serving = client.submit(lambda: self._serve(cache, client.inner))

    async def _refill(self, cache: Cache) -> None:
        for group in self._groups:
            of_group = cache.in_group(group)
            most = max(1, of_group.slots(Tier.HOST) // _MOST_OF_TIER)
            target = min(self._target[group], most)
            leases = self._leases[group] = [lease for lease in self._leases[group] if self._is_held(lease)]
            free = self.free_slots(group)
            if 2 * free > target:
                continue
            wanted = min(target - free, most - sum(len(lease.blank) for lease in leases))
            if wanted <= 0:
                continue
            try:
                lease = await of_group.reserve(wanted, Tier.HOST, timeout=CALL_S)
            except KvtierError as error:
                self.complaints.add("no slots could be reserved", error)
                continue
            leases.append(lease)
            ticket = lease.ticket()
            self._free[group].extend(Slot(lease, ticket, place) for place in range(len(lease)))

    async def _commit(self, writing: Writing) -> None:
        try:
            # Full-attention groups come last: a prefix is found when every group has it.
            for group in sorted(writing.blocks, key=lambda group: not self.layout.groups[group].window):
                await self._commit_group(writing, group)
            if writing.hints and self._cache is not None:
                results = await self._cache.hint(*writing.hints, timeout=CALL_S)
                for result in results:
                    self.complaints.note(f"hint {result.outcome.name.lower()}")
        except KvtierError as error:
            self.complaints.add("a save could not be committed", error)
            self._not_saved("the commit failed", writing)
            for lease in {block.slot.lease for blocks in writing.blocks.values() for block in blocks}:
                await self._end(lease)  # its slots may or may not hold blocks
        finally:
            writing.done.set()

    async def _commit_group(self, writing: Writing, group: int) -> None:
        for lease, blocks in groupby(writing.blocks[group], key=lambda block: block.slot.lease):
            some = list(blocks)
            tokens = b"".join(block.tokens for block in some)
            results = await lease.commit(
                [block.key for block in some],
                parents=[block.parent for block in some],
                prompt=_Tokens(tokens) if tokens else None,
                at=[block.slot.place for block in some],
                hold=False,
                timeout=CALL_S,
            )
            for block, result in zip(some, results, strict=True):
                self.complaints.note(_OUTCOMES.get(result, f"not saved: {result.name.lower()}"))
                if result in STAYS_BLANK:
                    writing.incomplete = True
                    self._free[group].append(block.slot)
            if not lease.blank:
                await self._end(lease)

    def _not_saved(self, why: str, writing: Writing) -> None:
        writing.incomplete = True
        self.complaints.note(f"not saved: {why}", sum(map(len, writing.blocks.values())))

    async def _end(self, lease: WriteLease) -> None:
        try:
            await lease.cache.release(lease)
        except KvtierError as error:
            self.complaints.add("slots could not be given back", error)
