"""A core on a test bench: blocks have names, moves land on request, and the checker runs after every call."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvtierd.core.check import check
from kvtierd.core.events import BlockEvent, Cause, EventSequencer, EventType
from kvtierd.core.ids import TIERS, CacheId, GroupId, Key, LeaseId, SessionId, SlotId, TicketId, Tier, Traits
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Grant, GroupGrant, Move, MoveResult, Outcome, Refusal
from kvtierd.core.policy import GroupShape, Policy
from kvtierd.core.recovery import RecoveredBlock
from kvtierd.core.slots import SlotState
from kvtierd.core.transfers import BlockResult, ChainRequest, CommitItem, TierCount

GROUP: Final = GroupId(0)
ALICE: Final = SessionId(1)
BOB: Final = SessionId(2)
DEVICE, HOST, DISK = TIERS
SECOND: Final = 1_000_000_000


_NAMES: Final[dict[Key, str]] = {}


def key(name: str) -> Key:
    """Returns the key of the block with this name."""
    made = Key(hashlib.sha256(name.encode()).digest())
    _NAMES[made] = name
    return made


def name_of(key: Key) -> str:
    return _NAMES[key]


def keys(names: Iterable[str]) -> list[Key]:
    return [key(name) for name in names]


class Bench:
    """A cache. Blocks are named by strings; a chain is a string, one letter per block, the root first.

    ``recovered``: (name, parent, priority) of the blocks in the disk's first slots at the start; ``retained``:
    (duration in ms, deadline in ns) by name, for recovered blocks that have a duration. ``events``, ``moves`` (in
    flight), ``grants`` and ``refusals`` collect the contents of the outcomes.
    """

    def __init__(
        self,
        *,
        device: int = 0,
        host: int = 0,
        disk: int = 0,
        policy: Policy | None = None,
        recovered: Sequence[tuple[str, str | None, int]] = (),
        retained: Mapping[str, tuple[int, int]] | None = None,
        quarantined: Sequence[int] = (),
        restarted: bool = False,
        unclean: bool = False,
    ) -> None:
        slots = {tier: count for tier, count in zip(TIERS, (device, host, disk), strict=True) if count}
        shape = GroupShape(GROUP, slots, dict.fromkeys(slots, 4096))
        self.core = BlockManager(CacheId(1), [shape], EventSequencer(), policy)
        self.now = 0
        self.events: list[BlockEvent] = []
        self.moves: list[Move] = []
        self.grants: dict[TicketId, Grant] = {}
        self.refusals: dict[TicketId, Refusal] = {}
        found = {
            GROUP: [
                RecoveredBlock(
                    SlotId(slot),
                    key(name),
                    None if parent is None else key(parent),
                    Traits(priority, *(retained or {}).get(name, ())),
                )
                for slot, (name, parent, priority) in enumerate(recovered)
            ]
        }
        bad = {GROUP: [SlotId(slot) for slot in quarantined]}
        self.core.fill(found, bad, unclean=unclean, restarted=restarted)
        self.apply(self.core.announce(self.now))

    def apply(self, outcome: Outcome) -> Outcome:
        self.events += outcome.events
        self.moves += outcome.moves
        self.grants |= {grant.ticket: grant for grant in outcome.grants}
        self.refusals |= {refusal.ticket: refusal for refusal in outcome.refusals}
        check(self.core)
        return outcome

    # -- calls -------------------------------------------------------------------------------------------------------

    def reserve(self, tier: Tier, count: int, session: SessionId = ALICE, after: str | None = None) -> TicketId:
        ticket, outcome = self.core.reserve(
            session, GROUP, tier, count, self.now, None if after is None else key(after)
        )
        self.apply(outcome)
        return ticket

    def make_room(self, tier: Tier, count: int, after: str | None = None) -> TicketId:
        """Reserves slots, and ends the moves that this takes."""
        ticket = self.reserve(tier, count, after=after)
        self.land()
        return ticket

    def blank(self, tier: Tier, count: int, session: SessionId = ALICE) -> GroupGrant:
        """Reserves slots that must be granted without waiting."""
        return self.grants[self.reserve(tier, count, session)].only

    def lease_ahead(self, tier: Tier, count: int, after: str, session: SessionId = ALICE) -> LeaseId | None:
        lease, outcome = self.core.lease_ahead(session, GROUP, tier, count, key(after), self.now)
        self.apply(outcome)
        return None if lease is None else lease.id

    def commit(
        self,
        grant: GroupGrant,
        items: Sequence[tuple[str, str | None, int]],
        session: SessionId = ALICE,
        duration_ms: int = 0,
    ) -> list[BlockResult]:
        """Commits blocks in the grant's first slots. ``items``: (name, parent, priority) of each block."""
        assert grant.lease is not None
        made = [
            CommitItem(slot, key(name), None if parent is None else key(parent), priority, duration_ms)
            for slot, (name, parent, priority) in zip(grant.slots, items, strict=False)
        ]
        results, outcome = self.core.commit(session, grant.lease, made, self.now)
        self.apply(outcome)
        return list(results)

    def store(
        self,
        chain: str,
        tier: Tier = DEVICE,
        *,
        under: str | None = None,
        priority: int = 35,
        duration_ms: int = 0,
        session: SessionId = ALICE,
    ) -> LeaseId:
        """Commits a chain (``under`` a block) in slots that are granted at once, and keeps its lease."""
        grant = self.blank(tier, len(chain), session)
        parents = [under, *chain[:-1]]
        items = [(name, parent, priority) for name, parent in zip(chain, parents, strict=True)]
        assert set(self.commit(grant, items, session, duration_ms)) == {BlockResult.OK}
        assert grant.lease is not None
        return grant.lease

    def put(
        self, chain: str, tier: Tier = DEVICE, *, under: str | None = None, priority: int = 35, duration_ms: int = 0
    ) -> None:
        """Stores a chain and releases it."""
        self.release(self.store(chain, tier, under=under, priority=priority, duration_ms=duration_ms))

    def acquire(
        self, *chains: str, tier: Tier = DEVICE, min_blocks: int = 0, session: SessionId = ALICE
    ) -> tuple[TicketId, ...]:
        requests = [ChainRequest(keys(chain), min_blocks) for chain in chains]
        tickets, outcome = self.core.acquire(session, [GROUP], tier, requests, self.now)
        self.apply(outcome)
        return tickets

    def retain(self, names: str, priority: int, duration_ms: int = 0) -> list[BlockResult]:
        """Gives each of these blocks the same new retention."""
        results, outcome = self.core.set_retention(
            GROUP, keys(names), [priority] * len(names), [duration_ms] * len(names), self.now
        )
        self.apply(outcome)
        return list(results)

    def pin(self, names: str, tier: Tier = DEVICE, *, unpin: bool = False) -> list[BlockResult]:
        results, outcome = self.core.pin(GROUP, tier, keys(names), self.now, unpin=unpin)
        self.apply(outcome)
        return list(results)

    def pass_ms(self, milliseconds: int) -> None:
        """Advances the clock, and ticks the core."""
        self.now += milliseconds * 1_000_000
        self.apply(self.core.tick(self.now))

    def touch(self, chain: str, tier: Tier = DEVICE) -> None:
        """Acquires a chain that is READY in the tier, and releases it."""
        (ticket,) = self.acquire(chain, tier=tier)
        self.release(self.lease(ticket))

    def tell_read(self, names: str) -> None:
        """Tells the core that a client has read these blocks without a call."""
        self.apply(self.core.touch(GROUP, keys(names), self.now))

    def release(self, *leases: LeaseId, session: SessionId = ALICE) -> None:
        self.apply(self.core.release(session, leases, self.now))

    def move(self, names: str, to: Tier, session: SessionId = ALICE) -> TicketId:
        ticket, outcome = self.core.move(session, GROUP, to, keys(names), self.now)
        self.apply(outcome)
        return ticket

    def end(self, session: SessionId = ALICE) -> None:
        self.apply(self.core.end_session(session, self.now))

    def orphan(self, session: SessionId = ALICE) -> None:
        self.apply(self.core.orphan_session(session, self.now))

    def drop(self, names: str, session: SessionId = ALICE) -> tuple[list[BlockResult], int]:
        drop, outcome = self.core.drop(GROUP, keys(names), self.now)
        self.apply(outcome)
        assert drop.report is not None
        return list(drop.report.results), drop.report.dropped

    def rest(self) -> None:
        """Does all work that earlier calls have left."""
        while self.core.behind:
            self.apply(self.core.go_on(self.now))

    def expire(self, ticket: TicketId) -> None:
        self.apply(self.core.expire(ticket, self.now))

    def cancel(self, ticket: TicketId) -> None:
        self.apply(self.core.cancel(ticket, self.now))

    def lose_bytes(self, name: str, tier: Tier) -> SlotId:
        """Reports the block's copy in the tier as corrupt. Returns its slot. Its descendants go in slices."""
        slot = self.slot(name, tier)
        assert slot is not None
        self.apply(self.core.lose_bytes(GROUP, key(name), tier, slot, self.now))
        return slot

    def lose(self, tier: Tier = Tier.DISK) -> None:
        self.apply(self.core.lose_tier(tier, self.now))
        self.rest()

    def restore_disk(self) -> None:
        self.apply(self.core.restore_disk(self.now))

    # -- the mover ---------------------------------------------------------------------------------------------------

    def land(self, *, failed: str = "", corrupt: str = "") -> None:
        """Ends all moves in flight in the order planned, and the moves that these cause. ``failed``, ``corrupt``:
        blocks whose copies do."""
        while self.moves:
            self.land_one(failed=failed, corrupt=corrupt)

    def land_one(self, position: int = 0, *, failed: str = "", corrupt: str = "") -> Move:
        """Ends a move in flight."""
        move = self.moves.pop(position)
        result = MoveResult(move.id, self._items(move, failed), self._items(move, corrupt), queue_ns=5, copy_ns=7)
        self.apply(self.core.completed([result], self.now))
        return move

    def fail_all(self) -> None:
        """Fails all moves that are now in flight."""
        moves, self.moves = self.moves, []
        for move in moves:
            result = MoveResult(move.id, frozenset(range(len(move.items))))
            self.apply(self.core.completed([result], self.now))

    def in_flight(self) -> list[tuple[str, Tier, Tier | None, Cause]]:
        """Returns (block, from, to, cause) of all copies and deletions in flight."""
        return [(name_of(i.key), m.src, m.dst, m.cause) for m in self.moves for i in m.items]

    def _items(self, move: Move, names: str) -> frozenset[int]:
        return frozenset(n for n, item in enumerate(move.items) if name_of(item.key) in names)

    # -- the state ---------------------------------------------------------------------------------------------------

    def where(self, name: str) -> set[Tier]:
        """Returns the tiers where the block is READY."""
        (location,) = self.core.locate(GROUP, [key(name)])
        return {tier for tier in TIERS if location.residency & tier.bit}

    def slot(self, name: str, tier: Tier) -> SlotId | None:
        return self.core.locate(GROUP, [key(name)])[0].slots[tier]

    def priority(self, name: str) -> int:
        rows = self.core.listing(GROUP, 0, 1000).rows
        return next(row.priority for row in rows if row.key == key(name))

    def stored(self) -> str:
        """Returns the names of all indexed blocks, sorted."""
        return "".join(sorted(name_of(row.key) for row in self.core.listing(GROUP, 0, 1000).rows))

    def lease(self, ticket: TicketId) -> LeaseId:
        (lease,) = self.grants[ticket].leases
        return lease

    def answered(self, ticket: TicketId) -> bool:
        return ticket in self.grants or ticket in self.refusals

    def tier(self, tier: Tier) -> TierCount:
        return self.core.stats().tiers[tier]

    def states(self, tier: Tier) -> dict[SlotState, int]:
        """Counts the tier's slots by state. States without slots are left out."""
        return {state: count for state, count in self.tier(tier).states.items() if count}

    def said(self, since: int = 0) -> Iterator[tuple[EventType, Cause, str]]:
        """Yields (type, cause, names of the blocks) of the events, from the ``since``-th on."""
        for event in self.events[since:]:
            yield event.type, event.cause, "".join(map(name_of, event.blocks.keys))
