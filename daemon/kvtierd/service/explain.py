"""``kvtier.v1.Admin.Explain``: where a block is, and what holds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvtier.v1 import admin_pb2, blocks_pb2
from kvtierd.core.block import Phase
from kvtierd.core.explain import BlockNow
from kvtierd.core.ids import KEY_BYTES, GroupId, Key
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import UnknownCache
from kvtierd.rights import Right
from kvtierd.service import validation, wire
from kvtierd.service.attach import DaemonIdentity
from kvtierd.service.cache import Cache
from kvtierd.service.calls import Access, Verb, denied
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import bad_argument, no_such_cache
from kvtierd.service.servicers.admin import lease_info
from kvtierd.service.sessions import Session, SessionRegistry

SHORTEST_PREFIX: Final = 4
MOST_KEYS: Final = 32
SCANNED_A_TURN: Final = 2_048
"""Keys that are compared with a prefix in one turn of the loop."""

_STATES: Final[Mapping[Phase, admin_pb2.CopyState.ValueType]] = {
    Phase.FILLING: admin_pb2.COPY_STATE_FILLING,
    Phase.READY: admin_pb2.COPY_STATE_READY,
    Phase.LEAVING: admin_pb2.COPY_STATE_LEAVING,
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

    async def explain(self, session: Session, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
        prefix = bytes(request.key)
        if not SHORTEST_PREFIX <= len(prefix) <= KEY_BYTES:
            raise bad_argument("key", f"{len(prefix)} bytes", f"{SHORTEST_PREFIX} to {KEY_BYTES} bytes")
        await self._catalog.loaded()
        caches = self._wanted(session, request.cache)
        keys = [Key(prefix)] if len(prefix) == KEY_BYTES else await self._keys_with(caches, prefix)
        blocks: list[admin_pb2.ExplainedBlock] = []
        for cache in caches if len(keys) == 1 else ():
            with suppress(UnknownCache):  # removed meanwhile
                blocks += self._blocks(session, cache, keys[0])
        return admin_pb2.ExplainResponse(
            keys=b"".join(keys),
            blocks=blocks,
            as_of_event=blocks_pb2.Cursor(epoch=self._identity.epoch, id=self._engine.last_event),
            time_ns=time.time_ns(),
        )

    def _wanted(self, session: Session, name: str) -> Sequence[Cache]:
        """Raises PERMISSION_DENIED, NOT_FOUND for a cache asked for by name."""
        if not name:
            return [cache for cache in self._catalog if self._may_see(session, cache.name)]
        if not self._may_see(session, validation.cache_name(name, "cache")):
            raise denied(Right.READ, name, session.peer.identity)
        cache = self._catalog.named(name)
        if cache is None:
            raise no_such_cache(name)
        return [cache]

    def _may_see(self, session: Session, cache: str) -> bool:
        return any(self._access.may(session, right, cache) for right in (Right.READ, Right.WATCH))

    async def _keys_with(self, caches: Sequence[Cache], prefix: bytes) -> list[Key]:
        """Different keys that begin so, in order."""
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

    def _blocks(self, session: Session, cache: Cache, key: Key) -> list[admin_pb2.ExplainedBlock]:
        """One for each window group that has it. Raises :class:`UnknownCache`."""
        whose = self._access.may_everywhere(session, Right.ADMIN)
        groups = map(GroupId, range(len(cache.spec.groups)))
        found = ((group, self._engine.manager(cache.id).explain(group, key)) for group in groups)
        return [self._block(cache, group, block, whose=whose) for group, block in found if block is not None]

    def _block(self, cache: Cache, group: GroupId, block: BlockNow, *, whose: bool) -> admin_pb2.ExplainedBlock:
        """``whose``: the caller may know whose leases hold it."""
        now = time.time_ns()
        return admin_pb2.ExplainedBlock(
            cache=cache.name,
            group=group,
            parent=block.parent or b"",
            depth=block.depth,
            children=block.children,
            priority=block.priority,
            own_priority=block.own_priority,
            duration_ms=block.duration_ms,
            deadline_ns=block.deadline_ns,
            copies=[
                admin_pb2.ExplainedCopy(
                    tier=wire.TIER_TO_WIRE[copy.tier],
                    slot=copy.slot,
                    state=_STATES[copy.phase],
                    pins=copy.pins,
                    readers=copy.readers,
                )
                for copy in block.copies
            ],
            leases=[
                lease_info(cache, lease, self._sessions.get(lease.session) if whose else None, now)
                for lease in block.leases
            ],
        )
