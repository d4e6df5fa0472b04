"""kvtier under SGLang's real host pools without an engine: run by the engine's Python, says ``ok`` or fails.

``sglang_pools.py WHAT MODEL SETTINGS``: settings of kvtier as a JSON object. WHAT is

- ``window``: two pools, one of them of a sliding window, in each layout: their random bytes are stored, and loaded into
  other pages;
- ``states``: the pools of a hybrid model, attention and Mamba's states: a prefix ends where a state is stored;
- ``ranks``: what two tensor-parallel ranks see of each other;
- ``put``, ``fetch``: two hosts with one store;
- ``off``: with wrong settings everything is a miss.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs

from kvtier.connectors.sglang import KvtierHiCache

PAGE: Final = 16
PAGES: Final = 12
CAPACITY: Final = {"start_layer": 0, "device_capacity_tokens": PAGE, "host_token_capacity": PAGES * PAGE}
STORED: Final = 6
WINDOW: Final = 2
"""Pages of the sliding window."""
KEYS: Final = [hashlib.sha256(bytes([page])).hexdigest() for page in range(PAGES)]


def mha(layers: int, layout: str) -> Any:
    shape = (PAGE, 2, 32)
    buffers = [torch.zeros(shape) for _ in range(2 * layers)]
    pointers = torch.tensor([each.data_ptr() for each in buffers])
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(buffers[:layers]),
            v=tuple(buffers[layers:]),
            k_data_ptrs=pointers[:layers],
            v_data_ptrs=pointers[layers:],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=2,
        head_dim=32,
        v_head_dim=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    made = MHATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, end_layer=layers, **CAPACITY)
    made.kv_buffer.copy_(torch.rand(made.kv_buffer.shape))
    return made


def mla() -> Any:
    rows = tuple(torch.zeros(PAGE, 1, 96) for _ in range(2))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([each.data_ptr() for each in rows]),
        layer_indices=(0, 1),
        device_layer_num=2,
        page_size=PAGE,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        kv_cache_dim=96,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(info, 1.0, 0, PAGE, "page_first", end_layer=2, target_layer_num=2, **CAPACITY)


def mamba(seed: int, heads: int = 2) -> Any:
    """Of two layers, with a page for each state."""
    torch.manual_seed(seed)
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, PAGES, heads, 16, 16), conv=(torch.zeros(2, PAGES, 24, 3, dtype=torch.bfloat16),)
    )
    made = MambaPoolHost(info, 1.0, 0, device_capacity=PAGES, pin_memory=False, layout="page_first_direct")
    for buffer in made.kv_buffer:
        buffer.copy_(torch.rand(buffer.shape))
    return made


def indices(*pages: int) -> torch.Tensor:
    """Of the tokens of pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def backend_of(settings: Mapping[str, Any], pools: Mapping[str, Any], rank: int = 0, ranks: int = 1) -> KvtierHiCache:
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=isinstance(pools[PoolName.KV], MLATokenToKVPoolHost),
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=None,
        extra_config={"interface_v1": 1, "kvtier": settings},
    )
    backend = KvtierHiCache(config, {})
    backend.register_mem_pool_host(pools[PoolName.KV])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    return backend


def window(settings: dict[str, Any]) -> None:
    for layout in ("layer_first", "page_first", "page_first_direct"):
        window_in(layout, settings | {"cache": layout})


