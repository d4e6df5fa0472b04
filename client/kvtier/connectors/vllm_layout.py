"""The layout of a vLLM engine's KV cache: refused settings, identity, and the pages of a worker.

Planes come from the tensors that vLLM registers, never from its configuration: a backend may choose another layout than
the requested one, and bytes read in the wrong order are wrong without a sign.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from typing import Final

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.connectors.rows import joined, page_rows
from kvtier.engine import STATE, GroupPages, Layout, PageGroup, PlaneLayout, Weights, weights_of
from kvtier.errors import InvalidArgument

_log: Final = logging.getLogger("vllm.kvtier")
_MLA: Final = (MLAAttentionSpec, SlidingWindowMLASpec)


def require_supported(config: VllmConfig, kv: KVCacheConfig) -> None:
    """Raises :class:`InvalidArgument` for a setting of the engine that kvtier's connector cannot serve."""
    if (role := config.kv_transfer_config.kv_role) != "kv_both":
        raise InvalidArgument("kv_role", role, "kv_both: an engine both stores and loads blocks")
    parallel, algorithm = config.parallel_config, config.cache_config.prefix_caching_hash_algo
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise InvalidArgument(name, size, "1: kvtier stores blocks whose ranks have all tokens")
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        limit = "sha256 or sha256_cbor, or PYTHONHASHSEED set: each process hashes with a random seed of its own"
        raise InvalidArgument("prefix_caching_hash_algo", algorithm, limit)
    if not config.cache_config.enable_prefix_caching:  # MLA on a CPU cannot compute a prompt in pieces
        limit = "True: prompts are loaded in part, and vLLM says here whether it can compute the rest"
        raise InvalidArgument("enable_prefix_caching", False, limit)
    if len(kv.prefix_cacheable_group_ids) != len(kv.kv_cache_groups):
        raise InvalidArgument("kv_cache_groups", len(kv.kv_cache_groups), "groups that are all cached by prefix")
    for group in kv.kv_cache_groups:
        spec = _first(group.kv_cache_spec)
        if isinstance(spec, MambaSpec):
            _require_whole_states(config, spec)
        elif not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
            limit = "full or sliding window attention, MLA, or a state (Mamba, GDN, short convolution)"
            raise InvalidArgument("kv_cache_spec", type(spec).__name__, limit)
    if not kv.kv_cache_groups:
        raise InvalidArgument("kv_cache_groups", 0, "at least 1: this model keeps nothing")
    sizes = {group.kv_cache_spec.block_size for group in kv.kv_cache_groups}
    if len(sizes) > 1:
        raise InvalidArgument("block_size", sorted(sizes), "equal in all groups of layers")


def _require_whole_states(config: VllmConfig, spec: MambaSpec) -> None:
    """Raises :class:`InvalidArgument` if a finished page of a state may change, or may not hold the whole state."""
    if spec.mamba_cache_mode != "align":
        raise InvalidArgument("mamba_cache_mode", spec.mamba_cache_mode, "align: states are kept at block ends")
    if config.speculative_config is not None or spec.num_speculative_blocks:
        method = getattr(config.speculative_config, "method", None)
        raise InvalidArgument("speculative_config", method, "left out for a model with states: drafts move their pages")


def states_of(kv: KVCacheConfig) -> frozenset[int]:
    """Returns the groups whose layers keep a state of the sequence instead of keys and values of each token."""
    groups = enumerate(kv.kv_cache_groups)
    return frozenset(number for number, group in groups if isinstance(_first(group.kv_cache_spec), MambaSpec))


def tokens_per_block(kv: KVCacheConfig) -> int:
    return int(kv.kv_cache_groups[0].kv_cache_spec.block_size)


def pages_of(kv: KVCacheConfig, caches: Mapping[str, torch.Tensor]) -> list[GroupPages]:
    """Returns the pages of each group in the tensors of its layers. A stage of a pipeline has its layers only."""
    return [_pages(number, group, kv.num_blocks, caches) for number, group in enumerate(kv.kv_cache_groups)]


