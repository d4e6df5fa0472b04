"""A stand-in for TensorRT-LLM's executor: its order of calls, its pages, and a look at every byte that attention reads.

It hands out pages at random, overwrites a page with NaN the moment it is free, and raises :class:`WrongBytes` where
attention would read anything but what the model wrote for these tokens.
"""

import enum
import pickle
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np

from tests.trtllm.interface import NO_PAGE, Ranks, RequestData, SchedulerOutput
from tests.trtllm.model import VOCABULARY, FlatPool, GroupedPool, Model, prefixes

STUCK_S: Final = 20.0


class WrongBytes(AssertionError):
    """Attention would have read, or somebody has written, what is not the model's."""


class State(enum.Enum):
    WAITING = enum.auto()
    CONTEXT = enum.auto()
    LOADING = enum.auto()
    GENERATING = enum.auto()
    SAVING = enum.auto()
    DONE = enum.auto()


@dataclass(eq=False)
class Request:
    """What a connector may read of it, and what the executor knows."""

    request_id: int
    tokens: list[int]
    prompt: int
    most_new: int
    cache_salt: str | None
    lora_task_id: int | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_positions: list[int] | None = None
    multimodal_lengths: list[int] | None = None
    py_conversation_params: Any = None
    state: State = State.WAITING
    cancelled: bool = False
    added: bool = False
    position: int = 0
    """So many tokens have their keys and values."""
    pages: list[list[int]] = field(default_factory=list)
    """For each group its pages, by block."""
    told_tokens: int = 0
    told_pages: list[int] = field(default_factory=list)

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    @property
    def scope(self) -> tuple[str | None, int | None]:
        return self.cache_salt, self.lora_task_id

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


@dataclass
class Answer:
    """What the executor makes of a connector's offer; by default it takes it whole."""

    short: int = 0
    """So many of its last tokens have no pages."""
    early: int = 0
    """It is asked for before the executor's own cache has so many of the tokens that it has in the end."""
    believed: bool = False
    """The executor counts on what it has cancelled."""
    reset: bool = False
    """The allocation is given up after the first chunk, and the request begins anew."""