def window_in(layout: str, settings: dict[str, Any]) -> None:
    full, sliding = mha(3, layout), mha(2, layout)
    backend = backend_of(settings, {PoolName.KV: full, PoolName.SWA: sliding})
    keys = KEYS
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys[:STORED], indices(*range(STORED))) == [True] * STORED
    assert backend.batch_exists(keys) == STORED
    last = PoolTransfer(
        name=PoolName.SWA,
        host_indices=indices(0, 1),
        keys=keys[STORED - WINDOW : STORED],
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
    assert backend.batch_exists_v2(keys, [last]).kv_hit_pages == 0, "no window is stored"
    assert backend.batch_set_v2([last]) == {PoolName.SWA: [True] * WINDOW}
    found = backend.batch_exists_v2(keys, [last])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (STORED, [STORED])
    assert found.extra_pool_hit_pages == {PoolName.KV: STORED, PoolName.SWA: STORED}
    assert backend.batch_exists_v2(keys[: STORED - 1], [last]).kv_hit_pages == 0, "a part of the window"

    there = list(range(PAGES - STORED, PAGES))
    expected = [full.get_data_page(page * PAGE).clone() for page in range(STORED)]
    assert backend.batch_get_v1(keys[:STORED], indices(*there)) == [True] * STORED
    for page, before in zip(there, expected, strict=True):
        assert torch.equal(full.get_data_page(page * PAGE), before), (layout, page)
    expected = [sliding.get_data_page(page * PAGE).clone() for page in range(WINDOW)]
    last.host_indices = indices(7, 3)
    assert backend.batch_get_v2([last]) == {PoolName.SWA: [True] * WINDOW}
    for page, before in zip((7, 3), expected, strict=True):
        assert torch.equal(sliding.get_data_page(page * PAGE), before), (layout, page)

    assert backend.batch_get_v1(keys, indices(*range(PAGES))) == [True] * STORED + [False] * (PAGES - STORED)
    assert backend.batch_get_v1(keys, indices(0)) == [False] * PAGES, "a page for each key"
    backend.clear()
    assert backend.batch_exists(keys) == 0
    backend.close()


def states(settings: dict[str, Any]) -> None:
    """A node of SGLang's tree has the state at its end, under the key of its last page."""
    full, kept = mha(3, "page_first_direct"), mamba(1)
    pools = {PoolName.KV: full, PoolName.MAMBA: kept}
    backend = backend_of(settings, pools)
    assert backend.batch_set_v1(KEYS[:STORED], indices(*range(STORED))) == [True] * STORED

    def state_of(page: int, place: int) -> PoolTransfer:
        key, at = [KEYS[page]], torch.tensor([place])
        return PoolTransfer(PoolName.MAMBA, at, keys=key, hit_policy=PoolHitPolicy.TRAILING_PAGES)

    asked = PoolTransfer(PoolName.MAMBA, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert backend.batch_exists_v2(KEYS, [asked]).kv_hit_pages == 0, "no state is stored"
    for page, place in ((1, 0), (4, 3)):
        assert backend.batch_set_v2([state_of(page, place)]) == {PoolName.MAMBA: [True]}
    found = backend.batch_exists_v2(KEYS, [asked])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 5])
    assert backend.batch_exists_v2(KEYS[:4], [asked]).kv_hit_pages == 2, "a state cannot go back"
    right = kept.get_data_page(3).clone()
    assert backend.batch_get_v2([state_of(4, 7)]) == {PoolName.MAMBA: [True]}
    assert torch.equal(kept.get_data_page(7), right)
    assert backend.batch_get_v2([state_of(2, 7)]) == {PoolName.MAMBA: [False]}, "in between"
    assert torch.equal(kept.get_data_page(7), right)
    for pool, there in ((mamba(1), 5), (mamba(1, heads=4), 0)):  # other states are another cache
        other = backend_of(settings, pools | {PoolName.MAMBA: pool})
        assert other.batch_exists_v2(KEYS, [asked]).kv_hit_pages == there
        other.close()
    second = backend_of(settings, pools, 1, 2)  # states are sharded over ranks
    assert second.batch_exists_v2(KEYS, [asked]).kv_hit_pages == 0
    second.close()
    backend.close()


def ranks(settings: dict[str, Any]) -> None:
    """Heads are divided over ranks, latent vectors are the same on each: rank 0 alone is asked to store those."""
    for pool, seen in ((mha(2, "layer_first"), 0), (mla(), STORED)):
        cache = settings | {"cache": type(pool).__name__}
        first, second = (backend_of(cache, {PoolName.KV: pool}, rank, 2) for rank in (0, 1))
        assert first.batch_set_v1(KEYS[:STORED], indices(*range(STORED))) == [True] * STORED
        assert first.batch_exists(KEYS) == STORED
        assert second.batch_exists(KEYS) == seen, type(pool).__name__
        first.close()
        second.close()


def put(settings: dict[str, Any]) -> None:
    """The same bytes as in :func:`fetch`, stored."""
    torch.manual_seed(1)
    backend = backend_of(settings, {PoolName.KV: mha(2, "layer_first")})
    assert backend.batch_set_v1(KEYS[:STORED], indices(*range(STORED))) == [True] * STORED
    backend.close()


def fetch(settings: dict[str, Any]) -> None:
    """A lookup brings them to another host."""
    torch.manual_seed(1)
    pool = mha(2, "layer_first")
    expected = [pool.get_data_page(page * PAGE).clone() for page in range(STORED)]
    pool.kv_buffer.zero_()
    backend = backend_of(settings, {PoolName.KV: pool})
    assert backend.batch_exists(KEYS) == STORED
    assert backend.batch_get_v1(KEYS[:STORED], indices(*range(STORED))) == [True] * STORED
    for page, right in enumerate(expected):
        assert torch.equal(pool.get_data_page(page * PAGE), right), page
    backend.close()


def off(settings: dict[str, Any]) -> None:
    backend = backend_of(settings, {PoolName.KV: mha(2, "layer_first")})
    assert backend.batch_set_v1(KEYS, indices(*range(PAGES))) == [False] * PAGES
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, indices(*range(PAGES))) == [False] * PAGES
    backend.clear()
    backend.close()


if __name__ == "__main__":
    publish(ServerArgs(model_path=sys.argv[2], device="cpu"), role="scheduler")
    kinds = {"window": window, "states": states, "ranks": ranks, "put": put, "fetch": fetch, "off": off}
    kinds[sys.argv[1]](json.loads(sys.argv[3]))
    print("ok")
