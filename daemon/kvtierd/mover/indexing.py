"""Keeps the key index in step with the core: what an outcome's events say, with the slots that it fills."""

from __future__ import annotations

from collections import defaultdict

from kvtier.abi.key_index import Entry
from kvtierd.core.block import Block, Copy
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import RECOVERED, REMOVED, STORED
from kvtierd.core.ids import HOST, GroupId, Key, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Outcome
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.key_index import SURVEYED, Name, Place


def follow(arena: Arena, outcome: Outcome) -> None:
    """After the outcome's last generation has changed and before anybody is answered: who is told that a block is there
    finds it.

    A block that has got into a memory tier has its slot among those filled; that it has left one, or is only on disk,
    takes none. What was recovered is in the index already: :meth:`Arena.rebuild_index`.
    """
    index = arena.index
    if index is None or not outcome.events:
        return
    host: dict[Name, Place] = {}
    device: dict[Name, Place] = {}
    for changes in outcome.slots:
        if changes.filled:
            group, arrived = changes.group, host if changes.tier is HOST else device
            generations = arena.generations(changes.tier, group)
            for slot, block in changes.filled.items():
                arrived[group, block.key] = slot, generations[slot]
    after: dict[Name, int] = {}
    gone: defaultdict[GroupId, list[Key]] = defaultdict(list)
    for event in outcome.events:
        group = event.group
        if event.type is REMOVED and len(event.blocks) >= SURVEYED:
            keys = event.blocks.keys
            gone[group] += keys
            for key in keys if after else ():
                after.pop((group, key), None)
        elif event.cause is not RECOVERED:
            for key, residency in zip(event.blocks.keys, event.blocks.residencies, strict=True):
                after[group, key] = residency
    for group, keys in gone.items():
        index.remove_many(group, keys)
    if after:
        # What is stored was not there before; what happens to it besides in the same outcome has an event of its own.
        new = len(outcome.events) == 1 and outcome.events[0].type is STORED
        index.put_many(after, host, device, new=new)
    index.show(outcome.events[-1].id)


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
