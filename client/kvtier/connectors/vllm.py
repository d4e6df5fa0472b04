"""kvtier under vLLM >= 0.32: the connector, its two halves and the messages between them.

``--kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connectors.vllm",
"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'``; the settings of :class:`kvtier.engine.EngineOptions`
go into its ``kv_connector_extra_config``.

vLLM makes one object in the scheduler and one in each worker. The workers know the tensors: they hand the layout to the
scheduler before the first request. In each step the scheduler's plan goes to the workers, and their outcomes come back.
"""

from __future__ import annotations

import hashlib
import os
import select
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvtier.connectors.vllm_events import KvEvents
from kvtier.connectors.vllm_layout import layout_of, require_supported, states_of, tokens_per_block
from kvtier.connectors.vllm_stats import KvtierMetrics, KvtierStats, NewCounts
from kvtier.deadline import StreamObject
from kvtier.engine import Adapters, CopyResult, EngineOptions, KeyChain, Layout, Mover, Planner, Work
from kvtier.engine.client import below
from kvtier.engine.request import RequestHints
from kvtier.engine.work import NO_PAGE, Save
from kvtier.errors import CallerError

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log: Final = below("vllm")
_NAMESPACE_BYTES: Final = 16
_FLUSH_S: Final = 0.05
"""Seconds that a step waits for saves of pages that it overwrites. vLLM soon reuses pages that have left a window."""
_IDLE_S: Final = 0.001
"""Seconds that a step without computation waits for the end of a copy. Otherwise idle steps follow each other and take
the CPU from the copying threads."""
_FREES_S: Final = 0.1
"""Seconds without a freed page after which vLLM preempts requests instead of waiting for pages to be saved."""
_MOST_KEPT: Final = 8
"""Pages of windows that are kept until they are saved are at most one in this many of all pages."""
_NULL_BLOCK: Final = 0
"""vLLM's block for positions outside of a window."""


@dataclass(slots=True)
class Step(KVConnectorMetadata):
    """The scheduler's message to the workers for one step. ``idle``: the step computes nothing.

    ``reused``: pages that are overwritten from this step on. ``saved``: finished requests whose pages are free again;
    vLLM hears of them from its workers only.
    """

    work: Work
    reused: frozenset[int] = frozenset()
    saved: frozenset[str] = frozenset()
    idle: bool = False


@dataclass(slots=True)
class Ended(KVConnectorWorkerMetadata):
    """A step that has ended in the workers, and their outcomes since the step before."""

    step: int
    outcomes: list[CopyResult]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Ended)
        return Ended(max(self.step, other.step), [*self.outcomes, *other.outcomes])


@dataclass(slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    layout: Layout


@dataclass(slots=True)
class _TrackedRequest:
    """The state of a request in the scheduler's half. ``computed``: blocks that the engine itself had at its last
    query.

    ``waits``: vLLM was told that the load is asynchronous; ``loading``: this load is under way. ``running``: the
    request has pages. ``stale``: its pages hold blocks from before a reset. ``adapter``: the digest of its LoRA adapter
    when its first key was made. ``states``: by group, the pages that hold a finished state, by the state's block.
    """

    request: Request
    chain: KeyChain = field(default_factory=KeyChain)
    computed: int = 0
    waits: bool = False
    loading: bool = False
    running: bool = False
    stale: bool = False
    adapter: bytes | None = None
    states: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))