class Executor:
    """One engine: V2's manager if ``grouped``, else V1's. ``reuse``: freed blocks may serve later requests."""

    def __init__(
        self,
        model: Model,
        connector: tuple[Callable[[Any], Any], Callable[[Any], Any]],
        llm_args: Any,
        *,
        ranks: Ranks,
        pages: int = 24,
        grouped: bool = False,
        reuse: bool = True,
        chunk: int = 20,
        seed: int = 0,
        drafts: int = 0,
    ) -> None:
        """``drafts``: tokens that a step computes ahead, all of which are rejected. Their pages are given back, and the
        connector hears neither of that nor of the pages that take their place."""
        scheduler, worker = connector
        self._drafts: Final = drafts
        self.model: Final = model
        self.grouped: Final = grouped
        self.reuse: Final = reuse
        self.chunk: Final = chunk
        self.computed = 0
        """Tokens of prompts, by the forward pass."""
        self.answers: dict[int, Answer] = {}
        self.entered: Callable[[Request], object] = lambda request: None
        """Called with a request whose state has changed."""
        self._random = random.Random(seed)
        self._ids = count(seed * 1000 + 1)
        self._threads = [ThreadPoolExecutor(1, initializer=ranks.become, initargs=(r,)) for r in range(ranks.size)]
        self.pools = [(GroupedPool if grouped else FlatPool)(model, rank, pages) for rank in range(ranks.size)]
        self.scheduler = scheduler(llm_args)
        self.workers = self._on_all(lambda rank: worker(llm_args))
        self._on_all(lambda rank: self._register(self.workers[rank], self.pools[rank]))
        self.scheduler.wait_for_initialization()
        self.requests: list[Request] = []
        self._free = [self._random.sample(range(pages), pages) for _ in model.groups]
        self._uses = [[0] * pages for _ in model.groups]
        self._cached: list[OrderedDict[int, int]] = [OrderedDict() for _ in model.groups]
        self._key_of: list[dict[int, int]] = [{} for _ in model.groups]
        self._children: dict[object, dict[int, list[int]]] = {}
        self._unreserved = pages
        self._external: dict[int, int] = {}
        self._new_loading: dict[int, Request] = {}
        self._new_saving: dict[int, Request] = {}
        self._transfers: list[dict[int, Request]] = [{}, {}]  # saving, loading
        self._ended: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in self.pools]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def submit(
        self, tokens: Sequence[int], *, new: int = 4, salt: str | None = None, lora: int | None = None
    ) -> Request:
        request = Request(next(self._ids), list(tokens), len(tokens), new, salt, lora)
        self.requests.append(request)
        return request

    def run(self, until: Callable[[], object] = lambda: False) -> None:
        """Iterations until nothing is left to do, or ``until`` is true."""
        moved = time.monotonic()
        while self.requests and not until():
            if self.step():
                moved = time.monotonic()
            else:
                assert time.monotonic() < moved + STUCK_S, f"stuck: {[(r.request_id, r.state) for r in self.requests]}"

    def step(self) -> bool:
        """One iteration. False: it computed nothing."""
        for request in [each for each in self.requests if each.cancelled]:
            self._cancel(request)
        batch = self._schedule()
        for request in [each for each in batch if not each.added]:
            self._add_sequence(request)
        told = [each for each in batch if each.request_id not in self._new_loading]
        for request in told:
            drafts = self._drafts if request.state is State.GENERATING else 0
            self._grow(request, request.position + self._scheduled(request) + drafts)
        output = SchedulerOutput()
        for request in told:
            new = not request.told_pages
            (output.new_requests if new else output.cached_requests).append(self._data(request))
        self._external = {}
        if batch:
            self._start_batch(output)
        for request in self._new_loading.values():
            self._enter(request, State.LOADING)
        if told:
            self._forward([(each, self._scheduled(each)) for each in told])
        for request in [each for each in told if len(each.output) == each.most_new]:
            self._finish(request)
        self._poll_transfers()
        self._check_free()
        return bool(told)

    def _enter(self, request: Request, state: State) -> None:
        request.state = state
        self.entered(request)

    def _on_all(self, call: Callable[[int], Any]) -> list[Any]:
        """On every rank at once, each in a thread of its own."""
        return [each.result() for each in [thread.submit(call, r) for r, thread in enumerate(self._threads)]]

    def _register(self, worker: Any, pool: Any) -> None:
        if self.grouped:
            worker.register_kv_cache_layout(pool.layout)
        else:
            worker.register_kv_caches(pool.tensor)

    # Scheduling

    def _schedule(self) -> list[Request]:
        """Admits what certainly fits to its end."""
        for request in self.requests:
            if request.state is State.WAITING and self._blocks(request) <= self._unreserved:
                self._unreserved -= self._blocks(request)
                self._enter(request, State.CONTEXT)
        return [each for each in self.requests if each.state in (State.CONTEXT, State.GENERATING)]

    def _blocks(self, request: Request) -> int:
        return -(-(request.prompt + request.most_new + self._drafts) // self.model.tokens_per_block)

    def _scheduled(self, request: Request) -> int:
        return min(self.chunk, len(request.tokens) - request.position)

    def _add_sequence(self, request: Request) -> None:
        request.added = True
        request.pages = [[] for _ in self.model.groups]
        request.told_pages, request.told_tokens = [], 0
        computed = self._match_locally(request)
        answer = self.answers.get(request.request_id, Answer())
        asked = max(0, computed - answer.early)
        matched, asynchronous = self.scheduler.get_num_new_matched_tokens(request, asked)
        assert matched or not asynchronous, "nothing cannot be loaded asynchronously"
        assert 0 <= matched < request.prompt - asked, f"offered {matched} of {request.prompt} beyond {asked}"
        end = asked + matched
        kept = max(computed, end - answer.short)
        cuts = [(first, last) for first, last in ((asked, min(computed, end)), (kept, end)) if first < last]
        for first, last in self._random.sample(cuts, len(cuts)):
            self.scheduler.cancel_load(request, first, last)
        request.position = max(computed, end if answer.believed else min(kept, end))
        self._external[request.request_id] = request.position - computed
        self._grow(request, request.position + self._scheduled(request) if self.grouped else request.prompt)
        self._by_group("update_state_after_alloc", request)
        if asynchronous:
            self._new_loading[request.request_id] = request

    def _by_group(self, verb: str, request: Request) -> Any:
        pages = [list(each) for each in request.pages]
        if self.grouped:
            return getattr(self.scheduler, f"{verb}_by_layer_group")(request, pages)
        return getattr(self.scheduler, verb)(request, pages[0])

    def _data(self, request: Request) -> RequestData:
        request.told_pages = request.told_pages or [0] * len(request.pages)
        new_pages = [pages[told:] for pages, told in zip(request.pages, request.told_pages, strict=True)]
        data = RequestData(
            request_id=request.request_id,
            new_tokens=request.tokens[request.told_tokens :],
            new_block_ids=new_pages[0] if len(new_pages) == 1 else [],
            computed_position=request.position - self._external.get(request.request_id, 0),
            num_scheduled_tokens=self._scheduled(request),
            cache_salt=request.cache_salt,
            new_block_ids_by_layer_group=new_pages if self.grouped else [],
        )
        request.told_tokens = len(request.tokens)
        request.told_pages = [len(pages) for pages in request.pages]
        return data

    def _start_batch(self, output: SchedulerOutput) -> None:
        meta = pickle.dumps(self.scheduler.build_connector_meta(output))
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(meta))  # noqa: S301 - our own
        self._on_all(lambda rank: self.workers[rank].start_load_kv(None))

    # Computing

    def _forward(self, batch: Sequence[tuple[Request, int]]) -> None:
        numbers = [prefixes(each.scope, each.tokens) for each, _ in batch]
        for group, (window, layers) in enumerate(self.model.groups):
            for layer in layers:
                self._on_all(lambda rank: self.workers[rank].wait_for_layer_load(layer, None))  # noqa: B023 - waited for
                for (request, tokens), number in zip(batch, numbers, strict=True):
                    self._attend(request, tokens, number, group, window, layer)
                self._on_all(lambda rank: self.workers[rank].save_kv_layer(layer, None))  # noqa: B023 - waited for
        self._on_all(lambda rank: self.workers[rank].wait_for_save(None))
        for (request, tokens), number in zip(batch, numbers, strict=True):
            if request.state is State.CONTEXT:
                self.computed += tokens
            request.position += tokens
            self._reject_drafts(request)
            self._keep(request, number)
            if request.position == len(request.tokens):
                request.tokens.append(int(number[-1] % np.uint64(VOCABULARY)))
                self._enter(request, State.GENERATING)
            elif self.answers.get(request.request_id, Answer()).reset:
                del self.answers[request.request_id]
                self._reset(request)

    def _reject_drafts(self, request: Request) -> None:
        blocks = -(-max(request.position, request.prompt) // self.model.tokens_per_block)
        for group, pages in enumerate(request.pages if self._drafts else ()):
            for page in reversed(pages[blocks:]):
                self._give_back(group, page)
            del pages[blocks:]

    def _attend(self, request: Request, tokens: int, number: Any, group: int, window: int, layer: int) -> None:
        start, end = request.position, request.position + tokens
        first = max(0, start - window + 1) if window else 0
        pages = request.pages[group]
        assert NO_PAGE not in pages[first // self.model.tokens_per_block :]
        for pool in self.pools:
            pool.write(layer, pages, start, number[start:end])
            for role in self.model.roles:
                there = pool.read(layer, role, pages, first, end)
                right = pool.model.values(number[first:end], layer, role, pool.rank)
                if not np.array_equal(there, right):
                    wrong = first + int(np.flatnonzero((there != right).any(axis=1))[0])
                    raise WrongBytes(f"request {request.request_id}, layer {layer}, {role}, token {wrong} of {start}")

    # Pages

    def _match_locally(self, request: Request) -> int:
        """Takes what the executor's own cache has: full blocks, and a copy of the tokens of one that begins alike."""
        size = self.model.tokens_per_block
        number = prefixes(request.scope, request.tokens)
        keys = [int(number[end - 1]) for end in range(size, request.prompt, size)]
        blocks = next(n for n in range(len(keys), -1, -1) if self._has(keys, n))
        for group, (window, _) in enumerate(self.model.groups):
            first = self.model.first_block(window, blocks * size)
            taken = [self._cached[group][key] for key in keys[first:blocks]]
            for page in taken:
                self._uses[group][page] += 1
            request.pages[group] = [NO_PAGE] * first + taken
        if not self.reuse or self.grouped:
            return blocks * size
        return blocks * size + self._copy_begun(request, keys[blocks - 1] if blocks else request.scope, blocks * size)

    def _copy_begun(self, request: Request, parent: object, start: int) -> int:
        """Copies what a cached block has of the tokens from ``start`` on into a page of the request's own."""
        (page,), wanted = [self._take(0)], request.tokens[start : request.prompt - 1]
        request.pages[0].append(page)
        best = 0
        for key, tokens in self._children.get(parent, {}).items():
            same = next((at for at, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]), None)
            same = min(len(tokens), len(wanted)) if same is None else same
            if same > best and key in self._cached[0]:
                best = same
                for buffer in (each for pool in self.pools for each in pool.buffers.values()):
                    buffer[page, :same] = buffer[self._cached[0][key], :same]
        return best

    def _has(self, keys: Sequence[int], blocks: int) -> bool:
        return all(
            key in self._cached[group]
            for group, (window, _) in enumerate(self.model.groups)
            for key in keys[self.model.first_block(window, blocks * self.model.tokens_per_block) : blocks]
        )

    def _grow(self, request: Request, tokens: int) -> None:
        for group, (window, _) in enumerate(self.model.groups):
            first = self.model.first_block(window, request.position)
            pages = request.pages[group]
            for block in range(len(pages), -(-tokens // self.model.tokens_per_block)):
                pages.append(NO_PAGE if block < first else self._take(group))

    def _take(self, group: int) -> int:
        if not self._free[group]:
            key = next(key for key, page in self._cached[group].items() if not self._uses[group][page])
            page = self._cached[group].pop(key)
            del self._key_of[group][page]
            self._discard(group, page)
        page = self._free[group].pop(self._random.randrange(len(self._free[group])))
        self._uses[group][page] = 1
        return page

    def _keep(self, request: Request, number: Any) -> None:
        """Full blocks are found by later requests; blocks behind the window are given back."""
        size = self.model.tokens_per_block
        for group, (window, _) in enumerate(self.model.groups):
            pages = request.pages[group]
            for block in range(request.position // size):
                key, page = int(number[(block + 1) * size - 1]), pages[block]
                if (
                    self.reuse
                    and page != NO_PAGE
                    and page not in self._key_of[group]
                    and key not in self._cached[group]
                ):
                    self._cached[group][key] = page
                    self._key_of[group][page] = key
                    parent = int(number[block * size - 1]) if block else request.scope
                    self._children.setdefault(parent, {})[key] = request.tokens[block * size : (block + 1) * size]
            for block in range(self.model.first_block(window, request.position)):
                if pages[block] != NO_PAGE:
                    self._give_back(group, pages[block])
                    pages[block] = NO_PAGE

    def _give_back(self, group: int, page: int) -> None:
        self._uses[group][page] -= 1
        if self._uses[group][page] == 0 and page not in self._key_of[group]:
            self._discard(group, page)

    def _discard(self, group: int, page: int) -> None:
        _, layers = self.model.groups[group]
        for pool in self.pools:
            pool.poison(layers, page)
        self._free[group].append(page)

    def _check_free(self) -> None:
        for pool in self.pools:
            for (_, layers), free in zip(self.model.groups, self._free, strict=True):
                if not pool.poisoned(layers, free):
                    raise WrongBytes("somebody wrote to a page that is free")

    # Endings

    def _cancel(self, request: Request) -> None:
        if request.state is State.WAITING:
            self.requests.remove(request)
            self._enter(request, State.DONE)
        elif request.state in (State.CONTEXT, State.GENERATING):
            self._finish(request)

    def _finish(self, request: Request) -> None:
        if self._by_group("request_finished", request):
            self._new_saving[request.request_id] = request
            self._enter(request, State.SAVING)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._give_all_back(request)
        self.requests.remove(request)
        self._enter(request, State.DONE)

    def _give_all_back(self, request: Request) -> None:
        for group, pages in enumerate(request.pages):
            for page in reversed(pages):
                if page != NO_PAGE:
                    self._give_back(group, page)
        self._unreserved += self._blocks(request)

    def _reset(self, request: Request) -> None:
        """V2 takes the pages of a request, which runs again from its start."""
        self.scheduler.request_reset(request)
        self._give_all_back(request)
        request.added, request.position = False, 0
        self._enter(request, State.WAITING)

    def _poll_transfers(self) -> None:
        """What all ranks have named is over: saved requests go, loaded ones are computed from the next step on."""
        new = sorted(self._new_saving), sorted(self._new_loading)
        self._transfers[0].update(self._new_saving)
        self._transfers[1].update(self._new_loading)
        self._new_saving, self._new_loading = {}, {}
        answers = self._on_all(lambda rank: self.workers[rank].get_finished(*new))
        for told, answer in zip(self._ended, answers, strict=True):
            for kind in (0, 1):
                assert not told[kind].intersection(answer[kind]), "named twice"
                assert self._transfers[kind].keys() >= set(answer[kind]), "named before the worker was told of it"
                told[kind].update(answer[kind])
        saved, loaded = (set.intersection(*(told[kind] for told in self._ended)) for kind in (0, 1))
        for told in self._ended:
            told[0].difference_update(saved)
            told[1].difference_update(loaded)
        for each in saved:
            self._release(self._transfers[0].pop(each))
        for each in loaded:
            self._enter(self._transfers[1].pop(each), State.CONTEXT)
