"""A storage backend of SGLang's HiCache: pages of its host pools are blocks of kvtier under SGLang's own keys.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvtier", "module_path": "kvtier.connectors.sglang", "class_name": "KvtierHiCache",
      "interface_v1": 1, "kvtier": {"address": "/run/kvtier"}}'

SGLang's threads for prefetch and backup call the backend, and may wait. The backend stores the pool's own view of a
page, so every layout of the pool works. Engines with different pools get different caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from itertools import product
from typing import Any, Final, Protocol

import sglang
import sglang.srt.runtime_context as runtime
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvtier.abi.spec import STATE, STATE_TOKENS, CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.connectors.store import SETTINGS, Store
from kvtier.engine import EngineOptions, Weights, weights_of
from kvtier.engine.client import below
from kvtier.errors import InvalidArgument, KvtierError
from kvtier.memory.planes import Pages, Planes

_OF_MODEL: Final = ("quantization", "kv_cache_dtype", "quantization_param_path")
_OF_POOL: Final = ("layout", "dtype", "start_layer", "end_layer", "layer_num", "head_num", "storage_format_tag")
_OF_STATES: Final = (
    "num_mamba_layers",
    "conv_state_shapes",
    "temporal_state_shape",
    "temporal_dtype",
    "size_per_token",
)

_log = below("sglang")


class HostPool(Protocol):
    """The part of SGLang's host pools that the backend uses. Sizes count tokens."""

    page_size: int
    size: int

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor: ...
    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None: ...


