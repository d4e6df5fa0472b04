"""Faults to plant into the core: each takes one promise away, in a method or two, for as long as it is planted.

They show that the simulation sees. Nothing here is reachable from the daemon; what the core is made of is named as it
is now, so a fault whose method is gone cannot be planted and its test fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final, cast
from unittest.mock import patch

from kvtierd.core import reclaim, recovery
from kvtierd.core.block import Block, Copy
from kvtierd.core.events import Cause, EventSequencer, EventType
from kvtierd.core.eviction import LEAF, Priorities, TwoQueues
from kvtierd.core.group import GroupState
from kvtierd.core.groups import AcrossGroups, AcrossTicket
from kvtierd.core.holds import Holding
from kvtierd.core.ids import Key, MoveId, SessionId, SlotId, Tier
from kvtierd.core.leases import FetchTicket, Lease, LeftLease, ReserveTicket
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Ledger, MoveResult, Recorder, Transfer
from kvtierd.core.policy import GroupShape
from kvtierd.core.reclaim import Background, Room
from kvtierd.core.retention import Clocks
from kvtierd.core.transfers import Flight, Flights
from kvtierd.core.window import WindowManager
from kvtierd.service import recovery as kept

Method = Callable[..., Any]


@dataclass(slots=True, frozen=True)
class Fault:
    """``patches``: (class, method, what makes the faulty one of the right one).

    ``outside``: the world alone notices. Else it takes the core's own checker, since the fault is one of choice: who is
    evicted, who may be.
    """

    name: str
    patches: tuple[tuple[type | ModuleType, str, Callable[[Method], Method]], ...]
    outside: bool = True

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as undo:
            for owner, method, spoil in self.patches:
                undo.enter_context(patch.object(owner, method, spoil(getattr(owner, method))))
            yield


def _does_nothing(right: Method) -> Method:
    def nothing(*arguments: object) -> None:
        pass

    return nothing


# -- copies --------------------------------------------------------------------------------------------------------


def _arrives_when_planned(right: Method) -> Method:
    def start_copy(state: GroupState, block: Block, src: Tier, dst: Tier, cause: Cause) -> tuple[MoveId, Copy, Copy]:
        planned: tuple[MoveId, Copy, Copy] = right(state, block, src, dst, cause)
        state.arrive(block, dst)
        return planned

    return start_copy


def _frees_what_leaves(right: Method) -> Method:
    def leave(state: GroupState, block: Block, tier: Tier) -> None:
        right(state, block, tier)
        copy = block.copies[tier]
        assert copy is not None
        state.give_back(tier, copy.slot)

    return leave


def _detaches_the_source(right: Method) -> Method:
    def source_stays(flights: Flights, flight: Flight) -> None:
        right(flights, flight)
        if flight.block.copies[flight.src] is flight.source:
            flights._state.detach(flight.block, flight.src)

    return source_stays


def _overlooks(**overlooked: frozenset[int]) -> Callable[[Method], Method]:
    def spoil(right: Method) -> Method:
        def complete(flights: Flights, result: MoveResult, now: int) -> list[FetchTicket]:
            waiting: list[FetchTicket] = right(flights, replace(result, **overlooked), now)  # type: ignore[arg-type]
            return waiting

        return complete

    return spoil


def _forgets_the_bad_slot(right: Method) -> Method:
    def lose_bytes(state: GroupState, block: Block, tier: Tier, copy: Copy) -> None:
        right(state, block, tier, copy)
        state.corrupt[tier].discard(copy.slot)

    return lose_bytes


# -- slots, leases and claims --------------------------------------------------------------------------------------


def _holds_nothing(right: Method) -> Method:
    def hold(state: GroupState, block: Block, tier: Tier, session: SessionId) -> Copy:
        copy: Copy = right(state, block, tier, session)
        copy.holds = 0
        state.reconsider(block)
        return copy

    return hold


def _gives_back_orphans(right: Method) -> Method:
    def orphan(holding: Holding, lease: Lease, orphaned: bool) -> None:
        right(holding, lease, orphaned)
        for slot in lease.blank:
            holding._state.give_back(lease.tier, slot)

    return orphan


def _retires_at_once(right: Method) -> Method:
    def retire(state: GroupState, block: Block, slot: SlotId) -> None:
        state.slots[Tier.DISK].give_back(slot)

    return retire


def _shows_the_youngest_first(right: Method) -> Method:
    def reserve(window: WindowManager, ticket: ReserveTicket) -> None:
        right(window, ticket)
        window._queues[ticket.tier].rotate(1)

    return reserve


def _nobody_is_older(right: Method) -> Method:
    def older_wants(window: WindowManager, tier: Tier, seq: int) -> int:
        return 0

    return older_wants


def _wants_nothing(right: Method) -> Method:
    def fetch(window: WindowManager, ticket: FetchTicket, now: int) -> None:
        ticket.min_blocks = 0
        right(window, ticket, now)

    return fetch


# -- the tree ------------------------------------------------------------------------------------------------------


def _takes_parents_for_leaves(right: Method) -> Method:
    def lists(state: GroupState, block: Block, tier: Tier) -> int:
        found: int = right(state, block, tier)
        return found | (LEAF if block.residency == tier.bit else 0)

    return lists


def _leaves_children_behind(right: Method) -> Method:
    def remove(state: GroupState, block: Block, cause: Cause) -> None:
        children, block.first_child = block.first_child, None
        right(state, block, cause)
        block.first_child = children

    return remove


def _knows_no_ancestors(right: Method) -> Method:
    def missing_ancestors(room: Room, block: Block, low: Tier) -> tuple[list[Block], Block | None]:
        return [], None

    return missing_ancestors


def _keeps_every_subtree(right: Method) -> Method:
    def drop_some_subtree(room: Room, tier: Tier) -> bool:
        return False

    return drop_some_subtree


def _touches_parents_first(right: Method) -> Method:
    def touch(state: GroupState, blocks: list[Block]) -> None:
        chains = {member for block in blocks for member in (block, *block.ancestors()) if member.indexed}
        for member in sorted(chains, key=lambda block: (block.depth, block.key)):
            right(state, [member])
            for ancestor in member.ancestors():
                ancestor.used(ancestor.last_use - 1)
                state.reconsider(ancestor)

    return touch


def _leaves_parents_cold(right: Method) -> Method:
    def use(evictor: TwoQueues, block: Block) -> None:
        parent, block.parent = block.parent, None
        right(evictor, block)
        block.parent = parent

    return use


def _cools_nothing(right: Method) -> Method:
    def settle(evictor: TwoQueues) -> Iterator[Block]:
        return iter(())

    return settle


def _never_wants(right: Method) -> Method:
    def wanted(background: Background, block: Block, low: Tier) -> bool:
        return False

    return wanted


# -- retention -----------------------------------------------------------------------------------------------------


def _lets_the_clock_run(right: Method) -> Method:
    def hold(state: GroupState, block: Block, tier: Tier, session: SessionId) -> Copy:
        deadline = block.traits.deadline_ns
        copy: Copy = right(state, block, tier, session)
        if deadline:
            state.clocks._run(block, deadline)
        return copy

    return hold


def _expires_untold(right: Method) -> Method:
    def give(priorities: Priorities, block: Block, priority: int, cause: Cause) -> None:
        if cause is Cause.EXPIRED:
            block.retain(priority, block.traits.duration_ms, block.traits.deadline_ns)
        else:
            right(priorities, block, priority, cause)

    return give


def _is_no_pin(right: Method) -> Method:
    def keep(state: GroupState, block: Block, tier: Tier, copy: Copy) -> None:
        if state.pins.count(tier, copy) != 1:
            right(state, block, tier, copy)

    return keep


def _nobody_needs(right: Method) -> Method:
    def needed(block: Block) -> bool:
        return False

    return needed


# -- several groups --------------------------------------------------------------------------------------------------


def _too_short(right: Method) -> Method:
    span = cast(property, right).fget
    assert span is not None
    return cast(Method, property(lambda shape: max(1, span(shape) - 1)))


def _asks_for_parents(right: Method) -> Method:
    def unsupported(state: GroupState, parent_key: Key | None) -> bool:
        return parent_key is not None and state.index.get(parent_key) is None

    return unsupported


def _lets_go_of_one_part(right: Method) -> Method:
    def let_go(across: AcrossGroups, ticket: AcrossTicket) -> None:
        right(across, replace(ticket, parts=ticket.parts[:1]))

    return let_go


def _grants_what_failed(right: Method) -> Method:
    def finish(across: AcrossGroups, ticket: AcrossTicket, now: int) -> None:
        across._grant(ticket)

    return finish


def _lets_go_of_all(right: Method) -> Method:
    def release_first(holding: Holding, lease: Lease, count: int) -> None:
        right(holding, lease, len(lease.held))

    return release_first


# -- loss of a tier, and adoption --------------------------------------------------------------------------------------


def _back_between_slices(right: Method) -> Method:
    def lose_disk(state: GroupState, before: int) -> int:
        following: int = right(state, before)
        if following:
            recovery.restore_disk(state)
        return following

    return lose_disk


def _forgets_readers(right: Method) -> Method:
    def left(*arguments: object) -> list[LeftLease]:
        leases: list[LeftLease] = right(*arguments)
        return [lease for lease in leases if not lease.keys]

    return left


def _forgets_writers(right: Method) -> Method:
    def left(*arguments: object) -> list[LeftLease]:
        leases: list[LeftLease] = right(*arguments)
        return [lease for lease in leases if not lease.blank]

    return left


def _reaches_all(right: Method) -> Method:
    def reachable(keys: Sequence[Key], parents: Sequence[Key | None]) -> list[int]:
        return list(range(len(keys)))

    return reachable


# -- events and generations ------------------------------------------------------------------------------------------


def _omits(type_: EventType, cause_: Cause) -> Callable[[Method], Method]:
    def spoil(right: Method) -> Method:
        def change(
            recorder: Recorder,
            type: EventType,
            cause: Cause,
            group: int,
            block: Block,
            transfer: Transfer | None = None,
        ) -> None:
            if (type, cause) != (type_, cause_):
                right(recorder, type, cause, group, block, transfer)

        return change

    return spoil


def _has_no_label(right: Any) -> Any:
    """On its way to disk. ``traits`` is a property."""
    return property(lambda block: right.__get__(block)._replace(label=None))


def _says_it_twice(right: Method) -> Method:
    def change(recorder: Recorder, *about: object) -> None:
        right(recorder, *about)
        right(recorder, *about)

    return change


def _starts_anew(right: Method) -> Method:
    def begin(sequencer: EventSequencer, last: int = 0) -> None:
        right(sequencer, 0)

    return begin


FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault("ready_before_copy_ends", ((GroupState, "start_copy", _arrives_when_planned),)),
        Fault("source_freed_before_ready", ((GroupState, "leave", _frees_what_leaves),)),
        Fault("failed_copy_is_ready", ((Flights, "complete", _overlooks(failed=frozenset())),)),
        Fault("failed_copy_frees_source", ((Flights, "_source_stays", _detaches_the_source),)),
        Fault("corrupt_copy_is_ready", ((Flights, "complete", _overlooks(corrupt=frozenset())),)),
        Fault("bad_slot_reused", ((recovery, "lose_bytes", _forgets_the_bad_slot),)),
        Fault("hit_during_demotion_ignored", ((GroupState, "stay", _does_nothing),)),
        Fault("leased_slot_reused", ((GroupState, "hold", _holds_nothing),)),
        Fault("orphaned_slot_reused", ((Holding, "orphan", _gives_back_orphans),)),
        Fault("claim_ignored", tuple((GroupState, name, _does_nothing) for name in ("claim", "unclaim"))),
        Fault("retire_skipped", ((GroupState, "retire", _retires_at_once),)),
        Fault(
            "queue_overtaken",
            (
                (WindowManager, "reserve", _shows_the_youngest_first),
                (WindowManager, "_older_wants", _nobody_is_older),
            ),
        ),
        Fault("waiting_forgotten", ((BlockManager, "_pump_all", _does_nothing),)),
        Fault("cancelled_but_granted", ((WindowManager, "withdraw", _does_nothing),)),
        Fault("minimum_ignored", ((WindowManager, "fetch", _wants_nothing),)),
        Fault(
            "parent_dropped_before_child",
            ((GroupState, "_lists", _takes_parents_for_leaves), (GroupState, "remove", _leaves_children_behind)),
        ),
        Fault("disk_child_before_ancestor", ((Room, "_missing_ancestors", _knows_no_ancestors),)),
        Fault("stuck_parents_kept", ((Room, "_drop_some_subtree", _keeps_every_subtree),)),
        Fault("priority_not_propagated", ((Priorities, "carry_up", _does_nothing),)),
        Fault("parents_touched_first", ((GroupState, "touch", _touches_parents_first),), outside=False),
        Fault("never_written_down", ((Background, "_wanted", _never_wants),)),
        Fault("parents_stay_cold", ((TwoQueues, "use", _leaves_parents_cold),), outside=False),
        Fault("all_are_protected", ((TwoQueues, "settle", _cools_nothing),), outside=False),
        Fault("expiry_forgotten", ((Clocks, "_run", _does_nothing),)),
        Fault("clock_runs_while_held", ((GroupState, "hold", _lets_the_clock_run),)),
        Fault("expiry_untold", ((Priorities, "give", _expires_untold),)),
        Fault("pin_holds_nothing", ((GroupState, "_keep", _is_no_pin), (GroupState, "unpin", _does_nothing))),
        Fault("needed_blocks_dropped", ((reclaim, "needed", _nobody_needs),)),
        Fault("label_left_behind", ((Block, "traits", _has_no_label),)),
        Fault("window_never_slides", ((Holding, "_slide", _does_nothing),)),
        Fault("window_too_short", ((GroupShape, "span", _too_short),)),
        Fault("window_needs_parents", ((GroupState, "unsupported", _asks_for_parents),)),
        Fault("part_left_behind", ((AcrossGroups, "_let_go", _lets_go_of_one_part),)),
        Fault("failed_part_granted", ((AcrossGroups, "_finish", _grants_what_failed),)),
        Fault("lost_block_waited_for", ((AcrossGroups, "refresh", _does_nothing),)),
        Fault("part_released_whole", ((Holding, "release_first", _lets_go_of_all),)),
        Fault("disk_back_between_slices", ((recovery, "lose_disk", _back_between_slices),)),
        Fault("lost_disk_waited_for", ((WindowManager, "refuse_offline", _does_nothing),)),
        Fault("readers_forgotten", ((kept, "_left", _forgets_readers),)),
        Fault("writers_forgotten", ((kept, "_left", _forgets_writers),)),
        Fault("orphans_adopted", ((kept, "reachable", _reaches_all),)),
        Fault("event_omitted", ((Recorder, "change", _omits(EventType.UPDATED, Cause.CAPACITY)),)),
        Fault("event_repeated", ((Recorder, "change", _says_it_twice),)),
        Fault("generation_not_bumped", ((Ledger, "begin_write", _does_nothing),)),
        Fault("id_reused_after_restart", ((EventSequencer, "__init__", _starts_anew),)),
    )
}
"""By name."""
