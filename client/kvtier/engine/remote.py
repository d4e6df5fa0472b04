"""Prefixes that come from a store beyond the host, for which a request waits a little while.

All runs on the scheduler's thread, which looks and never waits.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Final

from kvtier.abi.keys import KEY_BYTES
from kvtier.engine.leader import Leader
from kvtier.errors import KvtierError
from kvtier.groups import AcrossLease
from kvtier.wire import MAX_KEYS

MOST: Final = 32
"""Calls at a time. Another request waits for its turn, within its own time."""


@dataclass(slots=True, eq=False)
class Fetch:
    """The one attempt of a request. ``found``: blocks that the host has. ``until``: then the request goes on without.

    ``lease``: holds what came, with what was here before.
    """

    keys: bytes
    found: int
    until: float
    asked: Future[AcrossLease] | None = None
    over: bool = False
    lease: AcrossLease | None = None


class Fetches:
    """Of one planner. No method waits or raises."""

    def __init__(self, leader: Leader) -> None:
        self._leader: Final = leader
        self._wait_s: Final = leader.options.remote_wait
        self._note: Final = leader.complaints.note
        self._free: Final = threading.Semaphore(MOST)

    def begin(self, keys: bytes, found: int) -> Fetch | None:
        """Has what is missing of a chain fetched. None: there is no store that could be asked."""
        if not self._wait_s or not self._leader.has_store or not self._leader.answers:
            return None
        fetch = Fetch(keys[: MAX_KEYS * KEY_BYTES], found, time.monotonic() + self._wait_s)
        self._ask(fetch)
        return fetch

    def is_pending(self, fetch: Fetch) -> bool:
        """Whether more of the prefix may come in time."""
        if fetch.asked is None:
            self._ask(fetch)
        if fetch.asked is not None and fetch.asked.done():
            self._take(fetch, fetch.asked)
        elif time.monotonic() >= fetch.until:
            self._note("not fetched in time")
            self.leave(fetch)
        return not fetch.over

    def leave(self, fetch: Fetch) -> None:
        """Nobody waits for it any more: what comes is there for the next request."""
        if not fetch.over and fetch.asked is not None:
            self._leader.unpin_later(fetch.asked)
        fetch.over = True

    def _ask(self, fetch: Fetch) -> None:
        left = fetch.until - time.monotonic()
        if left <= 0 or not self._free.acquire(blocking=False):
            return
        fetch.asked = self._leader.fetch(fetch.keys, left)
        if fetch.asked is None:
            self._free.release()
        else:
            fetch.asked.add_done_callback(lambda _: self._free.release())

    def _take(self, fetch: Fetch, asked: Future[AcrossLease]) -> None:
        fetch.over = True
        try:
            lease = fetch.lease = asked.result()
        except (KvtierError, CancelledError) as error:
            self._leader.complaints.add("a prefix could not be fetched", error)
            return
        if lease.blocks > fetch.found:
            self._note("blocks fetched from the store", lease.blocks - fetch.found)
        else:
            self._leader.note_why_not_fetched(fetch.keys, lease.blocks)
