"""What a KV connector sees of TensorRT-LLM, restated: its base classes, its data, and its collectives over ranks.

The package cannot be installed without a GPU. :func:`standing_in` puts modules of these names in its place.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest
import torch

CONNECTORS: Final = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
UTILITIES: Final = "tensorrt_llm._utils"
NO_PAGE: Final = -1
COLLECTIVE_S: Final = 30.0


@dataclass
class RequestData:
    """A scheduled request; ids and tokens are those that were not told before."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    def request_finished_by_layer_group(self, request: Any, ids: list[list[int]]) -> bool:
        (flat,) = ids
        return self.request_finished(request, flat)

    def update_state_after_alloc_by_layer_group(self, request: Any, ids: list[list[int]]) -> None:
        (flat,) = ids
        self.update_state_after_alloc(request, flat)

    def request_reset(self, request: Any) -> None:
        return

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        return

    def wait_for_initialization(self) -> None:
        return


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        raise NotImplementedError

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class KvCacheBufferRef:
    layer_id: int
    role: str


@dataclass(frozen=True)
class KvCacheRegion:
    """``size`` bytes of each page, at ``base + stride * page``."""

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]

    def as_tensor(self) -> torch.Tensor:
        span = self.stride * (self.num_slots - 1) + self.size
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(self.base))
        return torch.from_numpy(memory).as_strided((self.num_slots, self.size), (self.stride, 1))


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]
    replicated_regions: tuple[KvCacheRegion, ...] = ()


@dataclass(frozen=True)
class KvCacheLayout:
    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    gpu_pool_mapping_bytes: int | None = None


class Ranks:
    """MPI among threads, of which each is one rank; a thread that is none of them is rank 0."""

    def __init__(self, size: int) -> None:
        self.size: Final = size
        self._here = threading.local()
        self._met = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    @property
    def world(self) -> int:
        return self.size

    def become(self, rank: int) -> None:
        self._here.rank = rank

    def rank(self) -> int:
        return getattr(self._here, "rank", 0)

    def allgather(self, value: Any) -> Sequence[Any]:
        if self.size == 1:
            return [value]
        self._given[self.rank()] = value
        self._met.wait(COLLECTIVE_S)
        given = list(self._given)
        self._met.wait(COLLECTIVE_S)
        return given


class Owner(Ranks):
    """A rank of attention data parallelism: it has its own executor and meets no other rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(1)
        self._rank: Final = rank

    @property
    def world(self) -> int:
        return self._rank + 2

    def rank(self) -> int:
        return self._rank

    def allgather(self, value: Any) -> Sequence[Any]:
        raise AssertionError("a collective between ranks that may have no step in common")


@contextmanager
def standing_in(ranks: Ranks) -> Iterator[Ranks]:
    """While it lasts ``import tensorrt_llm`` finds what is here."""
    contents: dict[str, dict[str, Any]] = {
        CONNECTORS: {each.__name__: each for each in (KvCacheConnectorScheduler, KvCacheConnectorWorker)},
        UTILITIES: {"mpi_rank": ranks.rank, "mpi_world_size": lambda: ranks.world, "mpi_allgather": ranks.allgather},
        "tensorrt_llm": {"__version__": "1.4.0rc1"},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in sorted({".".join(name.split(".")[:depth]) for name in contents for depth in range(1, 9)}):
            module = ModuleType(name)
            module.__path__ = []
            vars(module).update(contents.get(name, {}))
            patch.setitem(sys.modules, name, module)
        yield ranks
