"""What goes where bytes are gone against policy, in one window group: a copy, or a tier, and all that needs it."""

from __future__ import annotations

from collections.abc import Iterable

from kvtierd.core.block import Block, Copy
from kvtierd.core.events import UPDATED, Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DISK, Tier


def lose_bytes(state: GroupState, block: Block, tier: Tier, copy: Copy) -> None:
    """A copy failed verification: the block loses it, and its slot is never used again."""
    state.corrupt[tier].add(copy.slot)
    if block.copy(tier) is copy:
        _lose_copy(state, block, tier, Cause.CORRUPT)


def lose_tier(state: GroupState, tier: Tier, cause: Cause, before: int, limit: int) -> int:
    """Everything in the tier is gone, what only stood there with all its descendants; its slots are out of use.

    A slice of it: of at most ``limit`` blocks with numbers under ``before``, the newest first. Returns where the next
    one goes on, 0 where this was the last.
    """
    state.offline.add(tier)
    state.slots[tier].shut()
    if tier is DISK:
        state.undeleted.clear()  # whoever takes it back has emptied it
    blocks, following = state.index.before(before, limit)
    for block in blocks:
        if block.copy(tier) is not None:
            _lose_copy(state, block, tier, cause)
    return following


def lose_detached(state: GroupState, tier: Tier, copies: Iterable[tuple[Block, Copy]]) -> None:
    """Of these, in a memory tier, whose bytes are gone: no index leads to those that are their blocks' no more, so who
    still holds or reads their slots is told here."""
    for block, copy in copies:
        if block.copy(tier) is not copy:
            state.ledgers[tier].begin_write(copy.slot)


def restore_tier(state: GroupState, tier: Tier) -> None:
    """The tier is back, empty."""
    state.offline.discard(tier)
    state.slots[tier].reopen(state.corrupt[tier])


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
