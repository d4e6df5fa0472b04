"""vLLM models whose layers keep a state (GDN, Mamba, short convolutions) beside attention, on kvtier."""

from __future__ import annotations

import random

import pytest

from tests.engines.test_vllm import assert_same, daemon, on_disk, start, template, whole  # noqa: F401 – fixtures

pytestmark = [pytest.mark.engines, pytest.mark.limit(400)]

BLOCK = 128
STATES = {"kind": "states", "dtype": "bfloat16", "block_size": BLOCK}
GROUPS = 3
"""Groups of layers with a state; a fourth group has attention."""


def draw(seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, 512) for _ in range(length)]


ASKED = [draw(1, 300), draw(2, 256), draw(3, 257), draw(4, 120)]
"""Prompts with an end within a block, at its end, one token after it, and without a whole block."""
CACHED = [256, 128, 256, 0]
"""A state cannot go back: of a prompt of two blocks, the load ends with the first."""
STORED = 2 + 2 + 2 + GROUPS * (1 + 2 + 1)
"""Blocks of attention, and states: at the last block before a prompt's last token, and at a later end of a block."""


async def test_states_are_loaded_with_keys_and_values(start, daemon):  # noqa: F811
    with start(**STATES) as plain:
        cold = plain.generate(ASKED)
    with start({"cache": "states"}, **STATES) as engine:
        assert_same(engine.generate(ASKED), cold)
        await whole(daemon, "states", STORED)
        engine.forget()
        warm = engine.generate(ASKED)
        assert_same(warm, cold)
        assert (warm.cached, warm.external) == (CACHED, sum(CACHED))
        assert await on_disk(daemon, "states") == STORED
        engine.kill()
    daemon.kill()
    daemon.start()
    with start({"cache": "states"}, **STATES) as engine:
        found = engine.generate(ASKED)
        assert_same(found, cold)
        assert (found.cached, found.external) == (CACHED, sum(CACHED))
