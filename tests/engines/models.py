"""Tiny models with random weights and a tokenizer of their own, so that an engine needs no hub.

Run by an engine's Python: ``models.py KIND DIRECTORY [SEED]``.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

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

_SLOW: Final = -5.0


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, num_hidden_layers=2, num_key_value_heads=2)


def medium() -> Any:
    """Large enough for a prompt to take time."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_key_value_heads": 4}
    return LlamaConfig(**{**_COMMON, **sizes})


def wide() -> Any:
    """Keys and values are large next to the time that they take to compute: 32 KiB a token."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_key_value_heads": 8, "max_position_embeddings": 8192}
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


def states() -> Any:
    """Three of four layers keep a state (GDN) that fades slowly. vLLM's kernels for CPUs take heads of 64 or 128 and
    bfloat16."""
    from transformers import Qwen3NextConfig

    linear = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
    return Qwen3NextConfig(
        **_COMMON,
        **linear,
        **experts,
        linear_num_key_heads=2,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=64,
        shared_expert_intermediate_size=128,
    )


KINDS: Final[Mapping[str, Callable[[], Any]]] = {
    "llama": llama,
    "medium": medium,
    "wide": wide,
    "hybrid": hybrid,
    "mla": mla,
    "states": states,
}


def make(kind: str, directory: Path, seed: int) -> None:
    """Writes a model of that kind, the same for the same seed."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(_SLOW)
    model.save_pretrained(directory)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
