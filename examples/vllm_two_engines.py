"""A chat that outlives its engine: the next engine loads the blocks that the first engine has computed.

``python examples/vllm_two_engines.py [MODEL [DTYPE]]`` needs vLLM and kvtier with its daemon. Without a model the
example makes a small one with random weights. The example starts a private daemon and three engines, one after another.
Each engine answers the same question about a long text and is killed. The first engine computes the text, the second
loads its blocks from memory, the third from disk, because the daemon was restarted.

The exit status is 1, with a reason, if an answer differs or an engine computed blocks that it could have loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from kvtier import AsyncClient, Tier, connect
from kvtier.replay.private import PrivateDaemon

BLOCK = 32
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
WITHIN_S = 60
SIZES = {Tier.HOST: 1 << 30, Tier.DISK: 4 << 30}
TEXT = " ".join(
    f"On day {day} the tide was {day * 37 % 61} feet high and {day * 13 % 29} boats came in." for day in range(60)
)
GREETING = "Good morning. " * BLOCK
CHAT = f"{TEXT}\n\nUser: How high was the tide on day 7?\nAssistant:"


@dataclass(slots=True, frozen=True)
class Answer:
    """``first_s``: seconds to the first token. ``cached``: number of the prompt's ``tokens`` that were not computed.
    ``blocks``: full blocks of all prompts."""

    blocks: int
    first_s: float
    cached: int
    tokens: int
    text: str


def save_model(config: Any, words: Sequence[str], directory: str, seed: int = 0) -> None:
    """Writes a model with random weights, and a tokenizer with a token for each word, numbered from 3."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    unknown, begin, end = special
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end
    ).save_pretrained(directory)


def small_model(directory: str) -> dict[str, Any]:
    """Makes a model that knows the words of the chat. Returns vLLM's settings for it."""
    import torch
    from transformers import LlamaConfig

    words = list(dict.fromkeys(CHAT.split()))
    config = LlamaConfig(
        vocab_size=len(words) + 3,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.1,  # logits differ clearly: a wrong byte of the cache changes the answer
        bos_token_id=1,
        eos_token_id=2,
    )
    save_model(config, words, directory)
    # vLLM's bfloat16 kernels end the process where a processor has AMX and the machine does not let it be used.
    dtype = "auto" if torch.cuda.is_available() else "float32"
    return {"model": directory, "dtype": dtype, "kv_cache_memory_bytes": 1 << 28}


def serve(model: Mapping[str, Any], address: str, answers: Connection) -> None:
    """Runs an engine that answers the chat and waits to be killed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address},
    }
    llm = LLM(**model, block_size=BLOCK, enforce_eager=True, kv_transfer_config=transfer)
    answer = partial(llm.generate, use_tqdm=False)
    # An engine does not wait for a cache that takes long to open. The first load is not timed, either.
    end = time.monotonic() + WITHIN_S
    while not (warm := answer(GREETING, SamplingParams(max_tokens=1))[0]).num_cached_tokens and time.monotonic() < end:
        llm.reset_prefix_cache()
    started = time.perf_counter()
    (first,) = answer(CHAT, SamplingParams(max_tokens=1, temperature=0))
    first_s = time.perf_counter() - started
    (whole,) = answer(CHAT, SamplingParams(max_tokens=24, temperature=0))
    greeted, asked = (len(each.prompt_token_ids or ()) for each in (warm, first))
    blocks = greeted // BLOCK + asked // BLOCK
    answers.send(Answer(blocks, first_s, first.num_cached_tokens or 0, asked, whole.outputs[0].text))
    answers.recv()


@asynccontextmanager
async def engine(model: Mapping[str, Any], address: str) -> AsyncIterator[Answer]:
    """Starts an engine, gives its answer, and kills the engine at the end."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(model, address, theirs))
    process.start()
    theirs.close()
    try:
        yield await asyncio.to_thread(ours.recv)
    except EOFError:
        sys.exit("the engine ended before its answer; with VLLM_LOGGING_LEVEL=INFO its log has the reason")
    finally:
        process.kill()
        process.join()


async def stored(client: AsyncClient, blocks: int) -> bool:
    """Waits until ``blocks`` blocks are on disk. Returns False if they have not arrived in time."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        tiers = [tier for cache in (await client.stats()).caches for tier in cache.tiers if tier.tier is Tier.DISK]
        if sum(tier.ready for tier in tiers) >= blocks:
            return True
        await asyncio.sleep(0.05)
    return False


async def run(model: Mapping[str, Any]) -> str:
    """Returns the fault, or an empty text. ``model``: vLLM's settings for it."""
    answers: list[Answer] = []
    async with PrivateDaemon(SIZES) as daemon:
        for how in ("computed", "from memory", "from disk"):
            if how == "from disk":
                await daemon.stop()
                await daemon.start()
            async with engine(model, daemon.address) as answer, connect(daemon.address) as client:
                known = f"{answer.cached:5} of {answer.tokens} tokens cached"
                print(f"{how:12} {known}, first token after {answer.first_s * 1e3:.0f} ms", flush=True)
                if not await stored(client, answer.blocks):
                    return "the engine's blocks are not on disk; with VLLM_LOGGING_LEVEL=INFO its log has the reason"
            answers.append(answer)
    first, *others = answers
    if any(other.text != first.text for other in others):
        return "the engines answer differently"
    if any(other.cached < (other.tokens - 1) // BLOCK * BLOCK for other in others):
        return "an engine computed what was stored"
    print(f"The answers are equal: {first.text.strip()}")
    return ""


def main() -> str:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="A directory or a name on the hub; default: made here."
    )
    parser.add_argument("dtype", nargs="?", metavar="DTYPE", default="auto", help="vLLM's, like float32.")
    named = parser.parse_args()
    if find_spec("vllm") is None:
        return f"{sys.executable} has no vLLM: run the example by a Python that has vLLM and kvtier"
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # ends the engine, as Ctrl-C does
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    print(
        "Three vLLM engines answer one chat. Each is killed before the next; the daemon restarts before the third.",
        flush=True,
    )
    try:
        if named.model:
            return asyncio.run(run({"model": named.model, "dtype": named.dtype}))
        with tempfile.TemporaryDirectory(prefix="kvtier-model-") as directory:
            return asyncio.run(run(small_model(directory)))
    except KeyboardInterrupt:
        return "interrupted"


if __name__ == "__main__":
    sys.exit(main() or None)
