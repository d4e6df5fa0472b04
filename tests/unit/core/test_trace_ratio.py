"""The core on real traffic: three tiers hit more than one prefix-LRU of the disk's size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.replay.trace import key_of, read
from kvtierd.core.check import check
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, Key, Tier
from kvtierd.core.manager import BlockManager, ChainRequest, CommitItem
from kvtierd.core.outcome import Grant, Move, MoveResult, Outcome
from kvtierd.core.policy import GroupShape
from tests.unit.client.test_oracle import EXTRACT, prefix_lru_hits
from tests.unit.core.bench import ALICE, DEVICE, DISK, GROUP, HOST

SLOTS = {DEVICE: 200, HOST: 800, DISK: 5_000}


class Replay:
    """One client, and a mover for which everything goes well: requests one after the other, as ``kvtier replay`` sends
    them."""

    def __init__(self, slots: dict[Tier, int]) -> None:
        self.core = BlockManager(CacheId(1), [GroupShape(GROUP, slots, dict.fromkeys(slots, 65536))], EventSequencer())
        self.hits = 0
        self._moves: list[Move] = []
        self._grants: list[Grant] = []
        self._take(self.core.open({}, {}, unclean=False, restarted=False, now=0))

    def request(self, blocks: Sequence[int]) -> None:
        chain = [Key(key_of(block)) for block in blocks]
        self.hits += self.core.match(GROUP, chain).blocks
        _, outcome = self.core.acquire(ALICE, GROUP, DEVICE, [ChainRequest(chain)], 0)
        leases = list(self._answered(outcome))
        found = len(leases[0].slots) if leases else 0
        if found < len(chain):
            _, outcome = self.core.reserve(ALICE, GROUP, DEVICE, len(chain) - found, 0)
            leases += self._answered(outcome)
            parents = [None, *chain]
            items = [
                CommitItem(slot, chain[place], parents[place], 35)
                for place, slot in enumerate(leases[-1].slots, start=found)
            ]
            assert leases[-1].lease is not None
            self._take(self.core.commit(ALICE, leases[-1].lease, items, 0)[1])
        self._take(self.core.release(ALICE, [grant.lease for grant in leases if grant.lease is not None], 0))

    def _answered(self, outcome: Outcome) -> Iterator[Grant]:
        """Lets moves end until the call is answered."""
        self._take(outcome)
        while not self._grants:
            self._land()
        grants, self._grants = self._grants, []
        return iter(grants)

    def _land(self) -> None:
        results = [MoveResult(move.id) for move in self._moves]
        self._moves.clear()
        self._take(self.core.completed(results, 0))

    def _take(self, outcome: Outcome) -> None:
        assert not outcome.refusals
        self._moves += outcome.moves
        self._grants += outcome.grants


async def test_three_tiers_hit_more_than_an_lru_of_the_disks_size() -> None:
    """And nearly as much as one of all three together, though blocks stand in two tiers at once."""
    requests = [request for request in await read(EXTRACT) if len(request.ids) <= SLOTS[DEVICE]]
    replay = Replay(SLOTS)
    for request in requests:
        replay.request(request.ids)
    check(replay.core)
    assert replay.hits > prefix_lru_hits(requests, SLOTS[DISK])
    assert replay.hits > 0.95 * prefix_lru_hits(requests, sum(SLOTS.values()))
    assert all(hits > 0 for hits in replay.core.stats().hits.values())
