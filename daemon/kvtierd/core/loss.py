"""What goes where bytes are gone against policy, in one window group: a copy, or a tier, and all that needs it."""

from __future__ import annotations

from kvtierd.core.block import Block, Copy
from kvtierd.core.events import UPDATED, Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DISK, Tier


def lose_bytes(state: GroupState, block: Block, tier: Tier, copy: Copy) -> None:
    """A copy failed verification: the block loses it, and its slot is never used again."""
    state.corrupt[tier].add(copy.slot)
    if block.copy(tier) is copy:
        _lose_copy(state, block, tier, Cause.CORRUPT)


def lose_disk(state: GroupState, before: int) -> int:
    """A slice of the blocks whose numbers are under ``before`` lose their disk copies, the newest first; what only
    stood there goes with all its descendants. The disk's slots are out of use.

    Returns:
        Where the next slice goes on; 0 where this was the last.
    """
    state.disk_lost = True
    state.slots[DISK].shut()
    state.undeleted.clear()  # whoever takes the disk back has emptied it
    blocks, following = state.index.before(before, state.policy.blocks_a_call)
    for block in blocks:
        if block.on_disk is not None:
            _lose_copy(state, block, DISK, Cause.IO_ERROR)
    return following


def restore_disk(state: GroupState) -> None:
    """The disk is back, empty."""
    state.disk_lost = False
    state.slots[DISK].reopen(state.corrupt[DISK])


def _lose_copy(state: GroupState, block: Block, tier: Tier, cause: Cause) -> None:
    """With the residency goes all that needs it, children first."""
    needing = _disk_subtree(block) if tier is DISK else [block]
    for member in reversed(needing):
        _lose_one_copy(state, member, tier, cause if member is block else Cause.ANCESTOR)


def _disk_subtree(block: Block) -> list[Block]:
    """The block and what stands on it on disk, parents before children."""
    order = [block]
    for member in order:
        order.extend(child for child in member.children if child.copy(DISK) is not None)
    return order


def _lose_one_copy(state: GroupState, block: Block, tier: Tier, cause: Cause) -> None:
    copy = block.copy(tier)
    was_valid = copy is not None and copy.valid
    others = any((c := block.copy(t)) is not None and c.valid for t in state.tiers if t is not tier)
    if was_valid and not others:
        state.remove_subtree(block, cause, Cause.ANCESTOR)
    elif copy is not None:
        state.detach(block, tier)
        if was_valid:
            state.recorder.change(UPDATED, cause, state.group, block)
        state.reconsider(block)
