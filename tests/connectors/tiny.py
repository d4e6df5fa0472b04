"""Models of random weights, small enough to run anywhere, and the files that ``from_pretrained`` wants."""

from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

torch.set_num_threads(1)  # several spin for each other where cores are busy, and the matrices are small

VOCABULARY: Final = 512
ARGUMENT: Final = (
    "cache" if "cache" in signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
)
"""The name of the installed version for the argument that takes a cache."""
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def llama(dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changed: Any) -> Any:
    """The same weights each time."""
    config = transformers.LlamaConfig(**SHAPE | changed, dtype=dtype, attn_implementation=attention)
    return _made(transformers.LlamaForCausalLM, config)


def sliding(window: int) -> Any:
    """A layer with a sliding window, and one without."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SHAPE, sliding_window=window, layer_types=kinds)
    return _made(transformers.Gemma3ForCausalLM, config)


def recurrent() -> Any:
    """It keeps states, but neither keys nor values."""
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)
    return _made(transformers.MambaForCausalLM, config)


def _made(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind._from_config(config, dtype=config.dtype).eval()


def save(directory: Path) -> None:
    """A Llama, and a tokenizer that knows the words ``w0``, ``w1`` and so on."""
    llama().save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)
