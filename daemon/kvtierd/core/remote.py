"""Chooses the blocks of a window group that the remote store gets next.

The store is no tier: it has no slots, and no block waits for it. Blocks are offered ahead of their eviction, or when
they are new or used again. A block that leaves before it was copied is not stored. The store's contents are never known
for certain, so residency sets do not name the store.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from kvtierd.core.block import READY, Block
from kvtierd.core.events import REMOVED, UPDATED, Cause
from kvtierd.core.eviction import Candidates
from kvtierd.core.ids import BITS, DEVICE, DISK, HOST, REMOTE, GroupId, Key, Tier, Traits
from kvtierd.core.index import BlockIndex
from kvtierd.core.outcome import Outcome, Recorder, Transfer
from kvtierd.core.policy import GroupShape, RemotePolicy, RemoteWrites
from kvtierd.core.slots import SlotTable

_READABLE: Final = BITS[HOST] | BITS[DISK]


class Offer(NamedTuple):
    """A block for the remote store. ``tier`` and ``slot``: where its bytes can be read now. ``recovered``: the block is
    older than the last restart, or the store had it on an earlier day."""

    key: Key
    parent: Key | None
    traits: Traits
    tier: Tier
    slot: int
    recovered: bool


class OfferingGroup(Protocol):
    """A window group as the remote store sees it: see :class:`kvtierd.core.group.GroupState`."""

    shape: GroupShape
    tiers: tuple[Tier, ...]
    slots: dict[Tier, SlotTable]
    index: BlockIndex
    removed: int
    remote: GroupRemote | None

    def reconsider(self, block: Block) -> None: ...
    def candidates(self, tier: Tier) -> Candidates: ...


class GroupRemote:
    """The remote store's side of one window group. ``settled``: blocks that are in the store, on their way, or
    excluded."""

    def __init__(self, state: OfferingGroup, writes: RemoteWrites) -> None:
        self._state = state
        self._writes = writes
        self._lowest = state.tiers[-1]
        slots = state.slots[self._lowest].capacity
        self._ahead = max(1, int(writes.ahead * slots))
        self._by_rank = writes.policy is RemotePolicy.EVICT and self._lowest is not DEVICE
        """Whether blocks are offered in eviction order."""
        self._offered = 0
        self._due: dict[Block, None] = {}
        self._later: set[Block] = set()
        """Blocks that were due while only a device had them."""
        self._recovered: deque[Block] = deque()
        """Blocks that the store may have: older than a restart, or settled long ago. Offered last."""
        self._old: set[Block] = set()
        """The indexed blocks that were ever in ``_recovered``."""
        self.settled: dict[Block, int] = {}
        """The day when each block was settled."""
        self.day = 0
        self.left = 0
        """Blocks that were due and left this host."""

    def is_candidate(self, block: Block, tier: Tier) -> bool:
        """Whether the block is to be offered before it leaves this tier."""
        return self._by_rank and tier is self._lowest and block not in self.settled and self._wanted(block)

    def arrived(self, block: Block) -> None:
        """Notes that the host can read the block now."""
        due = self._writes.policy is RemotePolicy.THROUGH or block in self._later
        self._later.discard(block)
        if due and block not in self.settled:
            self._due[block] = None

    def recovered(self, blocks: Iterable[Block]) -> None:
        """Takes the blocks that a restart found, parents before children."""
        if self._writes.policy is not RemotePolicy.THROUGH:
            return
        for block in filter(self._wanted, blocks):
            self._old.add(block)
            if block.residency & _READABLE:
                self._recovered.append(block)
            else:
                self._later.add(block)

    def unwritten(self) -> dict[str, int]:
        """Largest number of blocks that are still to be offered, by reason."""
        return {"waiting": len(self._due), "recovered": len(self._recovered), "on a device alone": len(self._later)}

    def used_again(self, blocks: Iterable[Block]) -> None:
        for block in blocks if self.day else ():
            if self.settled.get(block, self.day) < self.day - 1:  # the store may have deleted it by its own rules
                del self.settled[block]
                self._state.reconsider(block)
                self._old.add(block)
                self._recovered.append(block)
        if self._writes.policy is RemotePolicy.SECOND_USE:
            self._due.update((block, None) for block in blocks if block not in self.settled and block not in self._old)

    def forget(self, block: Block) -> None:
        """Forgets a block that is no longer indexed."""
        self.left += block in self._due or block in self._later
        self._due.pop(block, None)
        self._later.discard(block)
        self._old.discard(block)
        self.settled.pop(block, None)

    def take(self, count: int) -> list[Offer]:
        """Returns the next blocks to copy, ``count`` or a few more, each after its ancestors."""
        offers: list[Offer] = []
        while len(offers) < count and (block := self._next()) is not None:
            line = [block]
            for above in block.ancestors():
                if above in self.settled or above in self._later:
                    break
                line.append(above)
            for member in reversed(line):
                offers += self._offer(member)
        return offers

    def _next(self) -> Block | None:
        while self._due:
            block = next(iter(self._due))
            del self._due[block]
            if block not in self.settled:
                return block
        while self._recovered:
            block = self._recovered.popleft()
            if block not in self.settled:
                if block.indexed:
                    return block
                self.left += 1
        free = self._state.slots[self._lowest].free
        if not self._by_rank or free >= self._ahead or self._offered >= self._state.removed + self._ahead:
            return None
        candidates: Candidates = self._state.candidates(self._lowest)
        return candidates.unsettled.victim()

    def _offer(self, block: Block) -> Iterable[Offer]:
        if not block.residency & _READABLE:
            if not self._by_rank:
                self._later.add(block)
            return
        self._settle(block)
        if not self._wanted(block):
            return
        self._offered += block not in self._old
        tier = HOST if block.residency & BITS[HOST] else DISK
        copy = block.copies[tier]
        if copy is not None:
            yield Offer(block.key, block.parent_key, block.traits, tier, copy.slot, block in self._old)

    def _settle(self, block: Block) -> None:
        self.settled[block] = self.day
        self._state.reconsider(block)

    def _wanted(self, block: Block) -> bool:
        most, tokens = self._writes.first_tokens, self._state.shape.tokens_per_block
        return block.priority >= self._writes.min_priority and (not most or block.depth * tokens < most)

    def keep(self, keys: Iterable[Key]) -> None:
        """Notes blocks that the store has, because they were fetched from it."""
        for key in keys:
            block = self._state.index.get(key)
            if block is not None:
                self._settle(block)

    def put_back(self, keys: Iterable[Key]) -> None:
        """Offers blocks again that the store did not take."""
        for key in keys:
            block = self._state.index.get(key)
            if block is not None and block in self.settled:
                del self.settled[block]
                self._offered -= block not in self._old
                self._state.reconsider(block)
                if not self._by_rank:
                    self._due[block] = None


class CacheRemote:
    """A cache's side of the remote store. ``take``: returns the outcome of a call, see :class:`BlockManager`."""

    def __init__(
        self, states: Mapping[GroupId, OfferingGroup], recorder: Recorder, take: Callable[[int], Outcome]
    ) -> None:
        self._states = states
        self._remotes = {group: state.remote for group, state in states.items() if state.remote is not None}
        self._recorder = recorder
        self._take = take

    def offers(self, group: GroupId, count: int) -> list[Offer]:
        """Returns the next ``count`` blocks for the store, or a few more. A block is offered once, unless it is
        :meth:`put_back`."""
        return self._remotes[group].take(count) if group in self._remotes else []

    def put_back(self, group: GroupId, keys: Sequence[Key]) -> None:
        """Takes back offered blocks that the store did not take."""
        if group in self._remotes:
            self._remotes[group].put_back(keys)

    def begin_day(self, number: int) -> None:
        """Begins a day. A block used on this day is offered again if it was settled before the previous day."""
        for remote in self._remotes.values():
            remote.day = number

    def unwritten(self) -> Counter[str]:
        """Number of blocks that wait for the store, by reason."""
        counts = Counter[str]()
        for remote in self._remotes.values():
            counts.update(remote.unwritten())
        return counts

    @property
    def left(self) -> int:
        """Number of blocks that were due and left this host unwritten."""
        return sum(remote.left for remote in self._remotes.values())

    def slot(self, group: GroupId, key: Key) -> tuple[Tier, int] | None:
        """Returns the tier and slot to read a block from; None if it has no readable copy."""
        block = self._states[group].index.get(key)
        copies = [] if block is None else [(tier, block.copies[tier]) for tier in (HOST, DISK)]
        ready = [(tier, copy.slot) for tier, copy in copies if copy is not None and copy.phase is READY]
        return ready[0] if ready else None

    def ancestors(self, group: GroupId, key: Key) -> Iterator[Key]:
        """The keys of a block's ancestors, parent first; none if the block is not indexed."""
        block = self._states[group].index.get(key)
        return iter(()) if block is None else (above.key for above in block.ancestors())

    def absent(self, group: GroupId, keys: Sequence[Key]) -> list[Key]:
        """The keys that are not indexed, in their order."""
        index = self._states[group].index
        return [key for key in keys if index.get(key) is None]

    def travelled(self, group: GroupId, keys: Sequence[Key], src: Tier, dst: Tier, copy_ns: int, now: int) -> Outcome:
        """Records that blocks, if indexed, went to the store or came from it. Blocks from the store count as stored
        there. Changes no residency."""
        state = self._states[group]
        known = [block for block in map(state.index.get, keys) if block is not None]
        local = src if dst is REMOTE else dst
        transfer = Transfer(src, dst, state.shape.slot_bytes[local], 0, copy_ns)
        for block in known:
            self._recorder.change(UPDATED, Cause.REMOTE, group, block, transfer)
        if group in self._remotes and src is REMOTE:
            self._remotes[group].keep(block.key for block in known)
        return self._take(now)

    def damaged(self, group: GroupId, key: Key, now: int) -> Outcome:
        """Records that the store's copy of a block is corrupt. An event is sent only if the block is not indexed
        here."""
        state = self._states[group]
        if state.index.get(key) is None:
            transfer = Transfer(REMOTE, HOST, state.shape.slot_bytes[HOST], 0, 0)
            self._recorder.change(REMOVED, Cause.CORRUPT, group, Block(key, None, None, Traits(0)), transfer)
        return self._take(now)
