"""What is done to blocks by hand, in one window group: pin and unpin, drop, reset, and what each would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtierd.core.block import Block
from kvtierd.core.events import Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import Key, Tier
from kvtierd.core.verbs import BlockResult, DropReport


def pin(state: GroupState, tier: Tier, keys: Sequence[Key], *, unpin: bool) -> tuple[BlockResult, ...]:
    change = _unpin if unpin else _pin
    found = (state.index.get(key) for key in keys)
    return tuple(BlockResult.NOT_FOUND if block is None else change(state, tier, block) for block in found)


def _pin(state: GroupState, tier: Tier, block: Block) -> BlockResult:
    copy = block.copy(tier)
    if copy is None or not copy.valid:
        return BlockResult.NOT_READY
    room = state.policy.pinnable(state.slots[tier].capacity) > state.pins.slots(tier)
    if not room and not state.pins.count(tier, copy):
        return BlockResult.OVER_CAP
    state.pin(block, tier, copy)
    return BlockResult.OK


def _unpin(state: GroupState, tier: Tier, block: Block) -> BlockResult:
    copy = block.copy(tier)
    if copy is None or not state.pins.count(tier, copy):
        return BlockResult.NOT_READY
    state.unpin(block, tier, copy)
    return BlockResult.OK


def drop(state: GroupState, keys: Sequence[Key], *, dry_run: bool) -> DropReport:
    """Forgets blocks and everything under them; those of which any part is held, pinned or claimed are HELD."""
    wanted = [state.index.get(key) for key in keys]
    gone: dict[Block, None] = {}
    results = []
    for block in wanted:
        if block is None:
            results.append(BlockResult.NOT_FOUND)
        elif block in gone:
            results.append(BlockResult.OK)
        else:
            subtree = state.subtree(block)
            held = any(needed(member) for member in subtree)
            results.append(BlockResult.HELD if held else BlockResult.OK)
            if not held:
                gone.update(dict.fromkeys(subtree))
            if not held and not dry_run:
                state.remove_subtree(block, Cause.EXPLICIT, Cause.ANCESTOR, subtree)
    return DropReport(tuple(results), len(gone))


def needed(block: Block) -> bool:
    """Somebody holds, pins or waits for it."""
    return block.claims > 0 or block.held


def reset(state: GroupState, before: int) -> tuple[int, int, int]:
    """Removes a slice of the blocks with numbers under ``before``, the newest first, so children before their parents.
    What is needed stays, and so does what has children left.

    Returns how many went, how many stayed, and the number to go on from (0: there are no more).
    """
    members, following = state.index.before(before, state.policy.blocks_a_call)
    dropped = 0
    for block in members:
        if block.first_child is None and not needed(block):
            state.remove(block, Cause.RESET)
            dropped += 1
    return dropped, len(members) - dropped, following


def kept(roots: Iterable[Block]) -> int:
    """How many blocks a reset keeps: these, of which some are not indexed any more, and all that they stand on."""
    seen: set[Block] = set()
    for block in roots:
        current: Block | None = block if block.indexed else None
        while current is not None and current not in seen:
            seen.add(current)
            current = current.parent
    return len(seen)
