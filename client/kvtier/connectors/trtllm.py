"""TensorRT-LLM's KV connector on kvtier, for the V1 manager's pool and the V2 manager's layer groups.

In the engine's YAML::

    kv_connector_config:
      connector_module: kvtier.connectors.trtllm
      connector_scheduler_class: KvtierScheduler
      connector_worker_class: KvtierWorker

The environment variable ``KVTIER_OPTIONS`` has the :class:`kvtier.engine.EngineOptions` as JSON. The two classes are
made on first use, since their bases load the engine.

A failed load is fatal: the engine has counted the tokens and has no way back. Therefore blocks are pinned before they
are offered. Keys are kvtier's own, over tokens and salt: the engine's keys have 64 bits, or do not exist.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import logging
import os
import select
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeVar

from kvtier.abi.keys import Scope
from kvtier.engine import (
    CopyResult,
    EngineOptions,
    GroupPages,
    Layout,
    Mover,
    PageGroup,
    PlaneLayout,
    Planner,
    TokenChain,
    Weights,
    Work,
    weights_of,
)
from kvtier.engine.mover import LEAST_HOST_BLOCKS
from kvtier.engine.request import RequestHints
from kvtier.engine.work import NO_PAGE
from kvtier.errors import InvalidArgument

OPTIONS: Final = "KVTIER_OPTIONS"
T = TypeVar("T")

_BASES: Final = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
_IDLE_S: Final = 0.001
"""Seconds that the worker of an idle engine waits for the end of a copy, instead of being called again at once."""

_NO_EVICT: Final = "GUARANTEED_NO_EVICT"

_log = logging.getLogger("kvtier.engine")


def __getattr__(name: str) -> type:
    """Makes ``KvtierScheduler`` and ``KvtierWorker``, with the engine's own base classes. Raises :class:`ImportError`
    for an engine without them."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mixin, base = _CLASSES[name]
    try:
        bases = mixin, getattr(importlib.import_module(_BASES), base)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"kvtier needs the connector interface of TensorRT-LLM 1.4: {error}") from error
    made = type(name, bases, {"__doc__": mixin.__doc__})
    globals()[name] = made
    return made