class _Tables(Mapping[int, list[int]]):
    """The block tables of a request by group, copied only if the planner reads them. Valid until the step goes out.

    ``states``: by group of states, the pages to save. vLLM writes the other pages of this group, or has freed them.
    """

    def __init__(
        self,
        groups: int,
        resolve: Callable[[], Sequence[Sequence[int]]],
        states: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
    ) -> None:
        self._groups = groups
        self._resolve = resolve
        self._states = states

    @cached_property
    def _tables(self) -> dict[int, list[int]]:
        tables = {
            group: [NO_PAGE if block == _NULL_BLOCK else block for block in table]
            for group, table in enumerate(self._resolve())
        }
        for group, pages in self._states.items():
            tables[group] = [page if pages.get(at) == page else NO_PAGE for at, page in enumerate(tables[group])]
        return tables

    def __getitem__(self, group: int) -> list[int]:
        return self._tables[group]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._groups))

    def __len__(self) -> int:
        return self._groups


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the prefixes that a vLLM engine computes in kvtier, and loads them again."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = self._kv_transfer_config.kv_connector_extra_config or {}
        self._options: EngineOptions | None = None
        self._groups = len(kv_cache_config.kv_cache_groups)
        self._states = states_of(kv_cache_config)
        # With several groups, or with states, a prefix is loaded whole or not at all.
        self._whole = self._groups > 1 or bool(self._states)
        self._layout: Layout | None = None
        self._mover: Mover | None = None
        self._loading: set[str] = set()
        self._ended = Ended(0, [])
        self._planner: Planner | None = None
        self._requests: dict[str, _TrackedRequest] = {}
        self._reused: set[int] = set()
        self._held: set[str] = set()
        self._saved: set[str] = set()
        self._pool: BlockPool
        self._kept: dict[int, list[KVCacheBlock]] = {}
        """Pages that vLLM may not reuse before they are saved, by the ticket of the save."""
        self._freed = 0.0
        """Monotonic time since which requests are held and none of them was saved."""
        self._namespace = b""
        self._adapters = Adapters(_log)
        self._counts = NewCounts()
        with self._starting(told=role is KVConnectorRole.SCHEDULER):  # the workers have the same settings
            published = vllm_config.kv_events_config
            told = published is not None and published.enable_kv_cache_events
            options = EngineOptions.of(self._settings, events=told)
            require_supported(vllm_config, kv_cache_config)
            # A step planned ahead would compute on pages whose load failed in this step. Of a prefix that is loaded
            # whole, vLLM can take back only requests that wait for their load. A step also moves its states before
            # its synchronous loads begin.
            waits = vllm_config.max_concurrent_batches > 1 or self._whole
            self._options = replace(options, async_blocks=0) if waits else options
            self._tokens = tokens_per_block(kv_cache_config)
            self._hashes_per_block = self._tokens // (kv_cache_config.hash_block_size or self._tokens)
            self._events = KvEvents(self._tokens, kv_cache_config.kv_cache_groups)

    @contextmanager
    def _starting(self, *, told: bool = True) -> Iterator[None]:
        """Logs an invalid setting in one line if ``told``. The engine then runs without kvtier, or ends if the
        settings say so."""
        try:
            yield
        except CallerError as error:
            if self._settings.get("on_error", "continue") != "continue":
                raise
            if told:
                _log.error("this engine runs without kvtier: %s", error)
            self._options = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Asks for the layout with the block outermost, whose pages are contiguous. A backend without it keeps its own
        layout; vLLM's backend for MLA on a CPU claims to have it, and fails."""
        return None if current_platform.is_cpu() else "BLHNC"

    # The workers' half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._options is None:
            return
        with self._starting(told=torch.distributed.get_rank() == 0):
            version = self._options.weights_version
            layout, pages = layout_of(self._vllm_config, self._kv_cache_config, kv_caches, version)
            rank = get_pp_group().rank_in_group * layout.ranks_per_stage + get_tensor_model_parallel_rank()
            self._mover = Mover(layout, self._options, pages, rank=rank)
            self._layout = layout

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Handshake(self._layout) if self._layout is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Step)
        if self._mover is not None and kv_connector_metadata.reused:
            # The groups of an engine share their blocks: a page of one group is memory of all groups.
            pages = dict.fromkeys(range(self._groups), kv_connector_metadata.reused)
            self._mover.flush(pages, patience=_FLUSH_S)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        if self._mover is None:
            return
        self._loading |= {load.request for load in step.work.loads if not load.sync}
        self._mover.start(step.work, stream=_stream())
        self._mover.wait_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # start_load_kv has waited for all layers: vLLM does not call this inside a CUDA graph

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # pages are copied whole, after the forward pass

    def wait_for_save(self) -> None:
        if self._mover is not None:
            self._mover.save(stream=_stream())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        results = KVConnectorTransferResults(finished_sending=set(step.saved))
        if step.idle and self._mover is not None:
            select.select([self._mover], [], [], _IDLE_S)
        self._ended = Ended(step.work.step, self._mover.poll() if self._mover is not None else [])
        for outcome in self._ended.outcomes:
            if outcome.kind == "load" and outcome.request in self._loading:
                self._loading.remove(outcome.request)
                results.finished_recving.add(outcome.request)
                if outcome.failed and self._whole:
                    results.failed_recving.add(outcome.request)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._mover is None or self._whole:
            return set()
        return {page for pages in self._mover.failed_pages().values() for page in pages}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._ended

    # The scheduler's half. Nothing in it waits.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        layouts = [handshake.layout for handshake in metadata.values() if isinstance(handshake, Handshake)]
        if self._options is None or len(layouts) < self._vllm_config.parallel_config.world_size:
            return  # a rank without its pages has logged the reason
        assert all(layout == layouts[0] for layout in layouts), "the ranks of an engine have equal pages"
        with self._starting():
            self._planner = Planner.open(layouts[0], self._options, self._events.note)
            if self._options.events and self._planner.leader.answers:
                self._events.wait()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool

    def has_pending_block_frees(self) -> bool:
        """Whether a request that finds no free page waits for saved pages; else vLLM preempts a request."""
        return bool(self._held) and time.monotonic() - self._freed < _FREES_S

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = _TrackedRequest(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._planner is None:
            return 0, False
        known = self._known(request)
        self._preempt(known)
        if request.skip_reading_prefix_cache:
            return 0, False
        self._extend(known)
        known.computed = num_computed_tokens // self._tokens
        # The last block may be loaded whole: vLLM then computes only the last token, into the loaded page. A state
        # cannot go back by a token.
        total = request.num_tokens + (not self._states)
        offered = self._planner.offer(request.request_id, known.chain, num_computed_tokens, total_tokens=total)
        if offered is not None and self._states and (branch := self._planner.branch(request.request_id)):
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, branch)  # vLLM ends a step there
        if offered:
            offered = min(offered, request.num_tokens - 1 - num_computed_tokens)
        known.waits = bool(offered) and self._planner.is_async(request.request_id)
        return offered, known.waits

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._planner is None or request.skip_reading_prefix_cache:
            return
        known = self._known(request)
        self._planner.allocated(
            request.request_id, _Tables(self._groups, blocks.get_block_ids), num_external_tokens, sync=not known.waits
        )
        known.loading = known.waits and num_external_tokens > 0
        if num_external_tokens:
            self._reuse(blocks.get_block_ids(), known.computed)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self._planner is None:
            return {}
        found = self._planner.sources(request.request_id)
        sources = {CacheHitSource(tier): tokens for tier, tokens in found.items() if tokens}
        if sources:  # vLLM may take fewer tokens of the last block
            sources[max(sources, key=sources.__getitem__)] -= sum(sources.values()) - num_external_tokens
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._planner is None:
            return Step(Work())
        scheduled = scheduler_output.num_scheduled_tokens
        for name in (scheduler_output.preempted_req_ids or set()) - scheduled.keys():
            if name in self._requests:
                self._preempt(self._requests[name])
        for new in scheduler_output.scheduled_new_reqs:
            self._reuse(new.block_ids, new.num_computed_tokens // self._tokens)
            self._compute(new.req_id, new.num_computed_tokens, scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for name, computed, tables in rows:
            # The tables are whole after a preemption; otherwise they have the new blocks only.
            self._reuse(tables or (), computed // self._tokens if name in cached.resumed_req_ids else 0)
            self._compute(name, computed, scheduler_output)
        step = Step(self._planner.step(), frozenset(self._reused), frozenset(self._saved), idle=not scheduled)
        self._keep(step.work.saves)
        self._reused.clear()
        self._saved.clear()
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for name in connector_output.finished_recving or ():
            if name in self._requests:
                self._requests[name].loading = False
        ended = connector_output.kv_connector_worker_meta
        if isinstance(ended, Ended) and self._planner is not None:
            self._planner.computed(ended.step)
            self._complete(ended.outcomes)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        known = self._requests.pop(request.request_id, None)
        if self._planner is None or known is None:
            return False, None
        name = request.request_id
        self._extend(known)
        actions = request.kv_hints.actions if request.kv_hints is not None else ()
        hints = RequestHints.of(request.kv_transfer_params, actions, request.session_id)
        tables = _Tables(self._groups, lambda: block_ids, self._finished_states(known))
        held = self._planner.finished(name, tables, hints)
        if held and not known.loading:  # the pages of a load vLLM itself keeps until the load has ended
            self._freed = self._freed if self._held else time.monotonic()
            self._held.add(name)
            return True, hints.reply
        return False, hints.reply

    def take_events(self) -> Iterable[KVCacheEvent]:
        return list(self._events.take()) if self.has_pending_push_work() else ()

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should make another step: vLLM publishes events in its steps."""
        return self._planner is not None and self._events.waiting

    def reset_cache(self) -> bool | None:
        """Forgets all stored blocks, for example after a change of the weights. This engine's keys change at once,
        whether or not the daemon answers."""
        self._namespace = os.urandom(_NAMESPACE_BYTES)
        self._adapters = Adapters(_log)
        if self._planner is not None:
            self._planner.reset()
        for name, known in self._requests.items():
            if self._planner is not None and known.loading:  # vLLM waits for the end of the load
                self._planner.forsake(name)
            elif self._planner is not None:
                self._planner.aborted(name)
            known.chain, known.stale = KeyChain(), known.running or known.loading
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns the counts of this half since the last call."""
        half = self._planner or self._mover
        return None if half is None else self._counts.of(half.complaints.counts)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvtierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return KvtierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for half in (self._mover, self._planner):
            if half is not None:
                half.close()

    def _complete(self, outcomes: Sequence[CopyResult]) -> None:
        if self._planner is not None:
            saved = self._planner.completed(outcomes).saved & self._held
            self._saved |= saved
            self._held -= saved
            read = [ticket for ticket in self._kept if not self._planner.wants_pages(ticket)]
            for ticket in read:
                self._pool.free_blocks(self._kept.pop(ticket))
            if saved:
                self._freed = time.monotonic()

    def _keep(self, saves: Sequence[Save]) -> None:
        """Keeps pages of windows, the last of a save first, until they are saved: vLLM would soon reuse pages that have
        left their window."""
        assert self._planner is not None
        layout, room = self._planner.layout, len(self._pool.blocks) // _MOST_KEPT - sum(map(len, self._kept.values()))
        for save in saves:
            windows = [g for g in save.places if layout.groups[g].window and g not in self._states]
            kept: list[KVCacheBlock] = []
            for group in windows:
                pages = [page for each in save.places[group] for page in each.pages]
                last = pages[max(0, len(pages) - room // len(windows)) :]
                kept += [self._pool.blocks[page] for page in last]
            if kept:
                self._pool.touch(kept)
                self._kept[save.ticket] = kept
                room -= len(kept)

    def _known(self, request: Request) -> _TrackedRequest:
        return self._requests.setdefault(request.request_id, _TrackedRequest(request))

    def _preempt(self, known: _TrackedRequest) -> None:
        """Notes that a request that ran has lost its pages, maybe in this step."""
        if known.running:
            known.running = known.stale = False
            known.states.clear()
            if self._planner is not None:
                self._planner.preempted(known.request.request_id)

    def _extend(self, known: _TrackedRequest) -> None:
        width = self._hashes_per_block
        new = known.request.block_hashes[(len(known.chain) + 1) * width - 1 :: width]
        if known.stale or not new:
            return
        namespace = self._namespace
        if (lora := known.request.lora_request) is not None:
            # vLLM's hashes have an adapter's name and path, which do not change when the adapter is trained again.
            adapter = self._adapters.digest(lora.lora_path)
            known.adapter = known.adapter or adapter
            if adapter is None or adapter != known.adapter:
                return
            namespace += adapter
        keys = [hashlib.sha256(namespace + key).digest() if namespace else key for key in new]
        known.chain.extend(keys)
        known.chain.token_ids = _token_ids(known.request)
        session = getattr(known.request, "session_id", None)
        if self._options is not None and self._options.events and session is not None:
            self._events.asked(keys, session)

    def _finished_states(self, known: _TrackedRequest) -> Mapping[int, Mapping[int, int]]:
        return {group: known.states[group] for group in self._states}

    def _note_states(self, known: _TrackedRequest, start: int, end: int, state: KVConnectorBlockState) -> None:
        """Notes the pages that hold a state worth saving when this step has computed the tokens before ``end``.
        ``start``: tokens before a state of vLLM's own from which the request goes on, and which kvtier may lack."""
        handed = state.boundary_state_offloads.get(known.request.request_id, [])
        for tokens in [each for each in (start, end) if each and each % self._tokens == 0 and self._states]:
            tables, last = state.resolve_block_ids(known.request.request_id), tokens // self._tokens - 1
            handed = [*handed, *((group, tables[group][last], tokens) for group in self._states)]
        for group, page, tokens in handed:
            if tokens % self._tokens == 0 and (tokens == start or self._is_wanted(known.request, tokens)):
                known.states[group][tokens // self._tokens - 1] = page

    def _is_wanted(self, request: Request, tokens: int) -> bool:
        """Returns whether a later prompt may continue from the state after the first ``tokens`` tokens: the prompt or
        the answer ends there, or chains branch."""
        last = (request.num_prompt_tokens - 1) // self._tokens * self._tokens
        return tokens >= last or bool(tokens == request.shared_prefix_boundary)

    def _reuse(self, tables: Sequence[Sequence[int]], first: int) -> None:
        for table in tables:
            self._reused.update(table[first:])

    def _compute(self, name: str, computed: int, output: SchedulerOutput) -> None:
        """Notes that the forward pass computes tokens of a request."""
        planner, state, known = self._planner, output.kv_connector_block_state, self._requests[name]
        assert planner is not None and state is not None
        self._extend(known)
        start = 0 if known.running else computed
        self._note_states(known, start, computed + output.num_scheduled_tokens[name], state)
        known.running = True
        tables = _Tables(self._groups, lambda: state.resolve_block_ids(name), self._finished_states(known))
        planner.scheduled(name, computed, output.num_scheduled_tokens[name], tables, chain=known.chain)


def _token_ids(request: Request) -> Callable[[int, int], Sequence[int]] | None:
    """Returns the token ids that a router hashes to find the request's blocks; None if it would have to hash more."""
    if request.lora_request or request.cache_salt or request.mm_features or request.prompt_embeds is not None:
        return None
    return lambda first, last: request.all_token_ids[first:last]


def _stream() -> StreamObject | None:
    return torch.cuda.current_stream() if torch.cuda.is_available() else None
