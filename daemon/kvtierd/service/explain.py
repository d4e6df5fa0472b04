"""``kvtier.v1.Admin.Explain``: what there is to say of one block, in pieces that hold nobody up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvtier.v1 import blocks_pb2, common_pb2, explain_pb2
from kvtierd.core.block import Phase
from kvtierd.core.explaining import BlockNow, CopyNow
from kvtierd.core.ids import KEY_BYTES, GroupId, Key
from kvtierd.core.tickets import LeaseRecord
from kvtierd.mover.engine import Engine
from kvtierd.mover.errors import UnknownCache
from kvtierd.rights import Right
from kvtierd.service import validate, wire
from kvtierd.service.access import Access, denied
from kvtierd.service.attach import DaemonIdentity
from kvtierd.service.calls import Verb
from kvtierd.service.catalog import Catalog
from kvtierd.service.entries import Cache
from kvtierd.service.errors import bad_argument, no_such_cache
from kvtierd.service.sessions import Session, SessionRegistry

SHORTEST_PREFIX: Final = 4
MOST_CANDIDATES: Final = 32
SCANNED_A_TURN: Final = 2_048
"""Keys that are compared with a prefix before others have their turn."""
PLACED_A_TURN: Final = 256
MOST_PLACING_TURNS: Final = 8_192
"""After so many the rest is done at once: a cache that changes faster than this keeps up would never be explained."""

_STATES: Final[Mapping[Phase, explain_pb2.CopyState.ValueType]] = {
    Phase.FILLING: explain_pb2.COPY_STATE_FILLING,
    Phase.READY: explain_pb2.COPY_STATE_READY,
    Phase.LEAVING: explain_pb2.COPY_STATE_LEAVING,
}


class ExplainService:
    """One verb of Admin."""

    def __init__(
        self, engine: Engine, catalog: Catalog, sessions: SessionRegistry, access: Access, identity: DaemonIdentity
    ) -> None:
        self._engine: Final = engine
        self._catalog: Final = catalog
        self._sessions: Final = sessions
        self._access: Final = access
        self._identity: Final = identity

    def verbs(self) -> Mapping[str, Verb]:
        return {"Explain": self.explain}

    async def explain(self, session: Session, request: explain_pb2.ExplainRequest) -> explain_pb2.ExplainResponse:
        prefix = bytes(request.key)
        if not SHORTEST_PREFIX <= len(prefix) <= KEY_BYTES:
            raise bad_argument("key", f"{len(prefix)} bytes", f"{SHORTEST_PREFIX} to {KEY_BYTES} bytes")
        await self._catalog.loaded()
        caches = self._wanted(session, request.cache)
        found = [Key(prefix)] if len(prefix) == KEY_BYTES else await self._keys_with(caches, prefix)
        blocks: list[explain_pb2.ExplainedBlock] = []
        if len(found) == 1:
            for cache in caches:
                with suppress(UnknownCache):  # removed meanwhile
                    blocks += await self._blocks(session, cache, found[0])
        return explain_pb2.ExplainResponse(
            key=found[0] if len(found) == 1 else b"",
            blocks=blocks,
            candidates=b"".join(found[:MOST_CANDIDATES]) if len(found) > 1 else b"",
            more_candidates=len(found) > MOST_CANDIDATES,
            as_of_event=blocks_pb2.Cursor(epoch=self._identity.epoch, id=self._engine.last_event),
            time_ns=time.time_ns(),
        )

    def _wanted(self, session: Session, name: str) -> Sequence[Cache]:
        """Raises PERMISSION_DENIED, NOT_FOUND for a cache asked for by name."""
        if not name:
            return [cache for cache in self._catalog if self._may_see(session, cache.name)]
        if not self._may_see(session, validate.cache_name(name, "cache")):
            raise denied(Right.READ, name, session.identity)
        cache = self._catalog.named(name)
        if cache is None and not self._catalog.exists(name):
            raise no_such_cache(name)
        return [] if cache is None else [cache]

    def _may_see(self, session: Session, cache: str) -> bool:
        return any(self._access.may(session, right, cache) for right in (Right.READ, Right.WATCH))

    async def _keys_with(self, caches: Sequence[Cache], prefix: bytes) -> list[Key]:
        """Different keys that begin like that, in order; no more than one beyond what is told."""
        found: set[Key] = set()
        for cache in caches:
            for group in range(len(cache.spec.groups)):
                page = 0
                with suppress(UnknownCache):
                    while len(found) <= MOST_CANDIDATES:
                        some, page = self._engine.keys_with(cache.id, GroupId(group), prefix, page, SCANNED_A_TURN)
                        found.update(some)
                        if not page:
                            break
                        await asyncio.sleep(0)
        return sorted(found)[: MOST_CANDIDATES + 1]

    async def _blocks(self, session: Session, cache: Cache, key: Key) -> list[explain_pb2.ExplainedBlock]:
        """Raises :class:`UnknownCache`."""
        blocks = []
        whose = self._access.may_everywhere(session, Right.ADMIN)
        for group in map(GroupId, range(len(cache.spec.groups))):
            for _ in range(MOST_PLACING_TURNS):
                if self._engine.prepare_to_explain(cache.id, group, PLACED_A_TURN):
                    break
                await asyncio.sleep(0)
            block = self._engine.explain(cache.id, group, key)
            if block is not None:
                blocks.append(self._block(cache, group, block, whose=whose))
                await asyncio.sleep(0)
        return blocks

    def _block(self, cache: Cache, group: GroupId, block: BlockNow, *, whose: bool) -> explain_pb2.ExplainedBlock:
        now = time.time_ns()
        return explain_pb2.ExplainedBlock(
            cache=cache.name,
            group=group,
            window_tokens=cache.spec.groups[group].window_tokens,
            parent=block.parent or b"",
            depth=block.depth,
            children=block.children,
            residency=block.residency,
            priority=block.priority,
            own_priority=block.own_priority,
            duration_ms=block.duration_ms,
            deadline_ns=block.deadline_ns,
            hot=block.hot,
            waiting=block.waiting,
            copies=map(_copy, block.copies),
            moves=[
                explain_pb2.ExplainedMove(
                    moved_from=wire.TIER_TO_WIRE[move.src],
                    moved_to=wire.TIER_TO_WIRE[move.dst],
                    cause=common_pb2.Cause.ValueType(move.cause),
                )
                for move in block.moves
            ],
            leases=[self._lease(lease, now, whose=whose) for lease in block.leases],
            as_of_event=self._engine.last_event,
        )

    def _lease(self, lease: LeaseRecord, now: int, *, whose: bool) -> explain_pb2.ExplainedLease:
        holder = self._sessions.get(lease.session) if whose else None
        return explain_pb2.ExplainedLease(
            lease_id=lease.id,
            tier=wire.TIER_TO_WIRE[lease.tier],
            age_ns=max(0, now - lease.granted_at),
            orphaned=lease.orphaned,
            session_id=lease.session,
            pid=holder.peer.pid if holder else 0,
            uid=holder.peer.uid if holder else 0,
            command=holder.peer.command if holder else "",
        )


def _copy(copy: CopyNow) -> explain_pb2.ExplainedCopy:
    message = explain_pb2.ExplainedCopy(
        tier=wire.TIER_TO_WIRE[copy.tier],
        slot=copy.slot,
        state=_STATES[copy.phase],
        leases=copy.leases,
        pins=copy.pins,
        readers=copy.readers,
        waiters=copy.waiters,
        threshold=copy.threshold,
        obstacles=map(explain_pb2.Obstacle.ValueType, copy.obstacles),
        free_slots=copy.free,
        unheld_slots=copy.unheld,
    )
    if copy.departure is not None:
        message.departure = explain_pb2.Departure.ValueType(copy.departure)
    if copy.standing is not None:
        message.ahead = copy.standing.before
        message.precision = explain_pb2.Precision.ValueType(copy.standing.precision)
    return message
