"""A window group of the world: its tiers, the mover under it, and the state that its events describe."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from kvtierd.core.ids import Key, SlotId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Move
from kvtierd.core.policy import GroupShape
from kvtierd.core.transfers import BlockResult, CommitItem, ListingRow
from tests.simulation.disk import Disk
from tests.simulation.forest import FIRST_TOKEN, Forest, label_of
from tests.simulation.memory import ROT, Memory
from tests.simulation.mirror import Mirror
from tests.simulation.mover import Mover
from tests.simulation.retention import Retentions
from tests.simulation.setup import GroupPlan
from tests.simulation.violation import Violation, require
from tests.slot_rows import SlotRef

EVERYTHING = 1 << 20


class Site:
    """The disk and the watcher's mirror outlive the daemon, and the memories may; everything else ends with it."""

    def __init__(self, plan: GroupPlan, forest: Forest) -> None:
        self.plan = plan
        self.group = plan.group
        self.mirror = Mirror(chained=plan.chained)
        self.disk = Disk(plan.disk, chained=plan.chained) if plan.disk else None
        self.retentions = Retentions()
        self.pins: Counter[tuple[Tier, Key]] = Counter()
        self.settled: set[Key] = set()
        """Blocks of the host that the remote store has."""
        self.written_down: set[Key] = set()
        """Blocks that background copies have taken to the lowest tier, since it was last cleared."""
        self._forest = forest

    def boot(self, memory: Mapping[Tier, int]) -> GroupShape:
        """Makes new memory tiers. ``memory``: slots by tier."""
        self.slots = dict(memory) | ({Tier.DISK: len(self.disk.slab)} if self.disk is not None else {})
        self.memories = {tier: Memory(f"group {self.group} {tier}", count) for tier, count in memory.items()}
        return self.adopt()

    def adopt(self) -> GroupShape:
        """Keeps the memory tiers for a new daemon."""
        self.mover = Mover(self.memories, self.disk)
        self.pins.clear()
        self.settled.clear()
        return self.plan.shape(self.slots)

    @property
    def roots(self) -> list[Key]:
        return [key for key, parent in self._forest.parent.items() if parent is None]

    @property
    def disk_works(self) -> bool:
        """Whether no disk slot is out of use, and no read can find a corrupt slot."""
        return self.disk is None or not (self.disk.bad or self.mover.deletions_failed or ROT in self.disk.slab)

    def submit(self, move: Move) -> None:
        if self.disk is not None and move.dst is Tier.DISK:
            require(self.disk.bad.isdisjoint(item.dst for item in move.items), "a bad disk slot is used again")
        if move.dst is not None:
            for item in move.items:
                self.retentions.verify_own(item.key, item.traits.priority)
        self.mover.submit(move)

    def note_uses(self, keys: Sequence[Key]) -> None:
        """Writes the daemon's notes of used disk blocks to the disk."""
        for key in keys:
            change = self.mirror.blocks.get(key)
            require(change is not None and bool(change.residency & Tier.DISK.bit), "a use of a block not on disk")
            if self.disk is not None:
                self.disk.touch(key)

    # -- expected answers --------------------------------------------------------------------------------------------

    def residency(self, key: Key) -> int:
        change = self.mirror.blocks.get(key)
        return change.residency if change is not None else 0

    def is_hollow(self, key: Key) -> bool:
        """Whether the block has lost its last copy, and its descendants have not gone yet."""
        return key in self.mirror.blocks and not self.mirror.blocks[key].residency

    def expected_commit(self, items: Sequence[CommitItem]) -> list[BlockResult]:
        stored = {key: change.parent for key, change in self.mirror.blocks.items()}
        expected = []
        for item in items:
            parent = None if self.plan.flat else item.parent
            if item.key in stored:
                same = stored[item.key] == parent
                expected.append(BlockResult.EXISTS if same else BlockResult.PARENT_CONFLICT)
            elif parent is not None and self.plan.chained and not self._is_parent(parent, stored):
                expected.append(BlockResult.PARENT_MISSING)
            else:
                expected.append(BlockResult.OK)
                stored[item.key] = parent
        return expected

    def _is_parent(self, key: Key, stored: Collection[Key]) -> bool:
        return key in stored and not self.is_hollow(key) and not self._is_partial(key)

    def _is_partial(self, key: Key) -> bool:
        label = self.mirror.label_of(key) if key in self.mirror.blocks else label_of(key)
        return label is not None and 0 < len(label.tokens) < len(FIRST_TOKEN) * self.plan.tokens_per_block

    def outgrown(self, item: CommitItem, earlier: Iterable[CommitItem]) -> list[Key]:
        """Returns partial siblings of a block that has just been stored. ``earlier``: blocks stored by the same
        call."""
        if not self.plan.chained or item.label is None or self._is_partial(item.key):
            return []
        beside = {key: change.parent for key, change in self.mirror.blocks.items()}
        beside |= {one.key: one.parent for one in earlier}
        return [key for key, parent in beside.items() if parent == item.parent and self._is_partial(key)]

    def surviving(self) -> set[Key]:
        """Returns the blocks that a restart must find on disk."""
        return {key for key, change in self.mirror.blocks.items() if self._survives(change)}

    def remembered(self, unsure: AbstractSet[SlotRef]) -> dict[Key, int]:
        """Returns the blocks that a restart must find in kept memory, with their memory tiers as a bit set: READY
        copies that are not known to be bad, of blocks whose needed ancestors are found, too. ``unsure``: slots that the
        daemon was changing when it died."""
        on_disk = self.surviving()
        there: dict[Key, int] = {}
        for key, change in self.mirror.blocks.items():
            tiers = [t for t in self.memories if change.residency & t.bit]
            refs = {tier: [SlotRef(self.group, tier, at) for at in self.memories[tier].slots_of(key)] for tier in tiers}
            there[key] = sum(tier.bit for tier in tiers if refs[tier] and unsure.isdisjoint(refs[tier]))
        needed = {key: self._forest.chain(key) if self.plan.chained else [key] for key in there}
        whole = {key for key, keys in needed.items() if all(there.get(one) or one in on_disk for one in keys)}
        return {key: tiers for key, tiers in there.items() if tiers and key in whole}

    def _survives(self, change: ListingRow) -> bool:
        """Returns whether a block is READY on disk, and neither it nor a needed ancestor is in a bad slot."""
        if not change.residency & Tier.DISK.bit or self.disk is None:
            return False
        needed = self._forest.chain(change.key) if self.plan.chained else [change.key]
        return all(self.disk.records[key].slot not in self.disk.bad for key in needed)

    # -- promises, checked after every step --------------------------------------------------------------------------

    def verify(self, core: BlockManager, now: int, *, lossy: bool) -> None:
        """Checks all promises. ``lossy``: copies may have been lost in this step."""
        rows = core.listing(self.group, 0, EVERYTHING).rows
        require(core.behind or all(row.residency for row in rows), "a block that is nowhere stays")
        self._verify_mirror(rows, behind=core.behind)
        self._verify_bytes(core, rows)
        self._verify_pins(rows, now, lossy=lossy)
        for memory in self.memories.values():
            memory.verify()

    def _verify_mirror(self, rows: Sequence[ListingRow], *, behind: bool) -> None:
        """Checks that the events agree with the core's listing, and that an effective priority is the highest of the
        subtree, unless the core still has priorities to pass on."""
        require(len(rows) == len(self.mirror.blocks), "the events tell of more or fewer blocks than there are")
        effective: dict[Key, int] = {}
        for row in reversed(rows):
            told = self.mirror.blocks.get(row.key)
            said = told is not None and (told.parent, told.residency, told.priority)
            if said != (row.parent, row.residency, row.priority):
                raise Violation(f"the events say {told}, the core {row}")
            require(row.label == self.mirror.label_of(row.key), "a block is listed under another's label")
            if not behind:
                self.retentions.verify(row.key, row.priority, effective.get(row.key, 0))
            if row.parent is not None and self.plan.chained:
                require(row.parent in self.mirror.blocks, "a block is listed without its parent")
                effective[row.parent] = max(row.priority, effective.get(row.parent, 0))

    def _verify_pins(self, rows: Sequence[ListingRow], now: int, *, lossy: bool) -> None:
        """Checks that a pinned copy stays until its tier or its bytes are lost, and that the listing shows the pin."""
        for (tier, key), count in list(self.pins.items()):
            there = bool(self.residency(key) & tier.bit)
            if count and not there and lossy:
                del self.pins[tier, key]
            else:
                require(not count or there, f"a block pinned in {tier} has left it")
        for row in rows:
            pinned = sum(tier.bit for tier in self.slots if self.pins[tier, row.key])
            if row.pinned != pinned:
                raise Violation(f"pinned in {pinned}, listed as pinned in {row.pinned}")
        self.retentions.held((key for (_, key), count in self.pins.items() if count), now)

    def _verify_bytes(self, core: BlockManager, rows: Sequence[ListingRow]) -> None:
        """Checks that each slot that the core names for a block holds its bytes."""
        keys = [row.key for row in rows]
        for row, location in zip(rows, core.locate(self.group, keys), strict=True):
            require(location.residency == row.residency, "the core locates a block elsewhere than it lists it")
            for tier in self.slots:
                slot = location.slots[tier]
                if (slot is not None) != bool(row.residency & tier.bit):
                    raise Violation(f"a block's {tier} slot is not told")
                if slot is not None and tier is Tier.DISK:
                    self._verify_record(row, slot)
                elif slot is not None:
                    memory = self.memories[tier]
                    if memory.contents[slot] != row.key:
                        raise Violation(f"{tier} slot {slot} is READY and holds other bytes")
                    if not memory.ready(slot):
                        raise Violation(f"{tier} slot {slot} is READY and its generation odd")

    def _verify_record(self, row: ListingRow, slot: SlotId) -> None:
        assert self.disk is not None
        if self.disk.slab[slot] not in (row.key, ROT):
            raise Violation(f"disk slot {slot} is READY and holds other bytes")
        record = self.disk.records.get(row.key)
        if record is None or record.slot != slot:
            raise Violation(f"disk slot {slot} is READY and not committed")
        if record.parent != row.parent:
            raise Violation(f"disk slot {slot} is committed under another parent")
