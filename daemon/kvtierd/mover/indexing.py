"""Keeps the key index in step with the core: the events of an outcome, with the slots that it fills."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.abi.key_index import ABSENT, Entry
from kvtierd.core.block import Block, Copy
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import RECOVERED, REMOVED, STORED
from kvtierd.core.ids import DEVICE, HOST, GroupId, Key, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Outcome
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.key_index import NOWHERE, At, Blocks


def follow(arena: Arena, outcome: Outcome) -> None:
    """Makes the key index show an outcome: after its last generation has changed and before anybody is answered.

    The slot of a block that has got into a memory tier is among the filled ones. Recovered blocks are
    in the index already: :meth:`Arena.rebuild_index`.
    """
    index = arena.index
    if index is None or not outcome.events:
        return
    arrived: dict[tuple[Tier, GroupId], Mapping[Key, At]] = {}
    for changes in outcome.slots:
        slots = {block.key: slot for slot, block in changes.filled.items()}
        arrived[changes.tier, changes.group] = arena.at(changes.tier, changes.group, slots)
    for event in outcome.events:
        if event.cause is RECOVERED:
            continue
        keys, group = event.blocks.keys, event.group
        if event.type is REMOVED:
            blocks = Blocks(group, dict.fromkeys(keys, 0))
        else:
            places = (arrived.get((tier, group), NOWHERE) for tier in (HOST, DEVICE))
            blocks = Blocks(group, dict(zip(keys, event.blocks.residencies, strict=True)), *places)
        index.put(blocks, new=event.type is STORED)
    index.show(outcome.events[-1].id)


def check_index(manager: BlockManager, arena: Arena) -> None:
    """Compares the key index with the core. Raises :class:`InvariantViolation` where it does not."""
    if arena.index is None:
        return
    shown = arena.index.contents()
    known = {
        (group, block.key): _entry(arena, group, block)
        for group, window in manager.windows.items()
        for block in window.state.index
    }
    for group, key in shown.keys() | known.keys():
        is_ = known.get((group, key))
        shows = shown.get((group, key), ABSENT)
        if is_ is None or shows not in (is_, None):
            raise InvariantViolation(f"key index: block {key.hex()} of group {group} is {is_} and shown as {shows}")


def _entry(arena: Arena, group: GroupId, block: Block) -> Entry:
    host = _place(arena, group, Tier.HOST, block.copies[Tier.HOST])
    device = _place(arena, group, Tier.DEVICE, block.copies[Tier.DEVICE])
    return Entry(block.residency, *host, *device)


def _place(arena: Arena, group: GroupId, tier: Tier, copy: Copy | None) -> tuple[int, int]:
    if copy is None or not copy.valid:
        return 0, 0
    return copy.slot, arena.generation(tier, group, copy.slot)
