"""A cache of several window groups on the bench: the same chains in each, one letter a block."""

from collections.abc import Sequence

from kvtier.abi.words import TIERS
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, GroupId, LeaseId, SessionId, TicketId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import GroupGrant
from kvtierd.core.policy import GroupShape, Policy
from kvtierd.core.transfers import BlockResult, ChainRequest, CommitItem
from tests.unit.core.bench import ALICE, DEVICE, HOST, Bench, key, keys, name_of

FULL, SLIDING = GroupId(0), GroupId(1)


class GroupsBench(Bench):
    """``device``, ``host`` and ``disk``: slots, one a group. ``windows``: in tokens, 0 = full attention. ``sinks``: of
    the windows; ``flat``: of the others."""

    def __init__(
        self,
        windows: Sequence[int] = (0, 3),
        *,
        device: Sequence[int] = (),
        host: Sequence[int] = (),
        disk: Sequence[int] = (),
        tokens_per_block: int = 1,
        sinks: int = 0,
        flat: bool = False,
        policy: Policy | None = None,
    ) -> None:
        super().__init__(host=1)
        shapes = []
        for group, window in enumerate(windows):
            slots = {tier: counts[group] for tier, counts in zip(TIERS, (device, host, disk), strict=True) if counts}
            kept, alone = (sinks if window else 0), flat and not window
            sizes = dict.fromkeys(slots, 4096)
            shapes.append(GroupShape(GroupId(group), slots, sizes, window, tokens_per_block, kept, flat=alone))
        self.core = BlockManager(CacheId(1), shapes, EventSequencer(), policy)
        self.events.clear()
        self.core.fill({}, {}, unclean=False, restarted=False)
        self.apply(self.core.announce(self.now))

    def write(self, group: GroupId, names: str, chain: str, tier: Tier = HOST) -> LeaseId:
        """Commits these blocks of a chain, in this order, and keeps the lease."""
        ticket, outcome = self.core.reserve(ALICE, group, tier, len(names), self.now)
        self.apply(outcome)
        grant = self.grants[ticket].only
        assert grant.lease is not None
        above = dict(zip(chain[1:], chain, strict=False))
        items = [
            CommitItem(slot, key(name), key(above[name]) if name in above else None, 35)
            for slot, name in zip(grant.slots, names, strict=True)
        ]
        results, outcome = self.core.commit(ALICE, grant.lease, items, self.now)
        assert set(results) <= {BlockResult.OK, BlockResult.EXISTS}
        self.apply(outcome)
        return grant.lease

    def fill(self, group: GroupId, names: str, chain: str, tier: Tier = HOST) -> None:
        """Stores these blocks of a chain and lets go of them."""
        self.release(self.write(group, names, chain, tier))

    def across(
        self, *chains: str, tier: Tier = DEVICE, min_blocks: int = 0, session: SessionId = ALICE
    ) -> tuple[TicketId, ...]:
        requests = [ChainRequest(keys(chain), min_blocks) for chain in chains]
        tickets, outcome = self.core.acquire(session, [], tier, requests, self.now)
        self.apply(outcome)
        return tickets

    def alone(self, group: GroupId, *chains: str, tier: Tier = DEVICE, min_blocks: int = 0) -> tuple[TicketId, ...]:
        requests = [ChainRequest(keys(chain), min_blocks) for chain in chains]
        tickets, outcome = self.core.acquire(ALICE, [group], tier, requests, self.now)
        self.apply(outcome)
        return tickets

    def granted_alone(self, ticket: TicketId, group: GroupId, chain: str) -> str:
        """What is held of the chain, after its slots have been looked at."""
        assert self.grants[ticket].only.group == group
        return self._held(self.grants[ticket].only, chain)

    def granted(self, ticket: TicketId, chain: str) -> list[str]:
        """What each group holds of the chain, after its slots have been looked at."""
        return [self._held(part, chain) for part in self.grants[ticket].groups]

    def _held(self, part: GroupGrant, chain: str) -> str:
        names = "".join(part.needed.pick(chain))
        assert (part.lease is None) == (names == "")
        if part.lease is not None:
            lease = self.core.leases[part.lease]
            assert [(name_of(b.key), c.slot) for b, c in lease.held.items()] == list(
                zip(names, part.slots, strict=True)
            )
        return names

    def has(self, group: GroupId) -> str:
        """Names of the group's blocks, sorted."""
        return "".join(sorted(name_of(row.key) for row in self.core.listing(group, 0, 1000).rows))

    def at(self, group: GroupId, tier: Tier) -> str:
        """Names of those READY in a tier, sorted."""
        rows = self.core.listing(group, 0, 1000).rows
        return "".join(sorted(name_of(row.key) for row in rows if row.residency & tier.bit))
