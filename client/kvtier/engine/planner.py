"""The state of an engine's requests: blocks offered, being loaded and saved.

A connector translates its engine's calls into calls of :class:`Planner`. All run on the scheduler's thread. No call for
a request raises errors of the daemon, or waits for it, except with the option ``pin``.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, Self

import numpy as np

from kvtier.engine.layout import Layout
from kvtier.engine.leader import Leader, NewBlock, Slot, Writing, placed
from kvtier.engine.options import EngineOptions
from kvtier.engine.prices import TRIAL_BLOCKS, Prices
from kvtier.engine.remote import Fetch, Fetches
from kvtier.engine.request import KeyChain, RequestHints
from kvtier.engine.states import KeptStates
from kvtier.engine.work import NO_PAGE, Completed, CopyResult, Load, Placed, Save, Table, Work
from kvtier.events import WatchItem
from kvtier.groups import AcrossLease
from kvtier.wire import MAX_KEYS, split_keys

_log = logging.getLogger("kvtier.engine")


@dataclass(slots=True)
class _PlannedRequest:
    chain: KeyChain
    most: int | None
    """Maximum number of blocks to save; None: all."""
    first: int = 0
    """The first offered block. ``found``, ``stored``: the block after the last one that is offered, or stored."""
    found: int = 0
    stored: int = 0
    refused: str = ""
    """The reason for which nothing, or only a part, was offered last."""
    counted: bool = False
    """Whether the hit ratio has counted the request."""
    bound: int | None = None
    """First block of a failed load: from this block on, no block is offered to the request again."""
    saved: int | None = None
    """Blocks before this one are stored, being saved, or given up; None: the stored blocks must be looked up."""
    tables: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Block tables of the step being planned; kept while a save waits for slots and the engine keeps the pages."""
    complete: int = 0
    """Blocks whose tokens are computed at the end of this step."""
    loading: set[int] = field(default_factory=set)
    saving: set[int] = field(default_factory=set)
    """Tickets of copies that are under way."""
    pinned: AcrossLease | None = None
    """Hold on the offered prefix, until the load or the request is over."""
    fetch: Fetch | None = None
    prompt: int = 0
    """Blocks of the prompt."""
    state: bytes | None = None
    """Key of the last state of the prompt, at first of the part that the engine does not compute; None: no state."""
    answer: bytes | None = None
    """Key of the last state of the answer."""
    hints: RequestHints | None = None
    over: float | None = None
    """Set once the engine has finished the request: monotonic time until which its pages wait for slots to be saved."""


@dataclass(slots=True)
class _Ticket:
    """A load or save under way. ``ranks``: ranks that have not reported yet."""

    request: _PlannedRequest
    name: str
    ranks: set[int]
    pages: Table
    first: int
    blocks: int
    failed: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    keys: Sequence[bytes] = ()
    writing: Writing | None = None
    cancelled: bool = False
    sync: bool = False
    """Whether the step that begins this load also computes on its pages."""


