"""A host without bytes: a real block manager whose moves complete at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtierd.core.errors import BadArgument
from kvtierd.core.events import REMOVED, STORED, BlockEvent, EventSequencer, EventType
from kvtierd.core.ids import CacheId, GroupId, Key, SessionId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Grant, Move, MoveResult, Outcome
from kvtierd.core.policy import DEFAULT_PRIORITY, GroupShape, Policy
from kvtierd.core.transfers import ChainRequest, CommitItem

GROUP: Final = GroupId(0)
_CLIENT: Final = SessionId(1)


@dataclass(slots=True, frozen=True)
class Served:
    """The effect of a request on a host. ``found``: blocks of its prefix that the host had. ``removed``: blocks that
    left the host."""

    found: int
    stored: list[Key]
    removed: list[Key]


class Host:
    """A cache with one client that sends requests one after another, like ``kvtier replay``."""

    def __init__(self, slots: Mapping[Tier, int], policy: Policy | None = None) -> None:
        """
        Args:
            slots: by tier. The fastest of these tiers serves the requests.
        """
        shape = GroupShape(GROUP, slots, dict.fromkeys(slots, 1))
        self.core = BlockManager(CacheId(1), [shape], EventSequencer(), policy)
        self._tier = min(slots)
        self._longest = slots[self._tier]
        self._moves: list[Move] = []
        self._grants: list[Grant] = []
        self._events: list[BlockEvent] = []
        self.core.fill({}, {}, unclean=False, restarted=False)
        self._take(self.core.announce(0))

    def prefix(self, chain: Sequence[Key]) -> int:
        """The number of leading blocks of the chain that the host has."""
        return self.core.match([GROUP], chain).blocks

    def request(self, chain: Sequence[Key]) -> Served:
        """Acquires the stored prefix of a chain, stores the rest, and releases both. Raises BadArgument if the chain is
        longer than the fastest tier."""
        if len(chain) > self._longest:
            raise BadArgument("chain", len(chain), f"at most {self._longest} blocks, which the {self._tier} tier has")
        self._events.clear()
        _, outcome = self.core.acquire(_CLIENT, [GROUP], self._tier, [ChainRequest(chain)], 0)
        prefix = self._granted(outcome)
        found = prefix.blocks
        leases = list(prefix.leases)
        if found < len(chain):
            _, outcome = self.core.reserve(_CLIENT, GROUP, self._tier, len(chain) - found, 0)
            blank = self._granted(outcome)
            parents = [None, *chain[:-1]]
            rows = zip(blank.only.slots, chain[found:], parents[found:], strict=True)
            items = [CommitItem(slot, key, parent, DEFAULT_PRIORITY) for slot, key, parent in rows]
            (lease,) = blank.leases
            self._take(self.core.commit(_CLIENT, lease, items, 0)[1])
            leases.append(lease)
        self._take(self.core.release(_CLIENT, leases, 0))
        return Served(found, self._keys(STORED), self._keys(REMOVED))

    def _granted(self, outcome: Outcome) -> Grant:
        """Completes moves until the call is answered."""
        self._take(outcome)
        while not self._grants:
            results = [MoveResult(move.id) for move in self._moves]
            self._moves.clear()
            self._take(self.core.completed(results, 0))
        return self._grants.pop()

    def _take(self, outcome: Outcome) -> None:
        assert not outcome.refusals, "nobody else holds a slot"
        self._moves += outcome.moves
        self._grants += outcome.grants
        self._events += outcome.events
        if self.core.behind:
            self._take(self.core.go_on(0))

    def _keys(self, kind: EventType) -> list[Key]:
        return [key for event in self._events if event.type is kind for key in event.blocks.keys]
