"""An agent that calls tools, beside requests that never come back: its hits without hints, and with them.

``python examples/vllm_tool_loop.py http://127.0.0.1:8000 MODEL`` asks a vLLM server with kvtier's connector and budgets
of a few hundred blocks, started with ``--enable-prompt-tokens-details``. In each turn the agent asks its whole context
again, and says that it will be back; while its tool runs, other conversations ask once and end. Both rounds have
prompts of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.request
from collections.abc import Sequence
from typing import Any

TURNS = 4
OTHERS = 8
"""Requests of others while a tool runs."""
CONTEXT = 320
TURN = 64
WITHIN_S = 120


def ask(url: str, model: str, prompt: Sequence[int], session: str, hints: Sequence[dict[str, Any]]) -> int:
    """Completes a prompt of token ids. Returns how many of them were not computed."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": 4, "temperature": 0}
    if hints:
        body["kv_transfer_params"] = {"kvtier": {"session": session, "hints": list(hints)}}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WITHIN_S) as response:
        answer = json.load(response)
    told = (answer.get("kv_transfer_params") or {}).get("kvtier", {}).get("hints", [])
    if any(each["outcome"] == "rejected" for each in told):
        raise SystemExit(f"a hint was rejected: {told}")
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def loop(url: str, model: str, draw: random.Random, *, hints: bool) -> tuple[int, int]:
    """Runs the agent. Returns the tokens of its prompts that were not computed, and all of them."""

    def words(count: int) -> list[int]:
        return [draw.randrange(3, 500) for _ in range(count)]

    context, found, asked = words(CONTEXT), 0, 0
    for turn in range(TURNS):
        last = turn == TURNS - 1
        tool = {"action": "end"} if last else {"action": "return", "for_s": 20}
        found += ask(url, model, context, f"agent-{hints}", [tool] if hints else [])
        asked += len(context)
        context += words(TURN)  # the answer, and the result of the tool
        for other in range(0 if last else OTHERS):
            ended = [{"action": "end"}] if hints else []
            ask(url, model, words(CONTEXT), f"other-{hints}-{turn}-{other}", ended)
    return found, asked


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("url")
    arguments.add_argument("model")
    given = arguments.parse_args()
    draw = random.Random(7)
    for hints in (False, True):
        found, asked = loop(given.url, given.model, draw, hints=hints)
        print(f"{'with' if hints else 'without'} hints: {found} of the agent's {asked} tokens were not computed")


if __name__ == "__main__":
    main()