class Planner:
    """Plans loads and saves in the scheduler's process. Made by :meth:`open`. Block tables have a page per block, by
    group; -1 means no page. Call :meth:`step` once per step, after the calls for the step's requests."""

    def __init__(self, leader: Leader) -> None:
        self.leader: Final = leader
        self.layout: Final[Layout] = leader.layout
        self.options: Final[EngineOptions] = leader.options
        self._tokens: Final = self.layout.tokens
        self._ranks: Final = range(self.layout.ranks)
        self.complaints: Final = leader.complaints
        self._note: Final = leader.complaints.note
        self._fetches: Final = Fetches(leader)
        self._states: Final = KeptStates()
        self._requests: Final[dict[str, _PlannedRequest]] = {}
        self._scheduled: Final[dict[str, _PlannedRequest]] = {}
        """Requests of the step being planned, and finished requests with blocks left to save."""
        self._tickets: Final[dict[int, _Ticket]] = {}
        self._committing: list[tuple[_Ticket, Writing]] = []
        self._being_saved: Final[set[bytes]] = set()
        self._numbers: Final = count(1)
        self._loads: list[Load] = []
        self._saves: list[Save] = []
        self._flush: Final[defaultdict[int, set[int]]] = defaultdict(set)
        self._prices: Final = Prices(self._tokens, self.options)

    @classmethod
    def open(cls, layout: Layout, options: EngineOptions, watcher: Callable[[WatchItem], None] | None = None) -> Self:
        """Opens the cache. Raises :class:`kvtier.errors.InvalidArgument` for a bad layout, and the error of opening
        the cache if ``on_error`` is "fail". ``watcher``: see :class:`Leader`."""
        return cls(Leader(layout, options, watcher))

    # -- what the engine asks --------------------------------------------------------------------------------------

    def offer(
        self, req_id: str, chain: KeyChain, computed_tokens: int, *, total_tokens: int, waits: bool = True
    ) -> int | None:
        """Returns the number of tokens after ``computed_tokens`` that can be loaded: whole blocks, not the last token.

        None: ask again later. The call makes the request known, and may fetch its missing blocks from a remote store.
        A new offer replaces the last. ``waits``: the engine asks again; else fetched blocks serve the next request.
        """
        request = self._known(req_id, chain)
        if request.loading:
            return None
        if request.fetch is None or request.pinned is not request.fetch.lease:
            self._unpin(request)
        request.first = request.found = computed_tokens // self._tokens
        limit = (total_tokens - 1) // self._tokens
        if request.bound is not None:
            limit = min(limit, request.bound)
        if computed_tokens % self._tokens or limit <= request.first:
            return 0
        if request.fetch is not None and not request.fetch.over:
            if self._fetches.is_pending(request.fetch):
                return None
            request.pinned = request.fetch.lease
        stored = request.stored = self.leader.prefix_length(chain.span(0, limit), counts=not request.counted)
        if self.options.explain_misses and stored < limit and not request.counted:
            self.leader.explain_miss(req_id, chain.span(0, limit))
        request.counted = True
        found = self._worth(request)
        if found == stored < limit and limit - request.first >= self.options.min_blocks and request.fetch is None:
            request.fetch = self._fetches.begin(chain.span(0, limit), found)
            if request.fetch is not None:
                if waits:
                    return None
                self._fetches.leave(request.fetch)
        why, offered = self._why_not(request, found), found - request.first >= self.options.min_blocks
        if why and why != request.refused:  # the engine asks again in each step
            self._note(f"{'offered in part' if offered else 'not offered'}: {why}")
        request.refused = why
        if not offered:
            self._unpin(request)
            return 0
        if self.options.pin:
            request.pinned = request.pinned or self.leader.pin(chain.span(0, found))
            found = 0 if request.pinned is None else min(found, request.pinned.blocks)
            if found <= request.first:
                self._unpin(request)
                return 0
        request.found = found
        return (found - request.first) * self._tokens

    def is_async(self, req_id: str) -> bool:
        """Returns whether the offered load should not delay a step: it is long, or some blocks are on disk."""
        request = self._requests[req_id]
        return request.found - request.first >= self.options.async_blocks or self.sources(req_id)["disk"] > 0

    def sources(self, req_id: str) -> Mapping[str, int]:
        """Returns the number of offered tokens by the tier that has them."""
        request = self._requests[req_id]
        blocks = self.leader.sources(request.chain.span(request.first, request.found))
        return {tier: number * self._tokens for tier, number in blocks.items()}

    def branch(self, req_id: str) -> int:
        """Returns the number of tokens that the prompt shares with stored chains, if no state is stored after them;
        else 0. The state there is worth saving: chains branch at that token."""
        request = self._requests[req_id]
        shared = self.leader.prefix_length(request.chain.packed, stateless=True)
        return shared * self._tokens if shared > max(request.found, request.stored) else 0

    # -- what the engine does --------------------------------------------------------------------------------------

    def skip(self, req_id: str, tokens: int) -> None:
        """Leaves the first ``tokens`` tokens out of the load: the engine has them itself by now."""
        request = self._requests[req_id]
        request.first = min(max(request.first, tokens // self._tokens), request.found)

    def allocated(
        self, req_id: str, tables: Mapping[int, Sequence[int]], external_tokens: int, *, sync: bool | None = None
    ) -> None:
        """Plans the load of ``external_tokens`` offered tokens, 0 = none, into pages of whole block tables. The last
        page is loaded whole, even if the engine takes a part of it.

        ``sync``: whether the engine waits for the load before its next forward pass; None: decided by :meth:`is_async`.
        """
        request = self._requests[req_id]
        first, end = request.first, request.first + -(-external_tokens // self._tokens)
        if request.loading:
            return
        if not first < end <= request.found:
            self._unpin(request)
            return
        request.tables = tables
        keys, pages = {}, {}
        for group, table in tables.items():
            needed = self._needed(group, first, first * self._tokens + external_tokens)
            wanted = [block for block in needed if table[block] != NO_PAGE]
            keys[group] = request.chain.pick(wanted)
            pages[group] = tuple(table[block] for block in wanted)
        self._note("blocks being loaded", end - first)
        waits = not self.is_async(req_id) if sync is None else sync
        number = next(self._numbers)
        on_disk = self.leader.sources(request.chain.span(first, end))["disk"]
        self._prices.begin_load(number, end - first, on_disk, sync=waits)
        self._loads.append(Load(number, req_id, keys, pages, end - first, waits))
        self._tickets[number] = _Ticket(request, req_id, set(self._ranks), pages, first, end - first, sync=waits)
        request.loading.add(number)

    def scheduled(
        self,
        req_id: str,
        computed_tokens: int,
        new_tokens: int,
        tables: Mapping[int, Sequence[int]],
        *,
        chain: KeyChain | None = None,
    ) -> None:
        """Notes that this step computes tokens [computed, computed + new) of the request.

        ``tables``: its whole block tables, read by the next :meth:`step` only, and only if there are blocks to save.
        ``chain``: the keys of a request that had no offer.
        """
        request = self._known(req_id, chain) if chain is not None else self._requests.get(req_id)
        self._prices.plan(computed_tokens, new_tokens)
        if request is not None:
            self._scheduled[req_id] = request
            if not request.complete and computed_tokens >= self._tokens:
                request.state = request.chain.key(computed_tokens // self._tokens - 1)
            request.tables = tables
            request.complete = (computed_tokens + new_tokens) // self._tokens

    def step(self) -> Work:
        """Returns the workers' copies for this step."""
        for req_id, request in list(self._scheduled.items()):
            if not request.loading:
                self._save_what_is_new(req_id, request)
            if request.over is None:
                del self._scheduled[req_id]
        loads, self._loads = tuple(self._loads), []
        saves, self._saves = tuple(self._saves), []
        flush = {group: frozenset(pages) for group, pages in self._flush.items()}
        self._flush.clear()
        return Work(loads, saves, flush, self._prices.begin_step(waits=any(load.sync for load in loads)))

    def computed(self, step: int) -> None:
        """Notes that the engine has the output of a step, which teaches the price of computing."""
        self._prices.end_step(step)
        self.leader.block_s = self._prices.block_s

    def finished(
        self, req_id: str, tables: Mapping[int, Sequence[int]] | None = None, hints: RequestHints | None = None
    ) -> bool:
        """Ends a request. Returns True if its pages must live until :meth:`completed` names it as saved.

        ``tables``: the pages that the engine would keep; None: all pages of the last step. ``hints``: of the request.
        """
        request = self._requests.get(req_id)
        if request is None:
            return False
        request.hints = hints
        self._drop_loads(req_id, request)
        if tables is not None and request.tables:
            request.tables = tables
        request.over = time.monotonic() + self.options.load_timeout
        if not self.leader.answers:
            self._note("not saved: the daemon does not answer", len(self._left(request)))
        self._scheduled[req_id] = request
        if request.saving or request.loading or self._unsaved(request):
            return True
        self._remove(req_id)
        return False

    def preempted(self, req_id: str) -> None:
        """Ends the copies of a request whose pages are taken away: the next :class:`Work` flushes them. The request may
        be offered blocks again."""
        request = self._requests.get(req_id)
        if request is None:
            return
        self._drop_loads(req_id, request)
        self._drop_saves(req_id, request)
        for ticket in [self._tickets[number] for number in request.saving | request.loading]:
            ticket.cancelled = True  # the pages may change before the workers hear of the flush
            for group, pages in ticket.pages.items():
                self._flush[group] |= set(pages) - {NO_PAGE}
        request.loading.clear()
        self._unpin(request)
        request.fetch = None
        request.tables, request.complete, request.saved = {}, 0, None
        request.state = request.answer = None
        self._scheduled.pop(req_id, None)

    def aborted(self, req_id: str) -> None:
        """Ends a request whose pages are taken away."""
        self.preempted(req_id)
        self._requests.pop(req_id, None)

    def forsake(self, req_id: str) -> None:
        """Saves no more blocks of the request."""
        if (request := self._requests.get(req_id)) is not None:
            self._drop_saves(req_id, request)
            request.most = 0

    def reset(self) -> None:
        """Resets the cache in the background, after the engine has dropped its own. Held blocks go last."""
        self.leader.reset()

    def completed(self, outcomes: Iterable[CopyResult]) -> Completed:
        """Applies the workers' outcomes. A ticket is over when every rank has reported."""
        loaded: set[str] = set()
        saved: set[str] = set()
        failed: defaultdict[int, set[int]] = defaultdict(set)
        for outcome in outcomes:
            ticket = self._tickets.get(outcome.ticket)
            if ticket is None:
                continue
            ticket.ranks.discard(outcome.rank)
            for group, pages in outcome.failed.items():
                ticket.failed[group] |= pages
            self._note(f"{outcome.kind} bytes", outcome.nbytes)
            self._note(f"{outcome.kind} microseconds", round(outcome.seconds * 1e6))
            if ticket.ranks:
                continue
            del self._tickets[outcome.ticket]
            request = ticket.request
            request.loading.discard(outcome.ticket)
            request.saving.discard(outcome.ticket)
            if ticket.writing is not None:
                self._written(ticket, ticket.writing)
                continue
            self._prices.end_load(outcome.ticket, outcome.seconds, failed=bool(ticket.failed))
            if ticket.failed and ticket.sync:
                self._distrust()
            if not ticket.cancelled:
                self._loaded(ticket)
                for group, missing in ticket.failed.items():
                    failed[group] |= missing
                if not request.over:
                    loaded.add(ticket.name)
        self._look_at_commits()
        now = time.monotonic()
        for req_id, request in list(self._requests.items()):
            if request.over is None or request.saving or request.loading:
                continue
            unsaved = self._unsaved(request)
            if unsaved and now > request.over:
                self._note("not saved: no slot was reserved in time", len(unsaved))
            if not unsaved or now > request.over:
                saved.add(req_id)
                self._remove(req_id)
        return Completed(
            frozenset(loaded), frozenset(saved), {group: frozenset(each) for group, each in failed.items()}
        )

    def stats(self) -> dict[str, int]:
        return dict(self.leader.complaints.counts)

    def wants_pages(self, ticket: int) -> bool:
        """Returns whether workers still copy pages for a ticket, and the copy will be used."""
        return ticket in self._tickets and not self._tickets[ticket].cancelled

    @property
    def pending(self) -> bool:
        """Whether copies are under way, or saves wait for their commit."""
        return bool(self._tickets or self._committing)

    def close(self) -> None:
        """Logs the counts of the session with the daemon, and ends it."""
        counts = ", ".join(f"{what} {n}" for what, n in sorted(self.stats().items()))
        _log.info("kvtier: cache %s: %s", self.leader.name, counts or "not used")
        self.leader.close()

    def _known(self, req_id: str, chain: KeyChain) -> _PlannedRequest:
        request = self._requests.get(req_id)
        if request is None or request.over:
            request = _PlannedRequest(chain, None if self.options.save_decode else len(chain), prompt=len(chain))
            self._requests[req_id] = request
        return request

    def _remove(self, req_id: str) -> None:
        request = self._requests.pop(req_id)
        if request.hints is not None and (told := request.hints.told(request.chain.span(0, MAX_KEYS))):
            self.leader.commit(Writing({}, hints=told))
        self._scheduled.pop(req_id, None)

    def _why_not(self, request: _PlannedRequest, found: int) -> str:
        """Returns the reason for offering less than the stored prefix: its first ``found`` blocks; empty: no reason."""
        if request.stored <= request.first:
            return "nothing is stored" if self.leader.answers else "the daemon does not answer"
        if request.stored - request.first < self.options.min_blocks:
            return "too few blocks"
        return "to recompute is cheaper" if found < request.stored else ""

    def _worth(self, request: _PlannedRequest) -> int:
        """Returns the end of the part of the stored prefix that is worth a load. If the disk is too slow for the rest,
        tries at times, in the background, whether it still is."""
        chain, first = request.chain, request.first
        on_disk = self.leader.on_disk(chain.span(first, request.stored))
        found = self._prices.worth(on_disk, first * self._tokens)
        if found == len(on_disk):
            return request.stored
        slow = np.flatnonzero(on_disk[found:])[:TRIAL_BLOCKS] + first + found
        if self._prices.trial_is_due(len(slow)):
            self.leader.bring(chain.pick(slow.tolist()), partial(self._prices.tried, len(slow)))
        return self.leader.prefix_length(chain.span(0, first + found))  # every group can serve it

    def _needed(self, group: int, first: int, tokens: int) -> list[int]:
        """Returns the blocks, from ``first`` on, that a prefix of ``tokens`` tokens needs in a group."""
        needed = self.layout.spec.attention(group).needs(-(-tokens // self._tokens))
        window = self.layout.groups[group].window
        start = max(0, tokens - window) // self._tokens if window else 0
        return [*range(first, min(needed.sinks, start)), *range(max(first, start), needed.stop)]

    def _unsaved(self, request: _PlannedRequest) -> range:
        """Returns the blocks that are computed, and neither stored nor being saved."""
        if not self.leader.answers or (request.over and not request.tables):
            return range(0)
        left = self._left(request)
        first = left.start
        while first < left.stop and request.chain.key(first) in self._being_saved:
            first += 1
        return range(first, left.stop)

    def _left(self, request: _PlannedRequest) -> range:
        """Returns the blocks that are computed, and neither stored nor in a save of this request."""
        if request.saved is None:
            request.saved = self.leader.prefix_length(request.chain.packed)
        end = min(request.complete, len(request.chain))
        end = end if request.most is None else min(end, request.most)
        return range(request.saved, max(request.saved, end))

    def _save_what_is_new(self, req_id: str, request: _PlannedRequest) -> None:
        new = self._unsaved(request)
        if not new:
            request.tables = {}
            return
        first = new.start
        end = min(new.stop, first + MAX_KEYS, *(len(table) for table in request.tables.values()))
        blocks, places, end = self._place(request, first, end)
        if end <= first:
            self._note("a save waits: no slot is reserved")
            request.tables = dict(request.tables)
            return
        number = next(self._numbers)
        self._saves.append(Save(number, req_id, places, end - first))
        pages = {group: tuple(page for each in of_group for page in each.pages) for group, of_group in places.items()}
        ticket = self._tickets[number] = _Ticket(request, req_id, set(self._ranks), pages, first, end - first)
        ticket.keys, ticket.writing = split_keys(request.chain.span(first, end)), Writing(blocks)
        self._being_saved.update(ticket.keys)
        request.saving.add(number)
        request.saved = end
        request.tables = dict(request.tables) if end < new.stop else {}
        self._note("blocks being saved", end - first)

    def _place(
        self, request: _PlannedRequest, first: int, end: int
    ) -> tuple[dict[int, list[NewBlock]], dict[int, tuple[Placed, ...]], int]:
        """Takes slots for blocks [first, end), or for fewer if a group has too few. Returns the new end last."""
        wanted = {}
        for group, table in request.tables.items():
            stored = self.leader.stored(request.chain.span(first, end), group)
            wanted[group] = [at for at in range(first, end) if table[at] != NO_PAGE and not stored[at - first]]
        slots = {}
        for group, blocks in wanted.items():
            slots[group] = self.leader.take(group, len(blocks))
            end = min([end, *blocks[len(slots[group]) :]])
        written: dict[int, list[NewBlock]] = {}
        places: dict[int, tuple[Placed, ...]] = {}
        for group, blocks in wanted.items():
            kept = [block for block in blocks if block < end]
            at = slots[group][: len(kept)]
            self.leader.give_back(group, slots[group][len(kept) :])
            if kept:
                written[group] = [self._new_block(request.chain, *each) for each in zip(kept, at, strict=True)]
                places[group] = placed(at, [request.tables[group][block] for block in kept])
        return written, places, end

    def _new_block(self, chain: KeyChain, block: int, slot: Slot) -> NewBlock:
        """Returns the block with its token ids, if routers may have them and the engine tells them."""
        told = chain.token_ids if self.leader.keeps_tokens else None
        tokens = () if told is None else told(block * self._tokens, (block + 1) * self._tokens)
        return NewBlock(chain.key(block), chain.parent(block), array("I", tokens).tobytes(), slot)

    def _loaded(self, ticket: _Ticket) -> None:
        self._unpin(ticket.request)
        if not ticket.failed:
            self._note("blocks loaded", ticket.blocks)
            return
        self._note("loads that failed in part")
        ticket.request.bound, ticket.request.saved = ticket.first, None
        self.leader.doubt()

    def _distrust(self) -> None:
        """Cancels all planned saves: steps have computed on pages that did not arrive. No affected save is over yet,
        since each rank reports its loads first."""
        for ticket in self._tickets.values():
            ticket.cancelled |= ticket.writing is not None
        for request in self._requests.values():
            request.tables, request.complete = {}, 0

    def _written(self, ticket: _Ticket, writing: Writing) -> None:
        """Has a save committed once its pages have been read, without the pages that a rank has not read. Drops a save
        of which nothing is left."""
        self._committing.append((ticket, writing))
        lost = {
            group: {place for place, page in enumerate(pages) if page in ticket.failed.get(group, ())}
            for group, pages in ticket.pages.items()
        }
        gone = sum(map(len, lost.values()))
        if ticket.cancelled or (gone and gone == sum(map(len, ticket.pages.values()))):
            self.leader.drop(writing)
            return
        if gone:
            self.leader.complaints.add("a save came late", f"the engine had taken {gone} of its pages away")
            self._note("pages not saved: the engine had taken them away", gone)
            self.leader.leave_out(writing, lost)
        self.leader.commit(writing)

    def _look_at_commits(self) -> None:
        under_way = []
        for ticket, writing in self._committing:
            if not writing.done.is_set():
                under_way.append((ticket, writing))
                continue
            self._being_saved.difference_update(ticket.keys)
            if writing.incomplete:
                ticket.request.saved = None  # look up the stored blocks, and save the others again
            elif self.layout.states:
                self._follow(ticket, writing)
        self._committing = under_way

    def _follow(self, ticket: _Ticket, writing: Writing) -> None:
        """Forgets the states that a chain no longer needs, now that later ones are stored."""
        request, groups = ticket.request, self.layout.states
        stored = {block.key for group in groups for block in writing.blocks.get(group, ())}
        for blocks, key in [each for each in enumerate(ticket.keys, ticket.first + 1) if each[1] in stored]:
            own = key == request.state  # the engine had this state itself, and kvtier did not
            before = None if own else request.state
            if blocks > request.prompt:
                passed, request.answer = self._states.add_answer(key, before, request.answer), key
            else:
                passed = self._states.add_prompt(key, before, branch=not own and blocks < request.prompt - 1)
                request.state = key
            self._note("states passed", len(passed))
            for each in passed:
                self.leader.forget(each)

    def _drop_loads(self, req_id: str, request: _PlannedRequest) -> None:
        """Drops the request's loads of this step, which no worker knows yet, and its holds."""
        unsent = {each.ticket for each in self._loads if each.request == req_id}
        self._loads = [each for each in self._loads if each.ticket not in unsent]
        for number in unsent:
            del self._tickets[number]
            self._prices.end_load(number)
        request.loading -= unsent
        if request.fetch is not None:
            self._fetches.leave(request.fetch)
        self._unpin(request)

    def _drop_saves(self, req_id: str, request: _PlannedRequest) -> None:
        """Drops the request's saves of this step, which no worker knows yet."""
        unsent = {each.ticket for each in self._saves if each.request == req_id}
        self._saves = [each for each in self._saves if each.ticket not in unsent]
        request.saving -= unsent
        for ticket in [self._tickets.pop(number) for number in unsent]:
            assert ticket.writing is not None
            self._being_saved.difference_update(ticket.keys)
            for group, blocks in ticket.writing.blocks.items():
                self.leader.give_back(group, [block.slot for block in blocks])

    def _unpin(self, request: _PlannedRequest) -> None:
        held, request.pinned = request.pinned, None
        if held is not None:
            self.leader.unpin(held)
