"""The page of the metrics port: ``/`` is ``page.html``, which reads ``/status.json`` once a second.

The port is readable without rights, so the page has no key, token or command. Beside the metrics it has the words of
the problems, how long each cache is idle, the sessions with the age of their oldest lease, and the latest events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from kvtierd.core.events import BlockEvent
from kvtierd.core.ids import SessionId
from kvtierd.mover.engine import Engine
from kvtierd.service.catalog import Catalog
from kvtierd.service.sessions import SessionRegistry

HTML: Final = Path(__file__).with_name("page.html")
KINDS: Final = {"/": "text/html; charset=utf-8", "/status.json": "application/json"}
"""Content types by path."""
_SOURCES: Final = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
HEADERS: Final = [
    ("Content-Security-Policy", _SOURCES),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Cache-Control", "no-store"),
]
"""Headers: the page loads nothing from elsewhere."""


def status(
    samples: Iterable[tuple[str, tuple[str, ...], float]],
    problems: Collection[str],
    engine: Engine,
    catalog: Catalog,
    sessions: SessionRegistry,
    events: Iterable[tuple[BlockEvent, str]],
) -> bytes:
    """Returns the content of ``/status.json``. ``samples``: of the metrics. ``events``: the latest, oldest first, with
    the names of their caches."""
    metrics: dict[str, list[list[Any]]] = {}
    for name, labels, value in samples:
        metrics.setdefault(name.removeprefix("kvtier_"), []).append([*labels, value])
    now = time.time_ns()
    found = {
        "time_s": time.monotonic(),
        "problems": list(problems),
        "metrics": metrics,
        "idle_s": {cache.name: sessions.idle_s(cache.id) for cache in catalog},
        "sessions": list(_sessions(engine, catalog, sessions, now)),
        "events": [_event(event, cache, now) for event, cache in events],
    }
    return json.dumps(found, separators=(",", ":")).encode()


def _sessions(engine: Engine, catalog: Catalog, sessions: SessionRegistry, now: int) -> Iterator[dict[str, Any]]:
    """The sessions, the oldest lease first."""
    leases: dict[SessionId, list[int]] = {}
    for cache in catalog:
        for lease in engine.manager(cache.id).leases.values():
            leases.setdefault(lease.session, []).append(lease.granted_at)
    for session in sorted(sessions, key=lambda each: min(leases.get(each.id, [now]))):
        held = leases.get(session.id, [])
        yield {
            "id": session.id,
            "pid": session.peer.pid,
            "attached": session.attached,
            "leases": len(held),
            "slots": engine.held_by(session.id),
            "oldest_s": max(0, now - min(held)) / 1e9 if held else None,
        }


def _event(event: BlockEvent, cache: str, now: int) -> dict[str, Any]:
    return {
        "id": event.id,
        "age_s": max(0, now - event.time_ns) / 1e9,
        "type": event.type.name.lower(),
        "cause": event.cause.name.lower(),
        "cache": cache,
        "blocks": len(event.blocks),
        "from": None if event.moved_from is None else str(event.moved_from),
        "to": None if event.moved_to is None else str(event.moved_to),
    }
