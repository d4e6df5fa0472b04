"""Tiny models with random weights and a tokenizer of their own, so that an engine needs no hub.

Run by an engine's Python: ``models.py KIND DIRECTORY [SEED]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from examples.vllm_two_engines import save_model

VOCABULARY: Final = 512
_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Random weights of this spread give logits that differ clearly: a wrong byte of a cache changes a token.
    "initializer_range": 0.1,
}


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, num_hidden_layers=2, num_key_value_heads=2)


def medium() -> Any:
    """Large enough for a prompt to take time."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_key_value_heads": 4}
    return LlamaConfig(**{**_COMMON, **sizes})


def hybrid() -> Any:
    """Two of three layers see the last 64 tokens only."""
    from transformers import Olmo3Config

    windows = ["sliding_attention", "sliding_attention", "full_attention"]
    return Olmo3Config(
        **_COMMON, num_hidden_layers=6, num_key_value_heads=2, sliding_window=64, layer_types=windows * 2
    )


def mla() -> Any:
    """Keys and values are one latent vector a token."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_COMMON,
        num_hidden_layers=2,
        num_key_value_heads=8,
        first_k_dense_replace=2,
        kv_lora_rank=512,  # with the next but one: the 576 values a token that vLLM's kernels know
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_shared_experts=1,
    )


KINDS: Final[Mapping[str, Callable[[], Any]]] = {"llama": llama, "medium": medium, "hybrid": hybrid, "mla": mla}


if __name__ == "__main__":
    kind, directory, seed = (*sys.argv[1:], "0")[:3]
    save_model(KINDS[kind](), [f"w{number}" for number in range(3, VOCABULARY)], directory, int(seed))
