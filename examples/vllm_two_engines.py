"""A chat that outlives its engine: the next engine loads the blocks that the first engine has computed.

``python examples/vllm_two_engines.py MODEL [DTYPE]`` needs vLLM and kvtier with its daemon. The example starts a
private daemon and three engines, one after another. Each engine answers the same question about a long text and is
killed. The first engine computes the text, the second finds its blocks in memory, the third on disk, since the daemon
was restarted.

The exit status is 1, with a reason, if an answer differs or an engine computed blocks that it could have loaded.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

from kvtier import AsyncClient, Tier, connect
from kvtier.replay.private import PrivateDaemon

BLOCK = 32
SIZES = {Tier.HOST: 1 << 30, Tier.DISK: 4 << 30}
TEXT = " ".join(
    f"On day {day} the tide was {day * 37 % 61} feet high and {day * 13 % 29} boats came in." for day in range(40)
)
CHAT = f"{TEXT}\n\nUser: How high was the tide on day 7?\nAssistant:"


@dataclass(slots=True, frozen=True)
class Answer:
    """``first_s``: seconds to the first token. ``cached``: number of the prompt's ``tokens`` that were not computed."""

    first_s: float
    cached: int
    tokens: int
    text: str


def serve(model: Sequence[str], address: str, answers: Connection) -> None:
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
    name, dtype = (*model, "auto")[:2]
    llm = LLM(name, dtype=dtype, block_size=BLOCK, enforce_eager=True, kv_transfer_config=transfer)
    llm.generate("Good morning.", SamplingParams(max_tokens=1))  # keeps the engine's first start out of the timing
    started = time.perf_counter()
    (first,) = llm.generate(CHAT, SamplingParams(max_tokens=1, temperature=0))
    first_s = time.perf_counter() - started
    (whole,) = llm.generate(CHAT, SamplingParams(max_tokens=24, temperature=0))
    answers.send(
        Answer(first_s, first.num_cached_tokens or 0, len(first.prompt_token_ids or ()), whole.outputs[0].text)
    )
    answers.recv()


@asynccontextmanager
async def engine(model: Sequence[str], address: str) -> AsyncIterator[Answer]:
    """Starts an engine, gives its answer, and kills the engine at the end."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(model, address, theirs))
    process.start()
    theirs.close()
    try:
        yield await asyncio.to_thread(ours.recv)
    finally:
        process.kill()
        process.join()


async def stored(client: AsyncClient, blocks: int) -> None:
    """Waits until ``blocks`` blocks are on disk."""
    while True:
        tiers = [tier for cache in (await client.stats()).caches for tier in cache.tiers if tier.tier is Tier.DISK]
        if sum(tier.ready for tier in tiers) >= blocks:
            return
        await asyncio.sleep(0.05)


async def main(model: Sequence[str]) -> str:
    """Returns the fault, or an empty text. ``model``: its name, and the dtype if it is not the model's own."""
    answers: dict[str, Answer] = {}
    async with PrivateDaemon(SIZES) as daemon:
        async with engine(model, daemon.address) as answers["computed"], await connect(daemon.address) as client:
            await stored(client, answers["computed"].tokens // BLOCK)
        async with engine(model, daemon.address) as answers["from memory"]:
            pass
        await daemon.stop()
        await daemon.start()
        async with engine(model, daemon.address) as answers["from disk"]:
            pass
    for how, answer in answers.items():
        known = f"{answer.cached:5} of {answer.tokens} tokens cached"
        print(f"{how:12} {known}, first token after {answer.first_s * 1e3:.0f} ms")
    first, *others = answers.values()
    print(first.text)
    if any(other.text != first.text for other in others):
        return "the engines answer differently"
    if any(other.cached < (other.tokens - 1) // BLOCK * BLOCK for other in others):
        return "an engine computed what was stored"
    return ""


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])) or None)