class _StoredPool:
    """The pages of one pool, and the group of a store that keeps them."""

    def __init__(self, pool: HostPool) -> None:
        """Raises :class:`InvalidArgument` for a pool whose pages SGLang does not hand out."""
        try:
            page = pool.get_data_page(0)
            self._planes: Final = _planes(pool)
        except (AttributeError, NotImplementedError, ValueError) as error:
            limit = f"another, with --hicache-mem-layout for one: its pages cannot be read ({error})"
            raise InvalidArgument("host pool", type(pool).__name__, limit) from error
        self.nbytes: Final = page.nbytes
        self._dtype: Final = page.dtype
        self._pool: Final = pool
        self.store: Store | None = None
        self.group = 0

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys) if self.store is None else self.store.find(self.group, keys)

    def load(self, keys: Sequence[bytes], pages: Sequence[int]) -> list[bool]:
        """Fills pages. ``pages``: the index of each page's first token."""
        if self.store is None:
            return [False] * len(keys)
        if self._planes is not None:
            return self.store.load(self.group, keys, self._in_place(self._planes, pages))
        rows = [torch.empty(self.nbytes, dtype=torch.uint8) for _ in pages]
        loaded = self.store.load(self.group, keys, rows)
        for page, row, found in zip(pages, rows, loaded, strict=True):
            if found:
                self._pool.set_from_flat_data_page(page, row.view(self._dtype))
        return loaded

    def save(self, keys: Sequence[bytes], pages: Sequence[int]) -> list[bool]:
        if self.store is None:
            return [False] * len(keys)
        if self._planes is not None:
            return self.store.save(self.group, keys, self._in_place(self._planes, pages))
        return self.store.save(self.group, keys, [self._pool.get_data_page(page).view(torch.uint8) for page in pages])

    def _in_place(self, planes: Planes, pages: Sequence[int]) -> Pages:
        return planes[[page // self._pool.page_size for page in pages]]


def _planes(pool: HostPool) -> Planes | None:
    """Returns the pool's pages as parts of its own memory; None if the pool gathers a page from several tensors."""
    first, second = (pool.get_data_page(at, flat=False) for at in (0, pool.page_size))
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    step, run, inner = second.storage_offset() - first.storage_offset(), 1, first.dim()
    while inner and (first.shape[inner - 1] == 1 or first.stride(inner - 1) == run):
        inner -= 1
        run *= first.shape[inner]
    outer = zip(first.shape[:inner], first.stride()[:inner], strict=True)
    places = product(*(range(0, size * stride, stride) for size, stride in outer))
    shape = (pool.size // pool.page_size, run)
    return Planes([first.as_strided(shape, (step, 1), first.storage_offset() + sum(place)) for place in places])


class KvtierHiCache(HiCacheStorage):
    """Made by SGLang. ``extra_config["kvtier"]`` has the settings: see ``docs/engines.md``."""

    def __init__(self, storage_config: Any, _: Mapping[str, Any]) -> None:
        """Raises :class:`kvtier.KvtierError` for wrong settings if ``on_error`` is not ``continue``."""
        self._config: Final = storage_config
        self._given: Final[Mapping[str, Any]] = storage_config.extra_config or {}
        self._settings: Final[Any] = self._given.get("kvtier", {})
        self._pools: Final[dict[str, HostPool]] = {}
        self._pages: Final[dict[str, _StoredPool]] = {}
        self._stores: Final[list[Store]] = []
        self._logical = False
        self._attached = False
        self._version: Final = _weight_version()
        self._updated = False

    # -- pools -----------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        self._logical = isinstance(mem_pool_host, LogicalHostPool)
        self._pools[PoolName.KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        self._pools[host_pool_name] = host_pool
        if self._attached:  # the engine adds this pool later
            self._attach([host_pool_name])

    def on_host_pools_registered(self) -> None:
        self._attached = True
        self._attach(list(self._pools))

    def _attach(self, names: Sequence[str]) -> None:
        """Opens a cache for pools that are sharded over ranks, and a cache for pools that are equal on all ranks."""
        try:
            if not self._given.get("interface_v1"):
                limit = "1, so that SGLang hands over pages of its pool"
                raise InvalidArgument("interface_v1", self._given.get("interface_v1", 0), limit)
            if not isinstance(self._settings, Mapping):
                raise InvalidArgument("kvtier", self._settings, "an object of settings")
            options = EngineOptions.of(self._settings, SETTINGS)
            pools = {name: self._pools[name] for name in names}
            found = {name: _StoredPool(pool) for name, pool in pools.items() if not isinstance(pool, LogicalHostPool)}
            self._pages.update(found)
            total = sum(self._weight(name) for name in self._pages)
            for alike in (False, True):
                some = {name: pages for name, pages in found.items() if self._alike(name) == alike}
                if not some:
                    continue
                share = Fraction(sum(map(self._weight, some))) / total
                asks = not alike or self._config.tp_rank == 0
                store = Store(options, self._spec(some, alike), share, weights=self._weights.told, asks=asks)
                self._stores.append(store)
                for group, pages in enumerate(some.values()):
                    pages.store, pages.group = store, group
        except KvtierError as error:
            if isinstance(self._settings, Mapping) and self._settings.get("on_error", "continue") != "continue":
                raise
            if self._config.tp_rank == 0:  # all ranks have the same settings
                _log.error("SGLang runs without kvtier: %s", error)

    def _weight(self, name: str) -> Fraction:
        """Returns the bytes of a pool for each page of tokens."""
        pages = Fraction(self._pools[PoolName.KV].page_size, STATE_TOKENS) if name == PoolName.MAMBA else Fraction(1)
        return self._pages[name].nbytes * pages

    def _alike(self, name: str) -> bool:
        sharded = name == PoolName.MAMBA or isinstance(self._pools[name], MHATokenToKVPoolHost)
        return self._config.is_mla_model and not sharded

    @cached_property
    def _weights(self) -> Weights:
        model, version = runtime.get_model(), self._settings.get("weights_version")
        found = weights_of(str(model.model_path), getattr(model, "revision", None), version=version)
        found.log(_log)
        return found

    def _spec(self, pools: Mapping[str, _StoredPool], alike: bool) -> CacheSpec:
        config, model = self._config, runtime.get_model()
        sizes = [(config.pp_rank, config.pp_size), (config.attn_cp_rank, config.attn_cp_size)]
        rank, ranks = 0, 1
        for own, size in [*sizes, (config.tp_rank, config.tp_size)][: 2 if alike else 3]:
            rank, ranks = rank * size + own, ranks * size
        weights = self._weights
        identity = {"engine": f"sglang {sglang.__version__}", "weights": weights.digest}
        identity |= {name: _text(getattr(model, name, None)) for name in _OF_MODEL}
        for name in pools:
            pool = self._pools[name]
            known = (*_OF_POOL, *(_OF_STATES if name == PoolName.MAMBA else ()))
            described = [f"{each}={_text(getattr(pool, each, None))}" for each in known]
            identity[f"pool {_text(name)}"] = _text(" ".join([type(pool).__name__, *described]))
        groups = tuple(
            WindowGroupSpec(STATE if name == PoolName.MAMBA else 0, (PoolSpec.opaque(pages.nbytes),), flat=True)
            for name, pages in pools.items()
        )
        return CacheSpec(
            _text(weights.name), "uint8", self._pools[PoolName.KV].page_size, rank, ranks, groups, identity
        )

    # -- pages -----------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Returns the number of pages in the longest stored prefix."""
        return _leading(self._find(PoolName.KV, keys))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return [True] * len(keys) if self._logical else self._copied(_StoredPool.load, PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return [True] * len(keys) if self._logical else self._copied(_StoredPool.save, PoolName.KV, keys, host_indices)

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Returns the lengths of prefixes that every pool can restore: with all its pages, or with the last pages."""
        stored = len(keys) if self._logical else self.batch_exists(keys)
        hits = {PoolName.KV: stored} if stored else {}
        ends = set(range(1, stored + 1))
        for transfer in pool_transfers or ():
            there = self._find(transfer.name, keys[:stored])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                own = set(range(1, _leading(there) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                needed = max(1, len(transfer.keys or ()))
                own = {end for end in range(1, stored + 1) if all(there[max(0, end - needed) : end])}
            else:  # pools of BLOCK_GROUPS do not limit the length of a prefix
                continue
            if own:
                hits[transfer.name] = max(own)
            ends &= own
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            each.name: self._copied(_StoredPool.load, each.name, each.keys, each.host_indices) for each in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            each.name: self._copied(_StoredPool.save, each.name, each.keys, each.host_indices) for each in transfers
        }

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        for store in self._stores:
            store.clear()

    def close(self) -> None:
        for store in self._stores:
            store.close()

    # SGLang calls these methods if ``interface_v1`` is not set, which is refused.

    def get(self, key: str, *_: Any, **__: Any) -> None:
        return None

    def batch_get(self, keys: Sequence[str], *_: Any, **__: Any) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, *_: Any, **__: Any) -> bool:
        return False

    def batch_set(self, keys: Sequence[str], *_: Any, **__: Any) -> bool:
        return False

    def _of(self, name: str) -> _StoredPool | None:
        """Returns the pages of a pool; None after an update of the weights. The caches belong to the first weights, and
        SGLang does not say which pages it computed before the update."""
        if not self._updated and _weight_version() != self._version:
            self._updated = True
            _log.warning("SGLang runs without kvtier from now on: its weights have another version")
        return None if self._updated else self._pages.get(name)

    def _find(self, name: str, keys: Sequence[str]) -> list[bool]:
        pages = self._of(name)
        return [False] * len(keys) if pages is None else pages.find(_packed(keys))

    def _copied(
        self,
        copy: Callable[[_StoredPool, Sequence[bytes], Sequence[int]], list[bool]],
        name: str,
        keys: Sequence[str] | None,
        indices: torch.Tensor | None,
    ) -> list[bool]:
        """Returns one result per key; all false if the pool does not have a page for each key."""
        pages, asked = self._of(name), keys or ()
        if pages is None or indices is None or len(indices) != len(asked) * self._pools[name].page_size:
            return [False] * len(asked)
        return copy(pages, _packed(asked), indices[:: self._pools[name].page_size].tolist())


def _packed(keys: Sequence[str]) -> list[bytes]:
    """Decodes SGLang's keys, which are SHA-256 in hexadecimal."""
    return [bytes.fromhex(key) for key in keys]


def _weight_version() -> object:
    """Returns a value that changes with each update of the weights that names a version."""
    try:
        return runtime.get_serving().weight_version
    except (AttributeError, ValueError):  # SGLang's parts run without a server
        return None


def _leading(there: Sequence[bool]) -> int:
    return next((at for at, found in enumerate(there) if not found), len(there))


def _text(value: object) -> str:
    """Returns the value as text for a specification: a long text becomes its digest."""
    text = str(value)
    return text if text.isprintable() and 1 <= len(text.encode()) <= 200 else sha256(text.encode()).hexdigest()