def layout_of(
    config: VllmConfig, kv: KVCacheConfig, caches: Mapping[str, torch.Tensor], weights_version: str | None
) -> tuple[Layout, list[GroupPages]]:
    """Returns the layout and this rank's pages. Every engine with the same bytes has the same layout.

    All ranks call this function at the same time: stages of a pipeline tell each other their layers.
    """
    pages = pages_of(kv, caches)
    groups = tuple(_page_group(group, some) for group, some in zip(kv.kv_cache_groups, pages, strict=True))
    ranks, weights = config.parallel_config.tensor_parallel_size, _weights(config, weights_version)
    identity = _identity(config, kv, caches) | {"weights": weights.digest}
    mine = Layout(weights.name, tokens_per_block(kv), groups, ranks, identity, weights.told, kv.kv_tp_replicas)
    stages = [mine] * config.parallel_config.pipeline_parallel_size
    torch.distributed.all_gather_object(stages, mine, group=get_pp_group().cpu_group)
    return Layout.of_stages(stages), pages


def _page_group(group: KVCacheGroupSpec, pages: GroupPages) -> PageGroup:
    spec = _first(group.kv_cache_spec)
    replicated = isinstance(spec, _MLA) or (isinstance(spec, MambaSpec) and spec.tp_replicated)
    planes = tuple(PlaneLayout(name, rows.shape[1], replicated) for name, rows in pages.planes.items())
    window = STATE if isinstance(spec, MambaSpec) else 0
    if isinstance(spec, SlidingWindowSpec):  # a token sees itself and sliding_window - 1 tokens before it
        window = max(1, spec.sliding_window - 1 + spec.extra_retained_tokens)
    return PageGroup(planes, window)


def _weights(config: VllmConfig, version: str | None) -> Weights:
    """Returns the weights. The first rank looks at them for all ranks, which may be on other hosts."""
    stages, ranks, found = get_pp_group(), get_tp_group(), None
    if stages.is_first_rank and ranks.is_first_rank:
        model = config.model_config
        other = getattr(model, "hf_config_path", None)
        commit = None if other else getattr(model.hf_config, "_commit_hash", None)
        found = weights_of(model.model, model.revision, commit=commit, version=version)
        found.log(_log)
    shared = ranks.broadcast_object(stages.broadcast_object(found))
    assert isinstance(shared, Weights)
    return shared


def _identity(config: VllmConfig, kv: KVCacheConfig, caches: Mapping[str, torch.Tensor]) -> dict[str, str]:
    model, cache = config.model_config, config.cache_config
    backends = sorted(backend.get_name() for backend in get_current_attn_backends(config))
    architecture = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()
    identity = {
        "engine": f"vllm {vllm.__version__}",
        "architecture": architecture,
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "backend": " ".join(backends),
        "hash": f"{cache.prefix_caching_hash_algo} {os.environ.get('PYTHONHASHSEED', 'default')}",
    }
    for number, group in enumerate(kv.kv_cache_groups):
        states = sorted({_described(spec) for spec in _specs(group).values() if isinstance(spec, MambaSpec)})
        if states:
            identity[f"state{number}"] = hashlib.sha256(" ".join(states).encode()).hexdigest()
        for page in [caches[layer] for layer in group.layer_names[:1]]:
            identity[f"page{number}"] = f"{page.dtype} {tuple(page.shape[1:])} {page.stride()[1:]}"
    return identity


def _pages(number: int, group: KVCacheGroupSpec, blocks: int, caches: Mapping[str, torch.Tensor]) -> GroupPages:
    # A backend may split a block into several pages of its own, which lie one after another.
    tensors = {layer: caches[layer].view(blocks, -1, *caches[layer].shape[1:]) for layer in group.layer_names}
    for layer, spec in _specs(group).items():
        if isinstance(spec, MambaSpec):  # bytes [blocks, 1, 1, 1, page]: the states of a layer, then padding
            tensors[layer] = tensors[layer][..., : spec.state_content_size_bytes]
    rows = page_rows(tensors)
    whole = joined(list(rows.values())) if rows else None
    if whole is not None:  # the planes have the order of the memory
        rows = dict(sorted(rows.items(), key=lambda row: row[1].data_ptr()))
    return GroupPages(number, rows, whole)


def _described(spec: MambaSpec) -> str:
    kind = f"{spec.mamba_type} on {current_platform.device_type}"
    return f"{kind}: {spec.shapes} {spec.dtypes} in {spec.page_size_bytes} bytes"


def _specs(group: KVCacheGroupSpec) -> Mapping[str, KVCacheSpec]:
    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return {layer: specs.get(layer, spec) for layer in group.layer_names}


def _first(spec: KVCacheSpec) -> KVCacheSpec:
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
