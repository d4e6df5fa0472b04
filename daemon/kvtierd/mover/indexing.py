"""Keeps the key index in step with the core: what an outcome's events say, with the slots that it fills."""

from __future__ import annotations

from collections import defaultdict

from kvtier.abi.key_index import Entry
from kvtierd.core.block import Block, Copy
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import RECOVERED, REMOVED, STORED
from kvtierd.core.ids import DEVICE, HOST, GroupId, Key, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Outcome
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.index_columns import Slots
from kvtierd.tiers.key_index import MANY, Arrived, KeyIndex


def follow(arena: Arena, outcome: Outcome) -> None:
    """After the outcome's last generation has changed and before anybody is answered: who is told that a block is there
    finds it.

    A block that has got into a memory tier has its slot among those filled; that it has left one, or is only on disk,
    takes none. What was recovered is in the index already: :meth:`Arena.rebuild_index`.
    """
    index = arena.index
    if index is None or not outcome.events:
        return
    if len(outcome.events) > 1 or not _follow_alike(arena, index, outcome):
        _follow_each(arena, index, outcome)
    index.show(outcome.events[-1].id)


def _follow_alike(arena: Arena, index: KeyIndex, outcome: Outcome) -> bool:
    """Where one event says the same of many blocks, and slots are filled with all of these in its order, if any are:
    by column. False: it is not so, and nothing has been done."""
    event = outcome.events[0]
    group, keys, residencies = event.group, event.blocks.keys, event.blocks.residencies
    if len(keys) < MANY or event.type is REMOVED or event.cause is RECOVERED or index.unindexed:
        return False
    if len(set(residencies)) > 1 or len(set(keys)) < len(keys):
        return False
    host: Slots | None = None
    device: Slots | None = None
    for changes in outcome.slots:
        if changes.filled:
            if changes.group != group or [block.key for block in changes.filled.values()] != keys:
                return False
            slots = Slots.of(list(changes.filled), arena.generations(changes.tier, group))
            if changes.tier is HOST:
                host = slots
            else:
                device = slots
    # What is stored was not there before.
    index.put_alike(group, keys, residencies[0], host, device, new=event.type is STORED)
    return True


def _follow_each(arena: Arena, index: KeyIndex, outcome: Outcome) -> None:
    new = True
    after: defaultdict[GroupId, dict[Key, int]] = defaultdict(dict)
    gone: defaultdict[GroupId, list[Key]] = defaultdict(list)
    for event in outcome.events:
        group, keys = event.group, event.blocks.keys
        if event.type is REMOVED:
            gone[group] += keys
            if group in after:
                stands = after[group]
                for key in keys:
                    stands.pop(key, None)
        elif event.cause is not RECOVERED and keys:
            # What is stored was not there before; what else happens to it in the same outcome has its own event.
            new = new and event.type is STORED
            after[group].update(zip(keys, event.blocks.residencies, strict=True))
    for group, keys in gone.items():
        index.remove_many(group, keys)
    if after:
        arrived = _arrived(arena, outcome)
        for group, residencies in after.items():
            index.put_many(group, residencies, arrived.get((HOST, group)), arrived.get((DEVICE, group)), new=new)


def _arrived(arena: Arena, outcome: Outcome) -> dict[tuple[Tier, GroupId], Arrived]:
    """Where blocks have got to."""
    arrived: dict[tuple[Tier, GroupId], Arrived] = {}
    for changes in outcome.slots:
        if changes.filled:
            slots = {block.key: slot for slot, block in changes.filled.items()}
            arrived[changes.tier, changes.group] = slots, arena.generations(changes.tier, changes.group)
    return arrived


def check_index(manager: BlockManager, arena: Arena) -> None:
    """The key index says just what the core knows. Raises :class:`InvariantViolation` where it does not."""
    if arena.index is None:
        return
    shown = arena.index.contents()
    known = {
        (group, block.key): _entry(arena, group, block)
        for group, window in manager.windows.items()
        for block in window.state.index
    }
    for group, key in shown.keys() | known.keys():
        shows, is_ = shown.get((group, key)), known.get((group, key))
        if shows != is_:
            raise InvariantViolation(f"key index: block {key.hex()} of group {group} is {is_} and shown as {shows}")


def _entry(arena: Arena, group: GroupId, block: Block) -> Entry:
    host = _place(arena, group, Tier.HOST, block.on_host)
    device = _place(arena, group, Tier.DEVICE, block.on_device)
    return Entry(block.residency, *host, *device)


def _place(arena: Arena, group: GroupId, tier: Tier, copy: Copy | None) -> tuple[int, int]:
    if copy is None or not copy.valid:
        return 0, 0
    return copy.slot, arena.generation(tier, group, copy.slot)
