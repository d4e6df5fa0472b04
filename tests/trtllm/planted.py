"""Connectors that keep blocks in a dictionary: two that are right, and for each known fault one that has it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.trtllm.interface import NO_PAGE, KvCacheConnectorScheduler, KvCacheConnectorWorker, Ranks, RequestData
from tests.trtllm.model import Model

DELAY: Final = 4
"""Polls until the copies of an asynchronous connector are made."""


@dataclass
class Shelf:
    """``llm_args`` of these connectors: how they work, and what outlives an engine."""

    model: Model
    ranks: Ranks
    asynchronous: bool = False
    blocks: dict[tuple[int, int, bytes], list[NDArray[np.uint8]]] = field(default_factory=dict)
    """By rank, group and key: the block's bytes, a piece a region."""
    resets: Counter[int] = field(default_factory=Counter)
    """How often each request lost its pages."""


class Copy(NamedTuple):
    request_id: int
    group: int
    key: bytes
    page: int
    resets: int
    """Of the request before it was planned."""


class Meta(NamedTuple):
    loads: list[Copy]
    saves: list[Copy]


@dataclass
class Plan:
    """Of one request."""

    salt: str | None
    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    load: range = range(0)
    external: int = 0
    saved: int = 0


class Scheduler(KvCacheConnectorScheduler):
    def __init__(self, llm_args: Shelf) -> None:
        super().__init__(llm_args)
        self.shelf: Final = llm_args
        self.size: Final = llm_args.model.tokens_per_block
        self.plans: dict[int, Plan] = {}
        self.loads: list[Copy] = []

    def scope(self, plan: Plan) -> object:
        return plan.salt

    def keys(self, plan: Plan, tokens: list[int]) -> list[bytes]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [hashlib.sha256(repr((self.scope(plan), tokens[:end])).encode()).digest() for end in ends]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        plan = self.plans[request.request_id] = Plan(request.cache_salt)
        keys = self.keys(plan, request.get_tokens(0)[:-1])
        first = num_computed_tokens // self.size
        blocks = next(blocks for blocks in range(len(keys), -1, -1) if self._stored(keys[:blocks]))
        if blocks <= first:
            return 0, False
        plan.load = range(first, blocks)
        plan.external = blocks * self.size - num_computed_tokens
        return plan.external, self.shelf.asynchronous

    def _stored(self, keys: list[bytes]) -> bool:
        model = self.shelf.model
        return all(
            (rank, group, key) in self.shelf.blocks
            for rank in range(self.shelf.ranks.size)
            for group, (window, _) in enumerate(model.groups)
            for key in keys[model.first_block(window, len(keys) * self.size) :]
        )

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(self, request: Any, ids: list[list[int]]) -> None:
        plan = self.plans[request.request_id]
        keys = self.keys(plan, request.get_tokens(0))
        self.loads += [
            Copy(request.request_id, group, keys[block], pages[block], self.shelf.resets[request.request_id])
            for group, pages in enumerate(ids)
            for block in plan.load
            if pages[block] != NO_PAGE
        ]
        if self.shelf.asynchronous:
            plan.external = 0

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        plan = self.plans[request.request_id]
        plan.load = range(plan.load.start, start // self.size)
        plan.external -= end - start

    def request_reset(self, request: Any) -> None:
        del self.plans[request.request_id]
        self.shelf.resets[request.request_id] += 1

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        meta = Meta(self.loads, [])
        self.loads = []
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            meta.saves.extend(self._saves(self.plans[data.request_id], data))
        return meta

    def _saves(self, plan: Plan, data: RequestData) -> Iterable[Copy]:
        plan.tokens += data.new_tokens
        new_pages = data.new_block_ids_by_layer_group or [data.new_block_ids]
        plan.pages = plan.pages or [[] for _ in new_pages]
        for pages, new in zip(plan.pages, new_pages, strict=True):
            pages += new
        computed = data.computed_position + plan.external
        plan.saved = max(plan.saved, computed // self.size)
        plan.external = 0
        keys = self.keys(plan, plan.tokens)
        for block in range(plan.saved, (computed + data.num_scheduled_tokens) // self.size):
            plan.saved = block + 1
            for group, pages in enumerate(plan.pages):
                resets = self.shelf.resets[data.request_id]
                yield Copy(data.request_id, group, keys[block], pages[block], resets)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        plan = self.plans.pop(request.request_id)
        return self.shelf.asynchronous and plan.saved > 0

    def request_finished_by_layer_group(self, request: Any, ids: list[list[int]]) -> bool:
        return self.request_finished(request, ids[0])


class Worker(KvCacheConnectorWorker):
    def __init__(self, llm_args: Shelf) -> None:
        super().__init__(llm_args)
        self.shelf: Final = llm_args
        self.rank: Final = llm_args.ranks.rank()
        self.regions: list[list[NDArray[np.uint8]]] = []
        self.polls = 0
        self.queue: list[tuple[int, Callable[[Copy], None], Copy]] = []
        """Copies, and the poll at which they are made."""
        self.told: tuple[set[int], set[int]] = (set(), set())

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        self.regions = [[kv_cache_tensor.numpy().reshape(len(kv_cache_tensor), -1).view(np.uint8)]]

    def register_kv_cache_layout(self, layout: Any) -> None:
        self.regions = [[each.as_tensor().numpy() for each in self.parts(group)] for group in layout.groups]

    def parts(self, group: Any) -> Iterable[Any]:
        return (*group.regions, *group.replicated_regions)

    def load(self, copy: Copy) -> None:
        pieces = self.shelf.blocks[self.rank, copy.group, copy.key]
        for region, piece in zip(self.regions[copy.group], pieces, strict=True):
            region[copy.page] = piece

    def save(self, copy: Copy) -> None:
        if copy.resets != self.shelf.resets[copy.request_id]:
            return
        pieces = [region[copy.page].copy() for region in self.regions[copy.group]]
        self.shelf.blocks.setdefault((self.rank, copy.group, copy.key), pieces)

    def do(self, copies: Iterable[Copy], how: Callable[[Copy], None]) -> None:
        """At once, or some polls later."""
        if self.shelf.asynchronous:
            self.queue += [(self.polls + DELAY, how, copy) for copy in copies]
        else:
            for copy in copies:
                how(copy)

    def start_load_kv(self, stream: Any) -> None:
        self.do(self._metadata.loads, self.load)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    def wait_for_save(self, stream: Any) -> None:
        """Pages behind a window may be gone with the next call."""
        groups = self.shelf.model.groups
        for copy in self._metadata.saves:
            if groups[copy.group][0]:
                self.save(copy)
        self.do([copy for copy in self._metadata.saves if not groups[copy.group][0]], self.save)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        self.polls += 1
        due = [each for each in self.queue if each[0] <= self.polls]
        self.queue = [each for each in self.queue if each[0] > self.polls]
        for _, how, copy in due:
            how(copy)
        self.told[0].update(finished_gen_req_ids)
        self.told[1].update(started_loading_req_ids)
        busy = {copy.request_id for _, _, copy in self.queue}
        saved, loaded = (sorted(told - busy) for told in self.told)
        self.told[0].difference_update(saved)
        self.told[1].difference_update(loaded)
        return saved, loaded


class LoadsLate(Worker):
    """Loads while the forward pass runs."""

    def start_load_kv(self, stream: Any) -> None: ...

    def wait_for_save(self, stream: Any) -> None:
        super().start_load_kv(stream)
        super().wait_for_save(stream)


class LoadsElsewhere(Worker):
    """Loads each block to the page of the next."""

    def start_load_kv(self, stream: Any) -> None:
        loads = self._metadata.loads
        self.do([copy._replace(page=loads[at - 1].page) for at, copy in enumerate(loads)], self.load)


class LoadsTooFew(Worker):
    """Leaves the last block out."""

    def start_load_kv(self, stream: Any) -> None:
        self.do(self._metadata.loads[:-1], self.load)


class SaysLoadedTooSoon(Worker):
    """Reports a load when it starts."""

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        saved, _ = super().get_finished(finished_gen_req_ids, [])
        return saved, started_loading_req_ids


class FreesWhatItSaves(Scheduler):
    """Lets pages go that are still to be saved."""

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        super().request_finished(request, cache_block_ids)
        return False


class SavesTooSoon(Worker):
    """Saves before the forward pass has written."""

    def start_load_kv(self, stream: Any) -> None:
        super().start_load_kv(stream)
        for copy in self._metadata.saves:
            self.save(copy)

    def wait_for_save(self, stream: Any) -> None: ...


class LeavesSaltOut(Scheduler):
    """Names blocks by their tokens alone."""

    def scope(self, plan: Plan) -> object:
        return None


class LosesWindow(Worker):
    """Saves pages of a sliding window some iterations later, as if they stayed."""

    def wait_for_save(self, stream: Any) -> None:
        self.do(self._metadata.saves, self.save)


class LeavesReplicatedOut(Worker):
    """Takes the regions of its own rank for all there is."""

    def parts(self, group: Any) -> Iterable[Any]:
        return group.regions


class ForgetsReset(Scheduler):
    """Adds the pages of a request that begins anew to those that it had."""

    def request_reset(self, request: Any) -> None:
        self.plans[-request.request_id] = self.plans[request.request_id]
        super().request_reset(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if before := self.plans.pop(-request.request_id, None):
            self.plans[request.request_id].pages = before.pages
        return matched
