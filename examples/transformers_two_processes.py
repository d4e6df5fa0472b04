"""A prompt that outlives its process: the second process loads the keys and values that the first process has computed.

``python examples/transformers_two_processes.py`` needs transformers and kvtier with its daemon. The example makes a
small Llama with random weights, and starts a private daemon and the two processes, one after the other. The exit status
is 1, with a reason, if the answers differ or the second process computed blocks that it could have loaded.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

from kvtier import Client, Tier
from kvtier.replay.private import PrivateDaemon

BLOCK, PROMPT, WORDS = 32, 1_000, 1_000


def answer(address: str, answers: Connection) -> None:
    """Sends seconds to the first token, the number of prompt tokens from the cache, and the generated tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvtier.connectors.transformers import PrefixStore

    torch.manual_seed(0)  # the same model and prompt in both processes
    heads = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    # Logits of these weights differ clearly: a wrong byte of the cache changes the answer.
    sizes = {"vocab_size": WORDS, "hidden_size": 512, "intermediate_size": 1408, "initializer_range": 0.1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None)).eval()
    prompt = torch.randint(3, WORDS, (1, PROMPT))
    model.generate(prompt[:, :BLOCK], max_new_tokens=1, do_sample=False)  # the first call of a process is not timed
    with Client(address) as client:
        store = PrefixStore(client, model, tokens_per_block=BLOCK)
        started = time.perf_counter()
        past, cached = store.load_prefix(prompt)
        given = {store.argument: past, "do_sample": False}
        first = model.generate(prompt, **given, max_new_tokens=1)
        first_s = time.perf_counter() - started
        tokens = model.generate(first, **given, max_new_tokens=23)
        store.save_prefix(past, tokens)
    answers.send((first_s, cached, tokens[0, PROMPT:].tolist()))


async def main() -> str:
    """Returns the fault, or an empty text."""
    cached, generated = 0, list[list[int]]()
    async with PrivateDaemon({Tier.HOST: 256 << 20}) as daemon:
        for how in ("computed", "from memory"):
            ours, theirs = get_context("spawn").Pipe()
            process = get_context("spawn").Process(target=answer, args=(daemon.address, theirs))
            process.start()
            theirs.close()
            try:
                first_s, cached, tokens = await asyncio.to_thread(ours.recv)
            finally:
                process.kill()
                process.join()
            print(
                f"{how:12} {cached:4} of {PROMPT} tokens cached, first token after {first_s * 1e3:.0f} ms", flush=True
            )
            generated.append(tokens)
    if generated[0] != generated[1]:
        return "the processes generate different tokens"
    if cached < (PROMPT - 1) // BLOCK * BLOCK:
        return "the second process computed blocks that are stored"
    print("The generated tokens are equal:", *generated[1])
    return ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # ends process and daemon, as Ctrl-C
    try:
        sys.exit(asyncio.run(main()) or None)
    except KeyboardInterrupt:
        sys.exit("interrupted")
