"""Faults to plant into the core: each fault breaks one promise, in a method or two, while it is planted.

The faults show that the simulation detects broken promises. The daemon cannot reach them. A fault names methods of the
present core: if a method is gone, the fault cannot be planted and its test fails.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

from kvtier.abi.attention import Attention
from kvtierd.core import lookup, outcome, removal
from kvtierd.core.acquires import Acquires, AcquireTicket
from kvtierd.core.ancestry import Ancestry
from kvtierd.core.block import Block, Copy
from kvtierd.core.events import Cause, EventSequencer, EventType
from kvtierd.core.eviction import LEAF
from kvtierd.core.group import GroupState
from kvtierd.core.holds import Holds
from kvtierd.core.ids import Key, SessionId, SlotId, Tier, Traits
from kvtierd.core.leases import LeftLease, ReserveTicket, SlotLease
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import MoveResult, Recorder, SlotChanges
from kvtierd.core.policy import GroupShape
from kvtierd.core.reclaim import Background, Reclaimer
from kvtierd.core.retention import Clocks
from kvtierd.core.transfers import CopyInFlight, Transfers
from kvtierd.core.window import WindowManager
from kvtierd.service import recovery as kept

Method = Callable[..., Any]


@dataclass(slots=True, frozen=True)
class Fault:
    """``patches``: (class or module, method, replacement); the replacement gets the right method before the arguments.

    ``outside``: the world alone detects the fault. Otherwise only the core's own checker does, since the fault concerns
    a choice: which block is evicted, or may be.
    """

    name: str
    patches: tuple[tuple[type | ModuleType, str, Method], ...]
    outside: bool = True

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as undo:
            for owner, name, faulty in self.patches:
                undo.enter_context(patch.object(owner, name, _in_place_of(getattr(owner, name), faulty)))
            yield


def _in_place_of(right: Any, faulty: Method) -> Any:
    if isinstance(right, property):
        return property(lambda its: faulty(right.__get__(its)))

    def method(*arguments: Any, **keywords: Any) -> Any:
        return faulty(right, *arguments, **keywords)

    return method


def _answers(answer: Any) -> Method:
    """Returns a replacement that gives this answer and does nothing."""
    return lambda right, *arguments: answer


_does_nothing: Final = _answers(None)


# -- copies --------------------------------------------------------------------------------------------------------


def _arrives_when_planned(right: Method, state: GroupState, block: Block, src: Tier, dst: Tier, cause: Cause) -> Any:
    planned = right(state, block, src, dst, cause)
    state.arrive(block, dst)
    return planned


def _frees_what_leaves(right: Method, state: GroupState, block: Block, tier: Tier) -> None:
    right(state, block, tier)
    copy = block.copies[tier]
    assert copy is not None
    state.give_back(tier, copy.slot)


def _detaches_the_source(right: Method, transfers: Transfers, flight: CopyInFlight) -> None:
    right(transfers, flight)
    if flight.block.copies[flight.src] is flight.source:
        transfers._state.detach(flight.block, flight.src)


def _overlooks_failures(right: Method, transfers: Transfers, result: MoveResult, now: int) -> Any:
    return right(transfers, replace(result, failed=frozenset()), now)


def _overlooks_corruption(right: Method, transfers: Transfers, result: MoveResult, now: int) -> Any:
    return right(transfers, replace(result, corrupt=frozenset()), now)


def _forgets_the_bad_slot(right: Method, state: GroupState, block: Block, tier: Tier, copy: Copy) -> None:
    right(state, block, tier, copy)
    state.corrupt[tier].discard(copy.slot)


# -- slots, leases and claims --------------------------------------------------------------------------------------


def _holds_nothing(right: Method, state: GroupState, block: Block, tier: Tier, session: SessionId) -> Copy:
    copy: Copy = right(state, block, tier, session)
    copy.holds = 0
    state.reconsider(block)
    return copy


def _gives_back_orphans(right: Method, holding: Holds, lease: SlotLease, orphaned: bool) -> None:
    right(holding, lease, orphaned)
    for slot in lease.blank:
        holding._state.give_back(lease.tier, slot)


def _retires_at_once(right: Method, state: GroupState, block: Block, slot: SlotId) -> None:
    state.slots[Tier.DISK].give_back(slot)


def _shows_the_youngest_first(right: Method, window: WindowManager, ticket: ReserveTicket) -> None:
    right(window, ticket)
    window._queues[ticket.tier].rotate(1)


def _serves_the_newest(right: Method, manager: BlockManager, now: int) -> None:
    if manager._last_ticket in manager.tickets.keys() | manager.acquires.tickets.keys():
        right(manager, now)


def _wants_nothing(right: Method, acquires: Acquires, ticket: AcquireTicket, now: int) -> None:
    ticket.min_blocks = 0
    right(acquires, ticket, now)


# -- the tree ------------------------------------------------------------------------------------------------------


def _takes_parents_for_leaves(right: Method, state: GroupState, block: Block, tier: Tier) -> int:
    found: int = right(state, block, tier)
    return found | (LEAF if block.residency == tier.bit else 0)


def _leaves_children_behind(right: Method, state: GroupState, block: Block, *why: Cause, **how: bool) -> None:
    children, block.first_child = block.first_child, None
    right(state, block, *why, **how)
    block.first_child = children


def _touches_parents_first(right: Method, state: GroupState, blocks: Iterable[Block]) -> None:
    chains = {member for block in blocks for member in (block, *block.ancestors()) if member.indexed}
    for member in sorted(chains, key=lambda block: (block.depth, block.key)):
        right(state, [member])
        touched = [member, *member.ancestors()]
        latest_first = sorted((block.order for block in touched), reverse=True)
        for block, moment in zip(touched, latest_first, strict=True):
            block.used(moment)
            state.reconsider(block)


# -- retention -----------------------------------------------------------------------------------------------------


def _lets_the_clock_run(right: Method, state: GroupState, block: Block, tier: Tier, session: SessionId) -> Any:
    deadline = block.traits.deadline_ns
    copy = right(state, block, tier, session)
    if deadline:
        state.clocks._run(block, deadline)
    return copy


def _expires_untold(right: Method, ancestry: Ancestry, block: Block, priority: int, cause: Cause) -> None:
    if cause is Cause.EXPIRED:
        block.retain(priority, block.traits.duration_ms, block.traits.deadline_ns)
    else:
        right(ancestry, block, priority, cause)


def _passes_on_uses_alone(right: Method, ancestry: Ancestry, block: Block, use: bool, cause: Cause | None) -> None:
    if use:
        right(ancestry, block, use, None)


def _forgets_the_rest(right: Method, ancestry: Ancestry) -> bool:
    used: bool = right(ancestry)
    ancestry.due.clear()
    return used


def _is_no_pin(right: Method, state: GroupState, block: Block, tier: Tier, copy: Copy) -> None:
    if state.pins.count(tier, copy) != 1:
        right(state, block, tier, copy)


def _takes_no_label_along(right: Method, key: object, parent: object, traits: Traits, *slots: object) -> object:
    return right(key, parent, traits._replace(label=None), *slots)


# -- several groups --------------------------------------------------------------------------------------------------


def _too_short(attention: Attention) -> Attention:
    return replace(attention, span=max(1, attention.span - 1) if attention.span else 0)


def _believes_in_parents(right: Method, holding: Holds, *about: Any, **how: Any) -> Any:
    holding._state.shape = replace(holding._state.shape, flat=False)
    return right(holding, *about, **how)


def _keeps_no_sinks(attention: Attention) -> Attention:
    return replace(attention, sinks=0)


def _asks_for_parents(right: Method, state: GroupState, parent_key: Key | None) -> bool:
    return parent_key is not None and state.index.get(parent_key) is None


def _lets_go_of_one_part(right: Method, acquires: Acquires, ticket: AcquireTicket) -> None:
    right(acquires, replace(ticket, parts=ticket.parts[:1]))


def _grants_what_failed(right: Method, acquires: Acquires, ticket: AcquireTicket, now: int) -> bool:
    acquires._grant(ticket)
    return False


def _slides_from_the_front(right: Method, holding: Holds, lease: SlotLease, block: Block) -> None:
    holding._window = replace(holding._window, sinks=0)
    right(holding, lease, block)


def _lets_go_of_all(right: Method, holding: Holds, lease: SlotLease, slots: Collection[SlotId]) -> None:
    right(holding, lease, lease.all_slots())


def _gives_back_for_all(right: Method, holding: Holds, lease: SlotLease, slot: SlotId) -> None:
    del lease.blank[slot]
    holding._state.give_back(lease.tier, slot)


def _is_owned_by_one(right: Method, holding: Holds, lease: SlotLease, slots: Collection[SlotId]) -> None:
    right(holding, lease, slots)
    holding._state.ledgers[lease.tier].own(slots, lease.session)


# -- loss of a tier, and adoption --------------------------------------------------------------------------------------


def _back_between_slices(right: Method, state: GroupState, tier: Tier) -> Iterator[None]:
    for step in right(state, tier):
        removal.restore_disk(state)
        yield step


def _spares_nobody(
    right: Method, state: GroupState, root: Block, cause: Cause, below: Cause, spares: object = None
) -> Any:
    return right(state, root, cause, below)


def _stays_after_a_slice(right: Method, state: GroupState) -> None:
    right(state)
    state.losing.clear()


def _overlooks_losses(right: Method, reclaimer: Reclaimer, *about: Any) -> Any:
    state = reclaimer._state
    losing, state.losing = state.losing, {}
    try:
        return right(reclaimer, *about)
    finally:
        state.losing = losing


def _believes_in_hollow_parents(right: Method, state: GroupState, parent_key: Key | None) -> bool:
    parent = state.index.get(parent_key) if parent_key is not None else None
    return False if parent is not None and parent.hollow else right(state, parent_key)


def _forgets_readers(right: Method, *about: object) -> list[LeftLease]:
    return [lease for lease in right(*about) if not lease.keys]


def _forgets_writers(right: Method, *about: object) -> list[LeftLease]:
    return [lease for lease in right(*about) if not lease.blank]


def _reaches_all(right: Method, keys: Sequence[Key], parents: Sequence[Key | None]) -> list[int]:
    return list(range(len(keys)))


# -- events and generations ------------------------------------------------------------------------------------------


def _omits_evictions(right: Method, recorder: Recorder, type: EventType, cause: Cause, *about: object) -> None:
    if (type, cause) != (EventType.UPDATED, Cause.CAPACITY):
        right(recorder, type, cause, *about)


def _says_it_twice(right: Method, recorder: Recorder, *about: object) -> None:
    right(recorder, *about)
    right(recorder, *about)


def _starts_anew(right: Method, sequencer: EventSequencer, last: int = 0) -> None:
    right(sequencer, 0)


FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault("ready_before_copy_ends", ((GroupState, "start_copy", _arrives_when_planned),)),
        Fault("source_freed_before_ready", ((GroupState, "leave", _frees_what_leaves),)),
        Fault("failed_copy_is_ready", ((Transfers, "complete", _overlooks_failures),)),
        Fault("failed_copy_frees_source", ((Transfers, "_source_stays", _detaches_the_source),)),
        Fault("corrupt_copy_is_ready", ((Transfers, "complete", _overlooks_corruption),)),
        Fault("bad_slot_reused", ((removal, "lose_bytes", _forgets_the_bad_slot),)),
        Fault("hit_during_demotion_ignored", ((GroupState, "stay", _does_nothing),)),
        Fault("leased_slot_reused", ((GroupState, "hold", _holds_nothing),)),
        Fault("orphaned_slot_reused", ((Holds, "orphan", _gives_back_orphans),)),
        Fault("claim_ignored", tuple((GroupState, name, _does_nothing) for name in ("claim", "unclaim"))),
        Fault("retire_skipped", ((GroupState, "retire", _retires_at_once),)),
        Fault(
            "queue_overtaken",
            ((WindowManager, "reserve", _shows_the_youngest_first), (WindowManager, "_older_wants", _answers(0))),
        ),
        Fault("waiting_forgotten", ((BlockManager, "_pump", _serves_the_newest),)),
        Fault("cancelled_but_granted", ((WindowManager, "withdraw", _does_nothing),)),
        Fault("minimum_ignored", ((Acquires, "queue", _wants_nothing),)),
        Fault(
            "parent_dropped_before_child",
            ((GroupState, "_lists", _takes_parents_for_leaves), (GroupState, "remove", _leaves_children_behind)),
        ),
        Fault("disk_child_before_ancestor", ((Reclaimer, "_missing_ancestors", _answers(([], None))),)),
        Fault("stuck_parents_kept", ((Reclaimer, "_drop_some_subtree", _answers(False)),)),
        Fault("priority_not_propagated", ((Ancestry, "_owe", _passes_on_uses_alone),)),
        Fault("rest_of_a_climb_forgotten", ((Ancestry, "climb", _forgets_the_rest),), outside=False),
        Fault("parents_touched_first", ((GroupState, "touch", _touches_parents_first),), outside=False),
        Fault("never_written_down", ((Background, "_wanted", _answers(False)),)),
        Fault("expiry_forgotten", ((Clocks, "_run", _does_nothing),)),
        Fault("clock_runs_while_held", ((GroupState, "hold", _lets_the_clock_run),)),
        Fault("expiry_untold", ((Ancestry, "give", _expires_untold),)),
        Fault("pin_holds_nothing", ((GroupState, "_keep", _is_no_pin), (GroupState, "unpin", _does_nothing))),
        Fault("needed_blocks_dropped", ((removal, "needed", _answers(False)),)),
        Fault("new_holders_overlooked", ((removal, "remove_all", _spares_nobody),)),
        Fault("label_left_behind", ((outcome, "MoveItem", _takes_no_label_along),)),
        Fault("window_never_slides", ((Holds, "_slide", _does_nothing),)),
        Fault("window_too_short", ((GroupShape, "attention", _too_short),)),
        Fault("flat_blocks_with_parents", ((Holds, "store", _believes_in_parents),)),
        Fault("sinks_forgotten", ((GroupShape, "attention", _keeps_no_sinks),)),
        Fault("sinks_slide_out", ((Holds, "_slide", _slides_from_the_front),)),
        Fault("window_needs_parents", ((GroupState, "unsupported", _asks_for_parents),)),
        Fault("partial_blocks_take_children", ((GroupState, "is_partial", _answers(False)),)),
        Fault("outgrown_blocks_stay", ((Holds, "_outgrow", _does_nothing),)),
        Fault("part_left_behind", ((Acquires, "_let_go", _lets_go_of_one_part),)),
        Fault("failed_part_granted", ((Acquires, "_finish", _grants_what_failed),)),
        Fault("lost_block_waited_for", ((Acquires, "refresh", _does_nothing),)),
        Fault("part_released_whole", ((Holds, "give_back", _lets_go_of_all),)),
        Fault("joined_slot_reused", ((Holds, "_let_go", _gives_back_for_all),)),
        Fault("joined_slot_is_of_one", ((Holds, "_restate", _is_owned_by_one),)),
        Fault("disk_back_between_slices", ((removal, "_lose_copies", _back_between_slices),)),
        Fault("rest_of_a_loss_forgotten", ((removal, "lose_on", _stays_after_a_slice),), outside=False),
        Fault("hollow_blocks_matched", ((lookup, "stored", _answers(True)),)),
        Fault("hollow_blocks_granted", ((WindowManager, "readable", _answers(True)),)),
        Fault("stored_under_hollow_blocks", ((GroupState, "unsupported", _believes_in_hollow_parents),)),
        Fault("demoted_amid_a_loss", ((Reclaimer, "_secure_below", _overlooks_losses),)),
        Fault("lost_disk_waited_for", ((WindowManager, "refuse_offline", _does_nothing),)),
        Fault("readers_forgotten", ((kept, "_left", _forgets_readers),)),
        Fault("writers_forgotten", ((kept, "_left", _forgets_writers),)),
        Fault("orphans_adopted", ((kept, "reachable", _reaches_all),)),
        Fault("event_omitted", ((Recorder, "change", _omits_evictions),)),
        Fault("event_repeated", ((Recorder, "change", _says_it_twice),)),
        Fault("generation_not_bumped", ((SlotChanges, "begin_write", _does_nothing),)),
        Fault("id_reused_after_restart", ((EventSequencer, "__init__", _starts_anew),)),
    )
}
"""All faults, by name."""
