"""A cache's events as TensorRT-LLM's, pulled by call: what ``get_kv_cache_events`` is there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.errors import InvalidArgument, NotFound
from kvtier.kinds import is_number, quoted, require_kind
from kvtier.session import ANSWER_GRACE_S, Deadline, Link, Session, require_timeout
from kvtier.v1 import events_pb2

MAX_WAIT_S: Final = 3600.0


@dataclass(slots=True, frozen=True)
class Drained:
    """``events``: TensorRT-LLM's, in order, none where nothing happened.

    ``lost``: events that the daemon no longer held when they were asked for. The ``event_id`` have a hole there, after
    which whatever was known is removed and what is there is stored anew.
    """

    events: list[dict[str, Any]]
    lost: int


@dataclass(slots=True)
class _Place:
    """Where a cache's drain is. ``session``: the one that has it; in another it begins anew."""

    session: int = 0
    next_id: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Drains:
    """Of one client, by cache."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._places: dict[str, _Place] = {}

    async def drain(self, cache: str, wait_s: float, timeout_s: float) -> Drained:
        """See :meth:`kvtier.AsyncClient.drain_trtllm`."""
        require_kind("cache", cache, str, "text")
        if not is_number(wait_s, 0, MAX_WAIT_S):
            raise InvalidArgument("wait", quoted(wait_s), f"0 to {MAX_WAIT_S:g} seconds")
        require_timeout(timeout_s)
        place = self._places.setdefault(cache, _Place())
        async with place.turn:
            try:
                reply = await self._asked(cache, place, wait_s, timeout_s)
            except NotFound as error:
                if error.reason != "NO_DRAIN":
                    raise
                place.next_id = 0
                reply = await self._asked(cache, place, wait_s, timeout_s)
        return Drained(json.loads(reply.events), reply.lost)

    async def _asked(self, cache: str, place: _Place, wait_s: float, timeout_s: float) -> events_pb2.DrainResponse:
        async def attempt(link: Link, seconds: float) -> events_pb2.DrainResponse:
            if place.session != link.session:
                place.session, place.next_id = link.session, 0
            wait_ns = int(min(wait_s, seconds) * 1e9)
            request = events_pb2.DrainRequest(name=cache, next_event_id=place.next_id, timeout_ns=wait_ns)
            reply = await link.stubs.events.Drain(request, timeout=seconds + ANSWER_GRACE_S, metadata=link.metadata)
            place.next_id = reply.next_event_id
            return reply

        return await self._session.call(attempt, Deadline(wait_s + timeout_s))
