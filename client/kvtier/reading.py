"""Reads without a call: lookups in the mapped key index, and copies out of slots without a lease.

A copy is optimistic. The index names the slot of a block, and the slot's generation. After the copy the slot's
generation is compared. If it is unchanged, the bytes are the block's; otherwise the slot was given away meanwhile, and
the copy is void.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import xxhash
from grpc.aio import AioRpcError, UsageError
from numpy.typing import NDArray

from kvtier import buffers
from kvtier.abi.attention import Needed
from kvtier.abi.key_index import IndexEntries
from kvtier.abi.keys import KEY_BYTES, are_distinct
from kvtier.abi.spec import CacheSpec
from kvtier.abi.stream import CHECKSUM_BYTES
from kvtier.arena import Binder, MappedArena
from kvtier.buffers import GroupRows, PrefixRows, Rows
from kvtier.chains import Chains, count_leading
from kvtier.deadline import Deadline
from kvtier.errors import ClientClosed, DaemonUnavailable, DamagedTransfer
from kvtier.memory.arrays import Bytes
from kvtier.transport import Link, send
from kvtier.types import Tier
from kvtier.v1 import blocks_pb2
from kvtier.wire import Location, Match, ReadCounts

_TRIES: Final = 2
"""Attempts to copy a block whose slot is given away meanwhile, before the block counts as absent."""

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Mapping:
    """A mapped arena with a readable index. ``alone``: no daemon answers; an arena closed by its daemon is read too,
    since its bytes no longer change. ``remote``: absent blocks may be in the remote store."""

    arena: MappedArena
    chains: Chains
    alone: bool = False
    remote: bool = False

    @property
    def current(self) -> bool:
        """Whether index and slots may be read without a call."""
        return self.arena.current or (self.alone and not self.arena.stale)


class Reader:
    """Reads of one cache in all its window groups. Thread-safe. ``keys`` are packed. An answer of None means that only
    the daemon can tell."""

    def __init__(self, binder: Binder) -> None:
        self._binder: Final = binder
        self.recency: Final = Recency(binder)
        self._mapping: Mapping | None = None
        self._counts: Final[Counter[str]] = Counter()
        self._lock: Final = threading.Lock()

    @property
    def spec(self) -> CacheSpec:
        return self._binder.spec

    @property
    def way(self) -> str:
        """How reads find blocks: ``shared memory``, limited while the daemon does not answer, or ``calls`` and why."""
        if not self._binder.maps:
            return "calls: the cache's memory is not mapped here"
        arena = self._binder.binding.arena
        if arena.index is None:
            return "calls: the daemon keeps no key index on its kind of machine"
        if not self._binder.session.reachable and not arena.stale:
            return "shared memory, of mapped tiers alone: the daemon does not answer"
        if not arena.current:
            return "calls: the daemon that mapped its memory is gone; the next one maps it anew"
        return "shared memory"

    @property
    def counts(self) -> ReadCounts:
        with self._lock:
            return ReadCounts(**self._counts)

    def count(self, **more: int) -> None:
        """Adds to the counts of :class:`ReadCounts`, by name."""
        with self._lock:
            self._counts.update(more)

    def mute(self) -> None:
        """Counts no chain from now on: another process of the engine looks the same chains up."""
        self._binder.asked.muted = True

    def ask_anew(self, keys: bytes) -> None:
        """Makes the next lookup of a chain count, whatever was asked before."""
        self._binder.asked.stored(keys)

    def prefix_length(self, keys: bytes, groups: Sequence[int], *, for_save: bool = False) -> int | None:
        """``for_save``: the caller will store the missing blocks, so the lookup does not count as a question."""
        length = self._look_up(keys, lambda chains: chains.prefix_length(keys, groups))
        if length is not None and not for_save:
            self.looked_up(keys, groups[0], length)
        return length

    def match(self, keys: bytes, groups: Sequence[int], *, for_read: bool = False) -> Match | None:
        """``for_read``: of a read that follows and counts itself."""
        found = self._look_up(keys, lambda chains: chains.match(keys, groups), distinct=True)
        if found is not None and not for_read:
            self.looked_up(keys, groups[0], found.blocks)
        return found

    def looked_up(self, keys: bytes, group: int, found: int) -> None:
        """Counts a lookup. Over several groups a chain counts once, in the first group."""
        if keys and self._binder.asked.looked_up(keys, found):
            self.recency.note(group, (), len(keys) // KEY_BYTES, found)

    def answered(self, keys: bytes, group: int, found: int) -> None:
        """Counts a read, unless a lookup came before it."""
        if keys and self._binder.asked.read(keys):
            self.recency.note(group, (), len(keys) // KEY_BYTES, found)

    def probe(self, keys: bytes, group: int) -> bytes | None:
        return self._look_up(keys, lambda chains: chains.probe(keys, group))

    def absent(self, keys: bytes, group: int) -> Sequence[int] | None:
        """The places of the chain's blocks to store: in a full-attention group all from the first absent block on, else
        each absent block. Notes present blocks that no commit will touch as used."""
        mapping = self._current()
        if self._binder.bound_to(self._binder.session.live_link) is None:
            return None  # the mapping is of a daemon that is gone: the next daemon may lack its blocks
        if mapping is None or not are_distinct(keys):
            return None
        there = mapping.chains.find(keys, group).residency != 0
        if not mapping.chains.attentions[group].chained:
            absent: Sequence[int] = np.flatnonzero(~there).tolist()
            used = np.flatnonzero(there).tolist()
        else:
            absent = range(count_leading(there), len(there))
            used = [len(there) - 1] if len(there) and not absent else []  # a commit touches the ancestors of its blocks
        if used:
            self.recency.note(group, [keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] for place in used])
        return absent

    def locate(self, keys: bytes, group: int) -> list[Location] | None:
        return self._look_up(keys, lambda chains: chains.locate(keys, group), distinct=True)

    def _look_up(self, keys: bytes, look_up: Callable[[Chains], T | None], *, distinct: bool = False) -> T | None:
        mapping = self._current()
        if mapping is None or (distinct and not are_distinct(keys)):
            return None
        found = look_up(mapping.chains)
        if found is not None:
            self.count(lookups=1)
        return found

    def begin_all(self, keys: bytes, groups: Sequence[int], tier: Tier | None, targets: GroupRows) -> ChainRead:
        """Looks up the blocks of a chain that can be copied in each group: see :meth:`begin`."""
        if len(groups) == 1:
            (group,) = groups
            return ChainRead(self, keys, groups, [self.begin(keys, group, tier, targets.get(group))])
        match = self.match(keys, groups, for_read=True)
        if match is None:
            return ChainRead(self, keys, groups, [])
        prefix = keys[: match.blocks * KEY_BYTES]
        rows = {group: each[: match.blocks] for group, each in targets.items()}
        return ChainRead(self, keys, groups, [self.begin(prefix, group, tier, rows.get(group)) for group in groups])

    def begin(self, keys: bytes, group: int, tier: Tier | None, targets: Rows | None) -> Read:
        """Looks up the blocks of a chain that can be copied.

        Args:
            tier: copy out of this tier only.
            targets: a row per key; None: fresh arrays.
        """
        mapping = self._current()
        wanted = None if mapping is None or not are_distinct(keys) else mapping.chains.wanted(keys, group)
        if wanted is None:
            mapping, wanted = None, Needed(stop=len(keys) // KEY_BYTES)
        return Read(self, mapping, keys, wanted, group, tier, targets)

    def read(self, read: Read) -> None:
        """Counts the copied blocks, and notes them for the daemon."""
        self.count(hits=read.there, reuses=read.reuses)
        if read.blocks:
            self.recency.note(read.group, read.used())

    def _current(self) -> Mapping | None:
        binding = self._binder.readable
        if binding is None:
            return None
        arena, mapping = binding.mapped, self._mapping
        if arena is None or arena.index is None:
            return None
        if not self._binder.session.reachable:  # no daemon can load the rest
            mapping = Mapping(arena, Chains(arena.index, self.spec, arena.tiers), alone=True)
        elif mapping is None or mapping.arena is not arena:
            chains = Chains(arena.index, self.spec)
            self._mapping = mapping = Mapping(arena, chains, remote=binding.info.remote)
        return mapping if mapping.current else None


class ChainRead:
    """A copy of a chain's prefix out of the mapped slots of one or more groups. Over several groups, all blocks of the
    stored prefix are copied or none count. ``parts``: a read per group; empty if only the daemon can tell."""

    def __init__(self, reader: Reader, keys: bytes, groups: Sequence[int], parts: Sequence[Read]) -> None:
        self.keys: Final = keys
        self.nbytes = 0
        self.waits = False
        for part in parts:
            self.nbytes += part.nbytes
            self.waits |= part.waits
        self.blocks = 0
        self.done = False
        """Whether all stored blocks of the chain are copied, so that the daemon need not be asked."""
        self._reader: Final = reader
        self._groups: Final = groups
        self._parts: Final = parts

    @property
    def rows(self) -> dict[int, PrefixRows]:
        if not self.blocks:
            return {group: [] for group in self._groups}
        return {part.group: part.rows for part in self._parts}

    def copy(self) -> None:
        """Copies the bytes, in any thread, and blocks until the end. Counts the read if it is done."""
        for part in self._parts:
            part.copy()
        if len(self._groups) == 1:
            self.done, self.blocks = self._parts[0].done, self._parts[0].blocks
        elif self._parts and all(part.whole for part in self._parts):
            self.done, self.blocks = True, self._parts[0].blocks
        if self.done:
            missing = len(self.keys) // KEY_BYTES - self.blocks
            if missing:
                self._reader.count(misses=missing)
            self._reader.answered(self.keys, self._groups[0], self.blocks)


class Read:
    """A copy of the ``wanted`` blocks of a chain out of mapped slots: the first ones, or a whole window. ``there``:
    number of wanted blocks that can be copied, and after :meth:`copy` that were copied."""

    def __init__(
        self,
        reader: Reader,
        mapping: Mapping | None,
        keys: bytes,
        wanted: Needed,
        group: int,
        tier: Tier | None,
        targets: Rows | None,
    ) -> None:
        self.group: Final = group
        self.asked: Final = len(keys) // KEY_BYTES
        self.there = 0
        self.reuses = 0
        self._wanted: Final = wanted
        self._attention: Final = mapping.chains.attentions[group] if mapping else reader.spec.attention(group)
        self._reader: Final = reader
        self._mapping: Final = mapping
        self._keys: Final = wanted.cut(keys, KEY_BYTES)
        self._start = 0
        """Number of wanted blocks that are copied and verified."""
        self._current = True
        self._tiers: Final = [each for each in mapping.arena.tiers if tier is None or each is tier] if mapping else []
        self._bits: Final = sum(tier.bit for tier in self._tiers)
        self._found: IndexEntries = self._look_up() if mapping else IndexEntries.nothing(self.asked, sure=False)
        block_bytes = mapping.chains.block_bytes[group] if mapping else 0
        self.nbytes: Final = self.there * block_bytes
        into = None if targets is None else buffers.for_needed(targets, wanted)[: self.there]
        self._rows: Rows = np.empty((self.there, block_bytes), np.uint8) if into is None else into

    @property
    def blocks(self) -> int:
        """Length of the prefix that can be copied, or was; 0 if a part of a window is missing."""
        return self._wanted.stop if self.there and self._attention.span else self.there

    @property
    def rows(self) -> PrefixRows:
        return [*self._wanted.spread([*self._rows[: self.there]])] if self.there else []

    @property
    def whole(self) -> bool:
        return self.blocks == self.asked

    @property
    def done(self) -> bool:
        """Whether all stored blocks of the chain are there, so that the daemon need not be asked."""
        if self._mapping is None or self.blocks == self._wanted.stop or not self._current:
            return self._mapping is not None and self._current
        if self._mapping.remote and not self._mapping.alone:
            return False  # the daemon may have more
        following = self.there - self._start
        return not self._attention.span and bool(self._found.sure[following]) and self._found.residency[following] == 0

    @property
    def waits(self) -> bool:
        """Whether the copies wait for a device: see :meth:`kvtier.memory.tiers.Memory.waits`."""
        return self._mapping is not None and any(
            self._mapping.arena.memory(tier).waits(self._rows) for tier in self._tiers
        )

    def used(self) -> Sequence[bytes]:
        """Keys of the blocks to report as read: in a full-attention group only the last block of the chain."""
        ends = range(self.there * KEY_BYTES, 0, -KEY_BYTES)
        if self._attention.chained:
            ends = ends[:1]
        return [self._keys[end - KEY_BYTES : end] for end in ends]

    def copy(self) -> None:
        """Copies the bytes, in any thread, and blocks until the end. Reduces :attr:`there` to the blocks that stayed in
        their slots."""
        if self._mapping is None:
            return
        most = self.there
        for _ in range(_TRIES):
            void = self._copy(self._rows[self._start : self.there])
            if not len(void):
                break
            self._start += int(void[0])
            self._found = self._look_up()
            self.there = min(self.there, most)
        else:
            self._cut(self._start)
        if not self._mapping.current:
            self._current = False
            self._cut(0)
        self._reader.read(self)

    def _cut(self, there: int) -> None:
        """Sets the number of wanted blocks that can be copied; 0 for a part of a window, which is useless."""
        self.there = 0 if self._attention.span and there * KEY_BYTES < len(self._keys) else there

    def _look_up(self) -> IndexEntries:
        """Looks up where the blocks from ``_start`` on are now, and sets how many can be copied."""
        assert self._mapping is not None
        found = self._mapping.chains.find(self._keys[self._start * KEY_BYTES :], self.group)
        self._cut(self._start + count_leading(found.residency & self._bits != 0))
        return found

    def _copy(self, rows: Rows) -> NDArray[np.intp]:
        """Copies the first found blocks, one into each row. Returns the rows whose blocks left meanwhile."""
        where = self._found.residency[: len(rows)] & self._bits
        if len(self._tiers) == 1 and where.all():
            return self._copy_from(self._tiers[0], rows, slice(len(rows)))
        void = [np.flatnonzero(where == 0)]
        for tier in self._tiers:
            here = np.flatnonzero(where & tier.bit)
            if len(here):
                where[here] = 0
                void.append(here[self._copy_from(tier, buffers.picked(rows, here), here)])
        return np.sort(np.concatenate(void))

    def _copy_from(self, tier: Tier, rows: Rows, places: slice | NDArray[np.intp]) -> NDArray[np.intp]:
        """Copies these places of the found blocks out of one tier. Returns the rows whose slots were given away
        meanwhile."""
        assert self._mapping is not None
        slots, generations = _of_tier(self._found, tier)
        slots, generations = slots[places], generations[places]
        arena = self._mapping.arena
        try:
            arena.memory(tier).read(self.group, slots, rows)
        except IndexError:  # the index is damaged: it names a slot that does not exist
            return np.arange(len(rows))
        # Read after all bytes have arrived: the index's generation is even, and ends before the slot's first byte
        # changes.
        changed = np.flatnonzero(arena.generations(tier, self.group, slots) != generations)
        self.reuses += len(changed)
        return changed


def _of_tier(found: IndexEntries, tier: Tier) -> tuple[NDArray[np.integer[Any]], NDArray[np.uint64]]:
    if tier is Tier.DEVICE:
        return found.device_slots, found.device_generations
    return found.host_slots, found.host_generations


EVERY_S: Final = 0.1
MOST_KEYS: Final = 8_192
"""Most keys of a group per touch; above that the least recently read keys are dropped."""
_PATIENCE_S: Final = 1.0

_log = logging.getLogger(__name__)


class Recency:
    """Reads of one cache that the daemon has not been told of. Any thread may add notes; the session's loop sends
    them."""

    def __init__(self, binder: Binder) -> None:
        self._binder: Final = binder
        self._loop: Final = asyncio.get_running_loop()
        self._thread: Final = threading.get_ident()
        self._lock: Final = threading.Lock()
        self._keys: dict[int, dict[bytes, None]] = {}
        """Read keys by group, the least recently read first."""
        self._asked: dict[int, tuple[int, int]] = {}
        """Per group, the number of blocks of the chains asked for, and the number found."""
        self.due = False
        """Whether the sending of all notes so far is scheduled."""
        binder.ahead = self.ahead

    def note(self, group: int, keys: Iterable[bytes], asked: int = 0, found: int = 0) -> None:
        """Notes blocks as read, the most recent last, and a question for a chain of ``asked`` blocks."""
        with self._lock:
            of_group = self._keys.setdefault(group, {})
            for key in keys:
                of_group.pop(key, None)
                of_group[key] = None
            while len(of_group) > MOST_KEYS:
                del of_group[next(iter(of_group))]
            if asked:
                before = self._asked.get(group, (0, 0))
                self._asked[group] = before[0] + asked, before[1] + found
        if not self.due:
            self.due = True
            with suppress(RuntimeError):  # the loop is closed, and the session with it
                if threading.get_ident() == self._thread:  # the loop is awake in its own thread
                    self._loop.call_later(EVERY_S, self._tell_soon)
                else:
                    self._loop.call_soon_threadsafe(self._loop.call_later, EVERY_S, self._tell_soon)

    async def tell(self) -> None:
        """Sends all notes now. Notes that cannot be sent are lost, which affects the eviction order, never blocks."""
        await asyncio.gather(*self._untold())

    async def ahead(self) -> None:
        """Sends pending read notes before a call that may evict, so that it does not evict the caller's latest
        reads."""
        if self.due:
            self._tell_soon()
            await asyncio.sleep(0)

    def _tell_soon(self) -> None:
        for telling in self._untold():
            self._binder.session.spawn(telling)

    def _untold(self) -> list[Coroutine[Any, Any, None]]:
        self.due = False  # before the notes are taken, so that a later note schedules a new sending
        with self._lock:
            keys, self._keys = self._keys, {}
            asked, self._asked = self._asked, {}
        link = self._binder.session.live_link if self._binder.session.reachable else None
        groups = keys.keys() | asked.keys()
        return [self._tell(link, group, list(keys.get(group, ())), *asked.get(group, (0, 0))) for group in groups]

    async def _tell(self, link: Link | None, group: int, keys: list[bytes], asked: int, found: int) -> None:
        binding = self._binder.bound_to(link)
        if link is None or binding is None:
            _log.debug("%d reads of group %d are not told: the daemon is away", len(keys), group)
            return
        request = blocks_pb2.TouchRequest(
            cache_id=binding.cache_id, group=group, keys=b"".join(keys), queried=asked, found=found
        )
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await send(link, lambda stubs: stubs.blocks.Touch, request)
        except (AioRpcError, DaemonUnavailable, TimeoutError) as error:
            _log.debug("%d reads of group %d are not told: %s", len(keys), group, error)
        except (asyncio.CancelledError, UsageError) as error:
            with suppress(ClientClosed):
                closed = self._binder.session.channel_closed_by(error)
                _log.debug("%d reads of group %d are not told: %s", len(keys), group, closed)


async def digests_of(blocks: Sequence[Bytes]) -> list[bytes]:
    """Checksums of the blocks in the caller's memory, one per block: damage anywhere on the way shows."""
    return await buffers.run_copy(
        lambda: [xxhash.xxh3_128_digest(block.data) for block in blocks], sum(map(len, blocks))
    )


async def verified(binder: Binder, group: int, packed: bytes, rows: Sequence[Bytes], deadline: Deadline) -> int:
    """Number of leading rows that equal the daemon's copies of these keys; the daemon no longer knows the next row's
    block. Raises :class:`DamagedTransfer` if a row differs."""
    request = blocks_pb2.ChecksumsRequest(group=group, keys=packed)
    reply = await binder.call(lambda stubs: stubs.blocks.Checksums, request, deadline)
    for place, (known, digest) in enumerate(zip(reply.known, await digests_of(rows), strict=True)):
        if not known:
            return place
        if reply.checksums[place * CHECKSUM_BYTES : (place + 1) * CHECKSUM_BYTES] != digest:
            message = f"block {place}: what was copied is not what the daemon has in memory"
            raise DamagedTransfer(message, reason="CHECKSUM_MISMATCH")
    return len(rows)
