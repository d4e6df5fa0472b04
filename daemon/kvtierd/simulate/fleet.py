"""A fleet of hosts behind a router: blocks that requests find on their host, on another host, in a remote store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtierd.core.ids import Key, Tier
from kvtierd.core.policy import RemotePolicy
from kvtierd.simulate.host import Host, Served

_RECENT: Final = 16
"""A request counts as load of its host until this many later requests per host have come."""
_SLACK: Final = 8
"""Most recent requests above the least loaded host's with which a host is chosen for its prefix."""

Choose = Callable[[int, Sequence[int], Sequence[int]], int]
"""Returns the host of the n-th request, from each host's known prefix and recent requests."""


def _longest_prefix(turn: int, prefixes: Sequence[int], loads: Sequence[int]) -> int:
    """The host with the longest prefix, among hosts that are not much busier than the least loaded host."""
    bound = min(loads) + _SLACK
    fit = (host for host, load in enumerate(loads) if load <= bound)
    return max(fit, key=lambda host: (prefixes[host], -loads[host]))


ROUTERS: Final[Mapping[str, Choose]] = {
    "prefix": _longest_prefix,
    "round-robin": lambda turn, prefixes, loads: turn % len(loads),
}


@dataclass(slots=True, frozen=True)
class FleetShape:
    """``slots``: of each host, by tier. ``longest``: blocks to which a longer prompt is cut; 0 = the slots of the
    fastest tier. ``remote``: when a block goes to the store, which keeps every block; None = no store. ``peers``: hosts
    fetch blocks from other hosts."""

    hosts: int
    slots: Mapping[Tier, int]
    router: str = "prefix"
    remote: RemotePolicy | None = None
    peers: bool = False
    longest: int = 0

    def pooled(self) -> FleetShape:
        """A single host with the slots of all hosts, without a store or peers."""
        slots = {tier: count * self.hosts for tier, count in self.slots.items()}
        return replace(self, hosts=1, slots=slots, remote=None, peers=False, longest=self.cut)

    @property
    def cut(self) -> int:
        return self.longest or self.slots[min(self.slots)]


@dataclass(slots=True)
class FleetReport:
    """Counts of blocks, except ``requests``, by host. Blocks are found ``local``, at ``peers`` or ``remote``; the last
    two are fetched. ``put``: written to the remote store. ``evicted``: left a host."""

    requests: list[int]
    asked: int = 0
    local: int = 0
    peers: int = 0
    remote: int = 0
    put: int = 0
    evicted: int = 0

    @property
    def busiest(self) -> float:
        """The requests of the busiest host, as a multiple of the mean."""
        return max(self.requests) * len(self.requests) / (sum(self.requests) or 1)


class SimulatedFleet:
    """Requests come one after another; moves, fetches and events are done at once."""

    def __init__(self, shape: FleetShape) -> None:
        self.hosts = [Host(shape.slots) for _ in range(shape.hosts)]
        self.report = FleetReport([0] * shape.hosts)
        self._shape = shape
        self._choose = ROUTERS[shape.router]
        self._store: set[Key] = set()
        self._parents: dict[Key, Key] = {}
        self._recent: deque[int] = deque()
        self._loads = [0] * shape.hosts

    def request(self, chain: Sequence[Key]) -> None:
        chain = chain[: self._shape.cut]
        prefixes = [host.prefix(chain) for host in self.hosts]  # a router knows them from events
        host = self._choose(sum(self.report.requests), prefixes, self._loads)
        self._load(host)
        near = max(prefixes) if self._shape.peers else prefixes[host]
        far = next((place for place in range(near, len(chain)) if chain[place] not in self._store), len(chain))
        self._parents.update(zip(chain[1:], chain, strict=False))
        served = self.hosts[host].request(chain)
        report = self.report
        report.requests[host] += 1
        report.asked += len(chain)
        report.local += served.found
        report.peers += near - served.found
        report.remote += far - near
        report.evicted += len(served.removed)
        report.put += self._put(chain[: served.found], served)

    def _load(self, host: int) -> None:
        self._loads[host] += 1
        self._recent.append(host)
        if len(self._recent) > _RECENT * len(self._loads):
            self._loads[self._recent.popleft()] -= 1

    def _put(self, used: Sequence[Key], served: Served) -> int:
        """Returns how many blocks are new in the store."""
        before = len(self._store)
        match self._shape.remote:
            case RemotePolicy.EVICT:
                for block in served.removed:
                    self._put_with_ancestors(block)
            case RemotePolicy.SECOND_USE:
                self._store.update(used)
            case RemotePolicy.THROUGH:
                self._store.update(served.stored)
        return len(self._store) - before

    def _put_with_ancestors(self, block: Key | None) -> None:
        while block is not None and block not in self._store:
            self._store.add(block)
            block = self._parents.get(block)


def policy_of(name: str) -> RemotePolicy | None:
    """The policy with a name in the configuration; None for ``none``, which means no store."""
    return None if name == "none" else RemotePolicy(name)


def simulate(shape: FleetShape, chains: Iterable[Sequence[bytes]]) -> FleetReport:
    """Sends every request, a chain of keys, to the fleet, in order."""
    fleet = SimulatedFleet(shape)
    for chain in chains:
        fleet.request([Key(key) for key in chain])
    return fleet.report
