"""Copies downwards that nobody waits for: what a write policy asks for, and clean slots ahead of need.

A slot is clean where it is free or its block is READY below, too: reclaiming it needs no copy. Background copies leave
their sources where they are, go only where policy lets blocks go down, come after everybody who waits for room, and are
bounded in flight, so that they never stand in the way of more than a few copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.events import WATERMARK, WRITE_THROUGH
from kvtierd.core.flights import Flights
from kvtierd.core.group import GroupState
from kvtierd.core.ids import Tier
from kvtierd.core.policy import WritePolicy
from kvtierd.core.room import COMING, NEVER, NOW, Room

MOST_IN_FLIGHT: Final = 64
"""Background copies of a group."""


class Background:
    """Of one window group. :meth:`work` is called once all requests have been served."""

    def __init__(self, state: GroupState, flights: Flights, room: Room) -> None:
        self._state = state
        self._flights = flights
        self._room = room
        self._due: OrderedDict[Block, None] = OrderedDict()
        """To be copied to the lowest tier, in this order."""
        self._cleaning = dict.fromkeys(state.tiers, False)

    def committed(self, blocks: Sequence[Block]) -> None:
        if self._state.policy.write_policy is WritePolicy.THROUGH:
            self._due.update(dict.fromkeys(blocks))

    def recovered(self, blocks: list[Block]) -> None:
        """What was worth writing down in an earlier life still is."""
        if self._state.policy.write_policy is WritePolicy.SELECTIVE:
            self._state.reuse(blocks)

    def used_again(self, blocks: Sequence[Block]) -> None:
        if self._state.policy.write_policy is WritePolicy.SELECTIVE:
            fresh = self._state.reuse(blocks)
            self._due.update(dict.fromkeys(fresh))

    def work(self) -> None:
        """Plans some copies. What finds no room now waits for what is in flight; what cannot go down is forgotten."""
        left = self._write_down(MOST_IN_FLIGHT - self._flights.background)
        if self._state.policy.clean_high > 0:
            for tier in self._state.tiers[:-1]:
                left = self._clean(tier, left)

    def _write_down(self, left: int) -> int:
        low = self._state.tiers[-1]
        while self._due and left > 0:
            block = next(iter(self._due))
            if self._wanted(block, low):
                prospect = self._room.copy_down(block, self._room.source(block), low, WRITE_THROUGH)
                if prospect is COMING:
                    return left
                left -= prospect is NOW
            del self._due[block]
        return left

    def _wanted(self, block: Block, low: Tier) -> bool:
        if not block.indexed or block.copy(low) is not None:
            return False
        return self._state.goes_down(block, self._room.source(block), low)

    def _clean(self, tier: Tier, left: int) -> int:
        """Below the low watermark the tier is cleaned up to the high one, in the order of eviction."""
        state, policy = self._state, self._state.policy
        slots = state.slots[tier].capacity
        clean = state.slots[tier].free + state.candidates(tier).cleans + self._flights.cleaning[tier]
        if clean >= policy.clean_high * slots:
            self._cleaning[tier] = False
        elif clean < policy.clean_low * slots:
            self._cleaning[tier] = True
        while self._cleaning[tier] and left > 0 and clean < policy.clean_high * slots:
            block = state.candidates(tier).dirty.victim()
            if block is None or not self._clean_one(block, tier):
                break
            clean += 1
            left -= 1
        return left

    def _clean_one(self, block: Block, tier: Tier) -> bool:
        for low in self._state.below[tier]:
            if self._state.goes_down(block, tier, low):
                prospect = self._room.copy_down(block, tier, low, WATERMARK, sparing=True)
                if prospect is not NEVER:
                    return prospect is NOW
        return False
