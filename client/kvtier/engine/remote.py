"""Fetches prefixes from a remote store, while their requests wait for a limited time.

All methods run on the scheduler's thread, which polls and never blocks.
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
"""Fetches at a time. A further request waits for its turn, within its own time limit."""


@dataclass(slots=True, eq=False)
class Fetch:
    """The only fetch of a request. ``found``: blocks that the host had before.

    ``until``: monotonic time at which the request goes on without the fetch. ``lease``: holds the old and the fetched
    blocks.
    """

    keys: bytes
    found: int
    until: float
    asked: Future[AcrossLease] | None = None
    over: bool = False
    lease: AcrossLease | None = None


class Fetches:
    """The fetches of one planner. No method waits or raises."""

    def __init__(self, leader: Leader) -> None:
        self._leader: Final = leader
        self._wait_s: Final = leader.options.remote_wait
        self._note: Final = leader.complaints.note
        self._free: Final = threading.Semaphore(MOST)

    def begin(self, keys: bytes, found: int) -> Fetch | None:
        """Begins to fetch the missing blocks of a chain. Returns None if no store can be asked."""
        if not self._wait_s or not self._leader.has_store or not self._leader.answers:
            return None
        fetch = Fetch(keys[: MAX_KEYS * KEY_BYTES], found, time.monotonic() + self._wait_s)
        self._ask(fetch)
        return fetch

    def is_pending(self, fetch: Fetch) -> bool:
        """Returns whether more blocks of the prefix may come in time."""
        if fetch.asked is None:
            self._ask(fetch)
        if fetch.asked is not None and fetch.asked.done():
            self._take(fetch, fetch.asked)
        elif time.monotonic() >= fetch.until:
            self._note("not fetched in time")
            self.leave(fetch)
        return not fetch.over

    def leave(self, fetch: Fetch) -> None:
        """Ends the wait for a fetch. Blocks that come later serve the next request."""
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
