"""``kvtier.v1.Admin``: statistics, leases, kicks, copies and leases of a block, deletions from the remote store."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvtier.v1 import admin_pb2, blocks_pb2
from kvtierd.core.block import Phase
from kvtierd.core.explain import BlockNow
from kvtierd.core.ids import KEY_BYTES, TIERS, GroupId, Key, SessionId, Tier
from kvtierd.core.leases import SlotLease
from kvtierd.core.transfers import GroupCounts, ManagerStats, TierCount
from kvtierd.event_log import EventLog, LogStatus
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import UnknownCache
from kvtierd.rights import Right
from kvtierd.service import validation, wire
from kvtierd.service.attach import DaemonIdentity
from kvtierd.service.budgets import Account
from kvtierd.service.cache import ServedCache
from kvtierd.service.calls import Access, denied
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import bad_argument, refused, unknown
from kvtierd.service.hub import EventHub
from kvtierd.service.remote.tier import RemoteTier
from kvtierd.service.server import Health
from kvtierd.service.sessions import ClientSession, SessionRegistry

if TYPE_CHECKING:
    from kvtierd.fleet.peers import Fleet

SHORTEST_PREFIX: Final = 4
MOST_KEYS: Final = 32
SCANNED_A_TURN: Final = 2_048
"""Keys compared with a prefix in one turn of the loop."""

_STATES: Final[Mapping[Phase, admin_pb2.CopyState.ValueType]] = {
    Phase.FILLING: admin_pb2.COPY_STATE_FILLING,
    Phase.READY: admin_pb2.COPY_STATE_READY,
    Phase.LEAVING: admin_pb2.COPY_STATE_LEAVING,
}


@dataclass(slots=True, frozen=True, eq=False)
class AdminService:
    """``_watching``: returns the session and the unsent events of each watcher. ``_fleet``: None if no peer is
    configured."""

    _engine: Engine
    _catalog: Catalog
    _sessions: SessionRegistry
    _access: Access
    _hub: EventHub
    _identity: DaemonIdentity
    _health: Health
    _watching: Callable[[], Iterable[tuple[ClientSession, int]]]
    _log: EventLog | None
    _devices: Sequence[admin_pb2.DeviceStats]
    _remote: RemoteTier | None
    _fleet: Fleet | None
    _version: str = field(default_factory=partial(version, "kvtier"), init=False)
    _start_time_ns: int = field(default_factory=time.time_ns, init=False)
    _started: int = field(default_factory=time.monotonic_ns, init=False)

    async def stats(self, session: ClientSession, request: admin_pb2.StatsRequest) -> admin_pb2.StatsResponse:
        """Covers the caches that the caller administers and the sessions that have these open or hold slots there. A
        caller that administers every cache sees all sessions."""
        caches = [cache for cache in self._catalog if self._access.may(session, Right.ADMIN, cache.name)]
        everything = self._access.may_everywhere(session, Right.ADMIN)
        stats = {cache.id: self._engine.manager(cache.id).stats() for cache in caches}
        held: dict[SessionId, int] = {}
        for one in stats.values():
            for holder, slots in one.held_by.items():
                held[holder] = held.get(holder, 0) + slots
        seen = {
            one.id: one
            for one in self._sessions
            if everything or one.id in held or any(cache.id in one.caches for cache in caches)
        }
        return admin_pb2.StatsResponse(
            version=self._version,
            pid=self._identity.pid,
            epoch=self._identity.epoch,
            boot=self._identity.boot,
            start_time_ns=self._start_time_ns,
            last_event_id=self._engine.last_event,
            watchers=len(self._hub.watchers),
            caches=[self._cache(cache, stats[cache.id]) for cache in caches],
            sessions=[self._session(one, caches, held.get(one.id, 0)) for one in seen.values()],
            problems=self._health.problems(caches),
            notes=self._catalog.notes,
            event_log=None if self._log is None else _event_log(self._log.status()),
            devices=self._devices,
            tiers=[_tier_bytes(account, {cache.name for cache in caches}) for account in self._catalog.accounts],
            remote=None if self._remote is None else _remote(self._remote),
            uptime_ns=time.monotonic_ns() - self._started,
            peers=self._peers() if everything else (),
            watcher_stats=[_watcher(one, lag) for one, lag in self._watching() if one.id in seen],
        )

    async def leases(self, session: ClientSession, request: admin_pb2.LeasesRequest) -> admin_pb2.LeasesResponse:
        await self._catalog.loaded()
        caches = self._wanted_caches(request.cache)
        leases = ((cache, lease) for cache in caches for lease in self._engine.manager(cache.id).leases.values())
        found = sorted(leases, key=lambda lease: lease[1].granted_at)
        now = time.time_ns()
        return admin_pb2.LeasesResponse(
            leases=[
                _lease_info(cache, lease, self._sessions.get(lease.session), now)
                for cache, lease in found
                if request.session_id in (0, lease.session)
            ]
        )

    async def kick(self, session: ClientSession, request: admin_pb2.KickRequest) -> admin_pb2.KickResponse:
        """Counts the session's leases and slots, then kicks it. No lease begins or ends between count and kick."""
        kicked = self._sessions.get(SessionId(request.session_id))
        if kicked is None:
            raise unknown("session_id", request.session_id, "session", "NO_SUCH_SESSION")
        held = admin_pb2.KickResponse(
            leases=self._engine.session_leases(kicked.id), slots=self._engine.held_by(kicked.id)
        )
        if not request.dry_run:
            self._sessions.kick(kicked, f"kicked by session {session.id}, pid {session.peer.pid}")
        return held

    async def explain(self, session: ClientSession, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
        prefix = bytes(request.key)
        if not SHORTEST_PREFIX <= len(prefix) <= KEY_BYTES:
            raise bad_argument("key", f"{len(prefix)} bytes", f"{SHORTEST_PREFIX} to {KEY_BYTES} bytes")
        await self._catalog.loaded()
        caches = self._explained_caches(session, request.cache)
        keys = [Key(prefix)] if len(prefix) == KEY_BYTES else await self._keys_with(caches, prefix)
        blocks: list[admin_pb2.ExplainedBlock] = []
        for cache in caches if len(keys) == 1 else ():
            with suppress(UnknownCache):  # removed meanwhile
                blocks += self._explained(session, cache, keys[0])
        return admin_pb2.ExplainResponse(
            keys=b"".join(keys),
            blocks=blocks,
            remote=self._explained_remote(caches, keys[0]) if len(keys) == 1 else (),
            departures=self._departures(session, caches, keys[0]) if len(keys) == 1 else (),
            as_of_event=blocks_pb2.Cursor(epoch=self._identity.epoch, id=self._engine.last_event),
            time_ns=time.time_ns(),
        )

    async def holdings(self, session: ClientSession, request: admin_pb2.HoldingsRequest) -> admin_pb2.HoldingsResponse:
        packed = bytes(request.keys)
        by_prefix = SHORTEST_PREFIX <= len(packed) < KEY_BYTES
        keys = [] if by_prefix else validation.keys("keys", packed)
        await self._catalog.loaded()
        caches = self._explained_caches(session, request.cache)
        if by_prefix:
            keys = await self._keys_with(caches, packed)
            if self._fleet is not None:
                places = [(cache.name, cache.fingerprint, len(cache.spec.groups)) for cache in caches]
                there = [await self._fleet.keys_with(*place, packed) for place in places]
                keys = sorted({*keys, *(key for each in there for key in each)})[:MOST_KEYS]
        found: list[admin_pb2.Holding] = []
        for cache in caches if len(keys) == 1 or not by_prefix else ():
            for group in map(GroupId, range(len(cache.spec.groups))):
                with suppress(UnknownCache):  # removed meanwhile
                    here = self._engine.manager(cache.id).match([group], keys)
                    found.append(_holding("", cache, group, here.blocks, here.groups[0].residency))
                if self._remote is not None and (known := self._remote.reach(cache, group, keys)):
                    found.append(_holding(self._remote.url, cache, group, known, ()))
                for peer in () if self._fleet is None else self._fleet.peers:
                    await asyncio.sleep(0)
                    blocks, residency = peer.holding(cache.name, cache.fingerprint, group, keys)
                    found.append(_holding(peer.address, cache, group, blocks, residency))
        found = sorted((each for each in found if each.blocks), key=lambda each: each.peer)
        return admin_pb2.HoldingsResponse(keys=b"".join(keys), found=found, peers=self._peers())

    def _peers(self) -> list[admin_pb2.PeerStats]:
        peers = () if self._fleet is None else self._fleet.peers
        return [
            admin_pb2.PeerStats(address=peer.address, state=peer.status, blocks=peer.blocks, problem=peer.why)
            for peer in peers
        ]

    async def remote_gc(self, session: ClientSession, request: admin_pb2.RemoteGcRequest) -> admin_pb2.RemoteGcResponse:
        for name in request.caches:
            self._access.require_on(session, Right.ADMIN, validation.cache_name(name, "caches"))
        if not request.caches and not self._access.may_everywhere(session, Right.ADMIN):
            raise denied(Right.ADMIN, "every cache", session.peer.identity)
        keep_bytes = request.keep_bytes if request.HasField("keep_bytes") else None
        if not request.older_than_ns and keep_bytes is None:
            raise bad_argument("older_than_ns", 0, "above 0 where keep_bytes is not given")
        if self._remote is None or self._remote.deleter is None:
            message = "the daemon has no remote store: its configuration has no [remote]"
            raise refused(grpc.StatusCode.FAILED_PRECONDITION, "NO_REMOTE", message)
        older_than_s = request.older_than_ns / 1e9 if request.older_than_ns else None
        caches = sorted(set(request.caches))
        counts = await self._remote.deleter.run(caches, older_than_s, keep_bytes, dry_run=request.dry_run)
        return admin_pb2.RemoteGcResponse(
            objects=counts.gone, bytes=counts.gone_bytes, kept_objects=counts.kept, kept_bytes=counts.kept_bytes
        )

    def _wanted_caches(self, name: str) -> Iterable[ServedCache]:
        if not name:
            return self._catalog
        cache = self._catalog.named(validation.cache_name(name, "cache"))
        if cache is None:
            raise unknown("cache", name)
        return [cache]

    def _session(
        self, session: ClientSession, caches: Sequence[ServedCache], held_slots: int
    ) -> admin_pb2.SessionStats:
        """``caches``: the caches whose leases are counted. ``held_slots``: the session's slots in these caches."""
        leases = sum(cache.runtime.manager.session_leases(session.id) for cache in caches)
        others = {"session_id": session.id, "attached": session.attached, "leases": leases, "held_slots": held_slots}
        return wire.same_fields(admin_pb2.SessionStats, session.peer, **others)

    def _cache(self, cache: ServedCache, stats: ManagerStats) -> admin_pb2.CacheStats:
        index = cache.runtime.arena.index
        return wire.same_fields(
            admin_pb2.CacheStats,
            stats,
            cache_id=cache.id,
            name=cache.name,
            edges=self._edges(stats),
            groups=[_group(cache, group, counts) for group, counts in stats.groups.items()],
            index_places=index.places if index is not None else 0,
            unindexed=index.unindexed if index is not None else 0,
            device=cache.device.id,
            **_by_tier(stats),
        )

    def _edges(self, stats: ManagerStats) -> list[admin_pb2.EdgeStats]:
        """Queue lengths cover the whole daemon: all caches share the threads of an edge."""
        queued = self._engine.queues()
        now = time.time_ns()
        return [
            wire.same_fields(
                admin_pb2.EdgeStats,
                record,
                edge=f"{src}>{dst}",
                queued_blocks=queued.get((src, dst), 0),
                degraded=record.degraded_until > now,
            )
            for (src, dst), record in sorted(stats.edges.items())
        ]

    def _explained_caches(self, session: ClientSession, name: str) -> Sequence[ServedCache]:
        """The named cache, else all that the caller may see. A name raises PERMISSION_DENIED or NOT_FOUND."""
        if name and not self._may_see(session, validation.cache_name(name, "cache")):
            raise denied(Right.READ, name, session.peer.identity)
        return [cache for cache in self._wanted_caches(name) if self._may_see(session, cache.name)]

    def _may_see(self, session: ClientSession, cache: str) -> bool:
        return any(self._access.may(session, right, cache) for right in (Right.READ, Right.WATCH))

    async def _keys_with(self, caches: Sequence[ServedCache], prefix: bytes) -> list[Key]:
        """Distinct keys that begin with ``prefix``, sorted, at most :data:`MOST_KEYS`."""
        found: set[Key] = set()
        for cache in caches:
            for group in map(GroupId, range(len(cache.spec.groups))):
                page = 0
                with suppress(UnknownCache):
                    while len(found) < MOST_KEYS:
                        listing = self._engine.manager(cache.id).listing(group, page, SCANNED_A_TURN)
                        found.update(row.key for row in listing.rows if row.key.startswith(prefix))
                        if not (page := listing.next_page):
                            break
                        await asyncio.sleep(0)
        return sorted(found)[:MOST_KEYS]

    def _explained_remote(self, caches: Iterable[ServedCache], key: Key) -> Iterator[admin_pb2.ExplainedRemote]:
        """Yields the daemon's knowledge of the store, without a call to it; nothing if there is no store."""
        if self._remote is None or not self._remote.url:
            return
        for cache in caches:
            for group in map(GroupId, range(len(cache.spec.groups))):
                name = self._remote.names(cache, group, [key])[key]
                yield admin_pb2.ExplainedRemote(cache=cache.name, group=group, there=self._remote.known.of(name))

    def _departures(
        self, session: ClientSession, caches: Iterable[ServedCache], key: Key
    ) -> Iterator[admin_pb2.Departure]:
        whose = self._access.may_everywhere(session, Right.ADMIN)
        for cache in (cache for cache in caches if self._access.may(session, Right.WATCH, cache.name)):
            for group in map(GroupId, range(len(cache.spec.groups))):
                with suppress(UnknownCache):
                    if (left := self._engine.manager(cache.id).departure(group, key)) is not None:
                        pid, command = self._sessions.owner_of(left.session) if whose else (0, "")
                        place = {"cache": cache.name, "group": group, "session_id": left.session}
                        yield wire.same_fields(admin_pb2.Departure, left, **place, pid=pid, command=command)

    def _explained(self, session: ClientSession, cache: ServedCache, key: Key) -> list[admin_pb2.ExplainedBlock]:
        """The block in each window group that has it. Raises :class:`UnknownCache`."""
        whose = self._access.may_everywhere(session, Right.ADMIN)
        groups = map(GroupId, range(len(cache.spec.groups)))
        found = ((group, self._engine.manager(cache.id).explain(group, key)) for group in groups)
        return [self._explained_block(cache, group, block, whose=whose) for group, block in found if block is not None]

    def _explained_block(
        self, cache: ServedCache, group: GroupId, block: BlockNow, *, whose: bool
    ) -> admin_pb2.ExplainedBlock:
        """``whose``: the caller may see the sessions that hold the block."""
        now = time.time_ns()
        return wire.same_fields(
            admin_pb2.ExplainedBlock,
            block,
            cache=cache.name,
            group=group,
            parent=block.parent or b"",
            copies=[
                wire.same_fields(
                    admin_pb2.ExplainedCopy, copy, tier=wire.TIER_TO_WIRE[copy.tier], state=_STATES[copy.phase]
                )
                for copy in block.copies
            ],
            leases=[
                _lease_info(cache, lease, self._sessions.get(lease.session) if whose else None, now)
                for lease in block.leases
            ],
        )


def _holding(peer: str, cache: ServedCache, group: GroupId, blocks: int, residency: Iterable[int]) -> admin_pb2.Holding:
    """``residency``: of the blocks that the group needs for a prefix of ``blocks`` blocks."""
    fastest = Counter(each & -each for each in residency)
    tiers = [
        admin_pb2.TierBlocks(tier=wire.TIER_TO_WIRE[tier], blocks=fastest[tier.bit])
        for tier in TIERS
        if fastest[tier.bit]
    ]
    return admin_pb2.Holding(peer=peer, cache=cache.name, group=group, blocks=blocks, tiers=tiers)


def _lease_info(cache: ServedCache, lease: SlotLease, holder: ClientSession | None, now: int) -> admin_pb2.LeaseInfo:
    """``holder``: None if the session is gone or the caller may not see it."""
    return wire.same_fields(
        admin_pb2.LeaseInfo,
        lease,
        lease_id=lease.id,
        cache=cache.name,
        tier=wire.TIER_TO_WIRE[lease.tier],
        age_ns=max(0, now - lease.granted_at),
        session_id=lease.session,
        pid=holder.peer.pid if holder else 0,
        uid=holder.peer.uid if holder else 0,
        command=holder.peer.command if holder else "",
    )


def _remote(tier: RemoteTier) -> admin_pb2.RemoteStats:
    operations = [
        wire.same_fields(admin_pb2.RemoteOperation, one, operation=name, bytes=one.nbytes)
        for name, one in tier.operations.items()
    ]
    return wire.same_fields(admin_pb2.RemoteStats, tier, problem=tier.problem or "", operations=operations)


def _watcher(session: ClientSession, lag: int) -> admin_pb2.WatcherStats:
    return wire.same_fields(admin_pb2.WatcherStats, session.peer, session_id=session.id, lag=lag)


def _group(cache: ServedCache, group: GroupId, counts: GroupCounts) -> admin_pb2.GroupStats:
    window_tokens = cache.spec.groups[group].window_tokens
    return wire.same_fields(admin_pb2.GroupStats, counts, group=group, window_tokens=window_tokens, **_by_tier(counts))


def _by_tier(counts: ManagerStats | GroupCounts) -> dict[str, Any]:
    """The fields of a cache's or a group's statistics that count by tier."""
    tiers = [_tier(tier, count) for tier, count in sorted(counts.tiers.items())]
    return {"tiers": tiers, **{f"hits_{tier}": counts.hits.get(tier, 0) for tier in TIERS}}


def _tier_bytes(account: Account, shown: Collection[str]) -> admin_pb2.TierBytes:
    """``shown``: the caches that the answer may name."""
    given = {name: nbytes for name, nbytes in account.given.items() if name in shown}
    return wire.same_fields(admin_pb2.TierBytes, account, tier=wire.TIER_TO_WIRE[account.tier], given=given)


def _tier(tier: Tier, count: TierCount) -> admin_pb2.TierStats:
    states = {state.name.lower(): slots for state, slots in count.states.items()}
    return wire.same_fields(admin_pb2.TierStats, count, tier=wire.TIER_TO_WIRE[tier], **states)


def _event_log(status: LogStatus) -> admin_pb2.EventLogStats:
    return wire.same_fields(
        admin_pb2.EventLogStats,
        status,
        bytes=status.used_bytes,
        oldest_id=status.oldest,
        newest_id=status.newest,
        lost_events=status.lost,
        failing=status.failing or "",
    )