@dataclass(slots=True, frozen=True)
class _Options(EngineOptions):
    """``max_tokens``: budget of a tier in tokens. The smaller of it and the tier's bytes is taken."""

    max_tokens: int | None = None

    def limited(self, layout: Layout) -> EngineOptions:
        """Returns the options with ``max_tokens`` as bytes: blocks of all layers, as if none had a window. Raises
        :class:`InvalidArgument`."""
        if self.max_tokens is None:
            return self
        if self.max_tokens < (least := LEAST_HOST_BLOCKS * layout.tokens):
            raise InvalidArgument("kvtier setting max_tokens", self.max_tokens, f"at least {least}")
        block = sum(layout.spec.record_bytes(group) for group in range(len(layout.groups)))
        most = -(-self.max_tokens // layout.tokens) * block
        host, disk = self.host_bytes, self.disk_bytes
        if host is None and disk is None:
            host = disk = most
        return replace(self, host_bytes=host and min(host, most), disk_bytes=disk and min(disk, most))


@dataclass(slots=True, frozen=True)
class _Step:
    """The leader's message to the workers. ``computes``: a forward pass follows. ``fault``: ends the engine, on all
    ranks at once. ``leaving``: by group, pages that windows leave with this step. The engine takes them back."""

    work: Work
    computes: bool
    leaving: Mapping[int, Sequence[int]]
    fault: str = ""


@dataclass(slots=True)
class _OfferedRequest:
    """``start``, ``end``: the offered tokens that the engine counts on. ``unseen``: the number of these tokens that the
    engine's next position leaves out. ``loaded``: the end of a load whose request has not been scheduled yet.
    ``reached``: the engine's next position while it computes the prompt."""

    chain: TokenChain
    chained: int
    prompt: int
    start: int
    end: int
    unseen: int = 0
    loaded: int | None = None
    reached: int | None = None
    asynchronous: bool = False
    tokens: int = 0
    pages: dict[int, list[int]] = field(default_factory=dict)


class _Scheduler:
    """Plans loads and saves; on the leader, or with attention data parallelism on every rank."""

    supports_attention_dp: ClassVar = True
    here: ClassVar[_Scheduler | None] = None
    """The scheduler of this process. The engine makes it, but does not tell it the worker's memory."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        self._planner: Planner | None = None
        self._requests: dict[int, _OfferedRequest] = {}
        self._allocated: dict[int, Mapping[int, Sequence[int]]] = {}
        self._parked: set[int] = set()
        self._over: tuple[set[int], set[int]] = set(), set()
        drafts = getattr(llm_args, "speculative_config", None)
        self._drafts = drafts is not None
        # A draft layer's keys and values depend on later tokens, too: one, or one a layer.
        self._ahead = int(getattr(drafts, "num_nextn_predict_layers", None) or 1) if self._drafts else 0
        _Scheduler.here = self

    def open(self, layout: Layout, options: EngineOptions) -> bool:
        """Opens the cache for the leader's worker, before the first request. Returns whether the cache is open."""
        self._planner = Planner.open(layout, options)
        atexit.register(self.close)
        return self._planner.leader.answers

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None
            atexit.unregister(self.close)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        scope = _scope(request)
        if self._planner is None or scope is None:
            return 0, False
        name, size, tokens = str(request.request_id), self._planner.layout.tokens, request.get_tokens(0)
        # A block that the engine has in part is loaded as a whole: the part is the request's own copy.
        first = num_computed_tokens - num_computed_tokens % size
        if self._ahead:
            scope = replace(scope, salt=repr((scope.salt, *tokens[: self._ahead])))
        chain = TokenChain(size, scope)
        chain.extend(tokens[self._ahead :])
        # The engine asks once: blocks of a remote store are fetched for the next request.
        offered = self._planner.offer(name, chain, first, total_tokens=len(tokens), waits=False) or 0
        end = max(num_computed_tokens, first + offered)
        state = _OfferedRequest(chain, len(tokens), len(tokens), num_computed_tokens, end, end - num_computed_tokens)
        self._requests[request.request_id] = state
        if not state.unseen:
            return 0, False
        state.asynchronous = self._planner.is_async(name)
        return state.unseen, state.asynchronous

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Leaves tokens ``[start, end)`` out of an offer, and the tokens behind a hole. A block of which the engine
        counts on a part is loaded as a whole."""
        state = self._requests.get(request.request_id)
        if state is None or self._planner is None or not state.unseen or start >= state.end or end <= state.start:
            return
        if start <= state.start:
            state.start = min(end, state.end)
            self._planner.skip(str(request.request_id), state.start)
        else:
            state.end = start
        state.unseen = state.end - state.start
        if not state.unseen:
            self._planner.allocated(str(request.request_id), {}, 0)

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(self, request: Any, ids: Sequence[Sequence[int]]) -> None:
        if request.request_id in self._requests:
            self._allocated[request.request_id] = dict(enumerate(ids))

    def build_connector_meta(self, scheduler_output: Any) -> _Step | None:
        if (planner := self._planner) is None:
            return None
        for number, pages in self._allocated.items():
            if (state := self._requests.get(number)) is None:
                continue
            if taken := state.unseen:
                first = state.start - state.start % planner.layout.tokens
                planner.allocated(str(number), pages, state.end - first, sync=not state.asynchronous)
                state.loaded = state.end
            if state.asynchronous:  # the engine waits for the end of the load, even if it took no token of it
                state.unseen = 0
                (self._parked if taken else self._over[1]).add(number)
        self._allocated = {}
        leaving: defaultdict[int, list[int]] = defaultdict(list)
        fault = ""
        scheduled = (*scheduler_output.new_requests, *scheduler_output.cached_requests)
        for data in scheduled:
            if (state := self._requests.get(data.request_id)) is not None:
                fault = fault or _unbrought(state, data.computed_position)
                self._schedule(planner, state, data, leaving)
        return _Step(planner.step(), bool(scheduled), dict(leaving), fault)

    def _schedule(
        self, planner: Planner, state: _OfferedRequest, data: Any, leaving: defaultdict[int, list[int]]
    ) -> None:
        """Notes a scheduled request. ``data`` has the tokens and pages that are new since its last step."""
        layout = planner.layout
        state.tokens += len(data.new_tokens)
        if (new := state.tokens - state.chained) > 0 and not self._drafts:
            state.chain.extend(data.new_tokens[-new:])
            state.chained = state.tokens
        computed, count = data.computed_position + state.unseen, data.num_scheduled_tokens
        state.unseen, state.loaded = 0, None
        state.reached = computed + count if computed + count < state.prompt else None
        for group, ids in enumerate(data.new_block_ids_by_layer_group or [data.new_block_ids]):
            table = state.pages.setdefault(group, [])
            table.extend(ids)
            if window := layout.groups[group].window:
                gone = max(0, computed - window + 1) // layout.tokens
                table[:gone] = [NO_PAGE] * gone
                stays = max(0, computed + count - window + 1) // layout.tokens
                leaving[group] += [page for page in table[gone:stays] if page != NO_PAGE]
        if self._drafts:  # the engine takes back pages of drafts without telling
            count = min(count, max(0, state.prompt - computed))
        if count:
            planner.scheduled(str(data.request_id), computed, count, state.pages)

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        return self.request_finished_by_layer_group(request, [cache_block_ids])

    def request_finished_by_layer_group(self, request: Any, ids: Sequence[Sequence[int]]) -> bool:
        state, name = self._requests.pop(request.request_id, None), str(request.request_id)
        self._allocated.pop(request.request_id, None)
        if self._planner is None:
            return False
        if self._drafts and state is not None:
            tokens = request.get_tokens(0)
            state.chain.extend(tokens[state.chained :])
            computed = len(tokens) - 1  # the last token has no keys and values yet
            if computed >= state.prompt:
                self._planner.scheduled(name, computed, 0, dict(enumerate(ids)))
        conversation = getattr(getattr(request, "py_conversation_params", None), "conversation_id", None)
        return self._planner.finished(name, dict(enumerate(ids)), RequestHints.of(None, session=conversation))

    def request_reset(self, request: Any) -> None:
        """Notes that the request has lost its pages and runs again from its start."""
        self._allocated.pop(request.request_id, None)
        if self._requests.pop(request.request_id, None) is not None and self._planner is not None:
            self._planner.aborted(str(request.request_id))

    def ended(self, outcomes: Sequence[CopyResult]) -> tuple[set[int], set[int]]:
        """Returns requests that all ranks have saved, and requests that all ranks have loaded. The caller removes each
        request that it reports to the engine."""
        if self._planner is not None:
            completed = self._planner.completed(outcomes)
            loaded = self._parked & set(map(int, completed.loaded))
            self._parked -= loaded
            self._over[0].update(map(int, completed.saved))
            self._over[1].update(loaded)
        return self._over


class _Worker:
    """Copies between the engine's pages and kvtier; on every rank. With attention data parallelism every rank has whole
    pages and requests of its own: it is the only rank of its layout, and all ranks share one cache."""

    supports_attention_dp: ClassVar = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        ranks = importlib.import_module("tensorrt_llm._utils")
        self._args = llm_args
        self._options, self._wrong = _options()
        self._allgather = ranks.mpi_allgather
        alone = bool(getattr(llm_args, "enable_attention_dp", False))
        self._rank: int = 0 if alone else ranks.mpi_rank()
        self._ranks: int = 1 if alone else ranks.mpi_world_size()
        self._leader: _Scheduler | None = None
        self._mover: Mover | None = None
        self._step: _Step | None = None
        self._leaving: Mapping[int, Sequence[int]] = {}
        self._computed = False
        self._awaited: tuple[set[int], set[int]] = set(), set()

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """V1: ``[blocks, layers, 2, heads * tokens * size]``; a block is contiguous."""
        if self._refuses(self._wrong or _v1_fault(self._args) or _fault(self._args)):
            return
        pages = GroupPages(0, {"all": kv_cache_tensor})
        plane = PlaneLayout("all", kv_cache_tensor[0].nbytes, dtype=str(kv_cache_tensor.dtype))
        identity = {"block": str(tuple(kv_cache_tensor.shape[1:]))}
        self._open(self._args.kv_cache_config.tokens_per_block, (PageGroup((plane,)),), [pages], identity)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """V2: one plane per region; each group has its own page numbers."""
        if self._refuses(self._wrong or _fault(self._args)):
            return
        groups, pages = [], []
        for number, group in enumerate(layout.groups):
            planes, tensors = [], {}
            replicated = getattr(group, "replicated_regions", ())  # an early V2 has none
            for region in (*replicated, *group.regions):
                first = region.buffers[0]
                name = f"{first.layer_id}.{first.role}+{len(region.buffers)}"
                tensors[name] = region.as_tensor()
                planes.append(PlaneLayout(name, region.size, region in replicated, str(tensors[name].dtype)))
            groups.append(PageGroup(tuple(planes), window=group.window_size or 0))
            pages.append(GroupPages(number, tensors))
        identity = {"dtype": str(self._args.kv_cache_config.dtype)}
        self._open(layout.tokens_per_block, tuple(groups), pages, identity)

    def _refuses(self, fault: InvalidArgument | None) -> bool:
        """Returns whether a fault keeps kvtier out of the engine. Raises the fault if an error ends the engine."""
        if fault is not None and self._options.on_error == "fail":
            raise fault
        if fault is not None and self._rank == 0:
            _log.warning("the engine runs without kvtier: %s", fault)
        return fault is not None

    def _open(
        self, tokens: int, groups: tuple[PageGroup, ...], pages: Sequence[GroupPages], identity: dict[str, str]
    ) -> None:
        engine = f"tensorrt-llm {importlib.import_module('tensorrt_llm').__version__}"
        drafts = getattr(self._args, "speculative_config", None)
        settings = repr([getattr(self._args, name, None) for name in ("dtype", "quant_config")])
        settings += f" {type(drafts).__name__} {getattr(drafts, 'speculative_model_dir', None)}"
        weights = self._weights()
        digest = hashlib.sha256(settings.encode()).hexdigest()
        identity |= {"engine": engine, "weights": weights.digest, "settings": digest}
        layout = Layout(weights.name, tokens, groups, self._ranks, identity, weights.told)
        try:
            options = self._options.limited(layout)
            self._mover = Mover(layout, options, pages, rank=self._rank)
        except InvalidArgument as error:
            self._refuses(error)
            return
        atexit.register(self.close)
        made = False
        if self._rank == 0 and _Scheduler.here is not None:
            self._leader = _Scheduler.here
            made = self._leader.open(layout, options)
        if any(self._gathered(made)):
            # If the first load had to ask the daemon for its memory, it could fail, though its blocks are pinned.
            self._mover.open()

    def _weights(self) -> Weights:
        """Returns the weights. The first rank looks at them for all ranks, which may be on other hosts."""
        model, version, found = str(self._args.model), self._options.weights_version, None
        if self._rank == 0 or self._ranks == 1:
            found = weights_of(model, getattr(self._args, "revision", None), version=version)
            found.log(_log)
        return next(each for each in self._gathered(found) if each is not None)

    def _gathered(self, mine: T) -> Sequence[T]:
        return self._allgather(mine) if self._ranks > 1 else [mine]

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()
            self._mover = None
            atexit.unregister(self.close)

    def bind_connector_meta(self, metadata: _Step | None) -> None:
        self._step = metadata

    def start_load_kv(self, stream: Any) -> None:
        """Begins the copies of a plan, once: the engine may call again without a new plan. Waits for synchronous loads,
        since no layer can wait in a CUDA graph."""
        step, self._step = self._step, None
        if self._mover is None or step is None:
            return
        if step.fault:
            raise RuntimeError(step.fault)
        self._leaving = step.leaving
        self._mover.start(step.work, stream=stream)
        self._mover.wait_loads()
        if any(load.sync for load in step.work.loads):  # get_finished reports the others
            for failed in self._gathered(self._mover.failed_pages()):
                _require_loaded(failed)
        if not step.computes:  # every request waits for a load, so the engine does not call wait_for_save
            self._mover.save(stream=stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: :meth:`start_load_kv` has waited for all layers."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: a block is saved with all its layers, after the last layer."""

    def wait_for_save(self, stream: Any) -> None:
        """Begins the saves. Waits only for saves of pages that another request may get with the next step."""
        self._computed = True
        if self._mover is not None:
            self._mover.save(stream=stream)
            leaving, self._leaving = self._leaving, {}
            if leaving:
                self._mover.flush(leaving, patience=self._options.pin_wait)

    def get_finished(
        self, finished_gen_req_ids: Sequence[int], started_loading_req_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Returns the requests that are saved, and the requests that are loaded. The leader names a request when all
        ranks are done with it. The engine waits for all ranks to name it, so other ranks name each request at once."""
        if self._mover is None:
            return list(finished_gen_req_ids), list(started_loading_req_ids)
        if self._leader is not None and any(self._awaited) and not self._computed:
            select.select([self._mover], [], [], _IDLE_S)
        self._computed = False
        outcomes = [each for rank in self._gathered(self._mover.poll()) for each in rank]
        _require_loaded({g: p for each in outcomes if each.kind == "load" for g, p in each.failed.items()})
        if self._leader is None:
            return list(finished_gen_req_ids), list(started_loading_req_ids)
        named: list[list[int]] = []
        told = finished_gen_req_ids, started_loading_req_ids
        for awaited, new, over in zip(self._awaited, told, self._leader.ended(outcomes), strict=True):
            awaited.update(new)
            named.append(sorted(awaited & over))
            awaited.difference_update(named[-1])
            over.difference_update(named[-1])
        saved, loaded = named
        return saved, loaded


_CLASSES: Final[Mapping[str, tuple[type, str]]] = {
    "KvtierScheduler": (_Scheduler, "KvCacheConnectorScheduler"),
    "KvtierWorker": (_Worker, "KvCacheConnectorWorker"),
}


def _fault(args: Any) -> InvalidArgument | None:
    """Returns the first setting with which the engine asks no connector, or moves pages that kvtier copies."""
    config = args.kv_cache_config
    if not (reuse := getattr(config, "enable_block_reuse", True)):
        return InvalidArgument("kv_cache_config.enable_block_reuse", reuse, "true, or the engine asks no connector")
    for name in ("host_cache_size", "disk_cache_size"):
        if size := getattr(config, name, None):
            return InvalidArgument(f"kv_cache_config.{name}", size, "0, because kvtier has the tiers beyond the GPU")
    for name in ("pipeline_parallel_size", "context_parallel_size", "max_beam_width"):
        if (size := getattr(args, name, None) or 1) > 1:
            return InvalidArgument(name, size, "1")
    return None


def _v1_fault(args: Any) -> InvalidArgument | None:
    """Like :func:`_fault`, for V1 alone."""
    if window := args.kv_cache_config.max_attention_window:
        # V1 does not say which pages a window has left.
        limit = "left out, unless use_kv_cache_manager_v2 is true"
        return InvalidArgument("kv_cache_config.max_attention_window", window, limit)
    policy = getattr(getattr(args, "scheduler_config", None), "capacity_scheduler_policy", _NO_EVICT)
    if (name := getattr(policy, "name", policy)) != _NO_EVICT:
        return InvalidArgument("scheduler_config.capacity_scheduler_policy", name, _NO_EVICT)
    return None


def _options() -> tuple[_Options, InvalidArgument | None]:
    """Reads the options from the environment: the engine's configuration has no place for a connector's settings.
    Returns them, and the fault of a wrong one. Raises the fault if an error ends the engine."""
    text, settings = os.environ.get(OPTIONS, "{}"), None
    try:
        with suppress(ValueError):
            settings = json.loads(text)
        if not isinstance(settings, dict):
            raise InvalidArgument(OPTIONS, text, 'a JSON object, such as {"address": "/run/kvtier"}')
        options = _Options.of(settings, pin=True)
        if (most := options.max_tokens) is not None and (type(most) is not int or most < 1):
            raise InvalidArgument("kvtier setting max_tokens", most, "a number of tokens, 1 or more")
    except InvalidArgument as error:
        if isinstance(settings, dict) and settings.get("on_error", "continue") != "continue":
            raise
        return _Options(), error
    return options, None


def _scope(request: Any) -> Scope | None:
    """Returns the scope of a request's keys; None if tokens and salt do not identify its blocks. An adapter's number
    does not identify it: the next engine may give the number to another adapter."""
    if request.lora_task_id is not None or request.multimodal_hashes or request.multimodal_positions:
        return None
    return Scope(salt=request.cache_salt)


def _unbrought(state: _OfferedRequest, position: int) -> str:
    """Returns an error text if the engine counts on tokens that no load brings, else an empty text. Attention would
    read unwritten memory."""
    fits = state.reached is None or position <= state.reached
    if state.loaded is not None:
        fits = position == state.start if state.unseen else position <= state.loaded
    load = f"[{state.start}, {state.end})"
    return "" if fits else f"kvtier: the engine counts on tokens before {position} that the load of {load} left out"


def _require_loaded(failed: Mapping[int, Any]) -> None:
    """Raises if loads have failed: the engine has counted their tokens as computed, so it must stop."""
    if any(failed.values()):
        pages = sum(map(len, failed.values()))
        raise RuntimeError(f"kvtier: {pages} pinned blocks could not be loaded; the daemon's log says why")
