"""vLLM models whose layers keep a state (GDN, Mamba, short convolutions) beside attention, on kvtier."""

import random
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier import connect
from tests.engines.conftest import require
from tests.engines.engines import assert_same, environment
from tests.engines.test_vllm import both, daemon, on_disk, places, start, vllm, whole  # noqa: F401 – fixtures
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.limit(400)]

BLOCK = 128
STATES: dict[str, Any] = {"kind": "states", "dtype": "bfloat16", "block_size": BLOCK}
GROUPS = 3
"""Groups of layers with a state; a fourth group has attention."""
ATTENTION_BYTES = BLOCK * 2 * 2 * 64 * 2
STATE_BYTES = 3 * (3 * 2 * 64) * 2 + 2 * 64 * 64 * 4
"""Of a layer: a convolution of three tokens over keys, queries and values, and a matrix for each of two heads."""


def cache(name: str) -> dict[str, Any]:
    """Settings of a cache with room for states: of few slots, few are reserved ahead."""
    return {"cache": name, "host_bytes": 64 << 20, "disk_bytes": 128 << 20}


def draw(seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, 512) for _ in range(length)]


ASKED = [draw(1, 300), draw(2, 256), draw(3, 257), draw(4, 120)]
"""Prompts that end within a block, with a block, one token after a block, and before the end of the first block."""
CACHED = [256, 128, 256, 0]
"""A state cannot go back by a token: of a prompt of two blocks, the first is loaded."""
STORED = 2 + 2 + 2 + GROUPS * (1 + 2 + 1)
"""Blocks of attention, and states: one at the last block before a prompt's last token, one at a prompt's end."""


@both
async def test_states_are_loaded_with_keys_and_values(start, daemon):  # noqa: F811
    with start(**STATES) as plain:
        cold = plain.generate(ASKED)
    with start(cache("states"), **STATES) as engine:
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
    with start(cache("states"), **STATES) as engine:
        found = engine.generate(ASKED)
        assert_same(found, cold)
        assert (found.cached, found.external) == (CACHED, sum(CACHED))


async def test_states_of_prompts_in_pieces(start, daemon):  # noqa: F811
    """Several steps go into a block, and requests run side by side, in fewer pages than they need. A batch's shape
    changes the rounding of bfloat16; a wrong state changes a log probability by several units."""
    asked = [draw(5, 300)[:160] + draw(seed, 140) for seed in range(6)]
    pieces = {"max_num_batched_tokens": 96, "max_num_seqs": 3, "max_model_len": 512, "num_gpu_blocks_override": 36}
    with start(**STATES, **pieces) as plain:
        cold = plain.generate(asked, tokens=1)
    with start(cache("pieces"), **STATES, **pieces) as engine:
        for together in (True, True, False):
            engine.forget()
            engine.generate(asked, tokens=100, together=together)
        engine.forget()
        warm = engine.generate(asked, tokens=1)
    assert warm.cached == [256] * 6
    for one, other in zip(warm.completions, cold.completions, strict=True):
        (found,), (right,) = one.logprobs, other.logprobs
        token, likely = max(right, key=lambda each: each[1])
        assert dict(found)[token] == pytest.approx(likely, abs=0.2)


async def test_states_of_two_ranks(start, daemon):  # noqa: F811
    """The first prompt's state has left its page before there is a slot, and is saved from the engine's own cache."""
    ranks = STATES | {"processes": True, "tensor_parallel_size": 2}
    with start(cache("ranks"), connector=("SlotlessConnector", "tests.engines.vllm_faults"), **ranks) as engine:
        cold = engine.generate(ASKED)
        await whole(daemon, "ranks", STORED - GROUPS)
        assert sum(await kept(daemon, "ranks")) == STORED - GROUPS
        assert_same(engine.generate(ASKED), cold)
        await whole(daemon, "ranks", STORED)
        engine.forget()
        warm = engine.generate(ASKED)
        assert_same(warm, cold)
        assert (warm.cached, warm.external) == (CACHED, sum(CACHED))


@pytest.mark.parametrize("fault", ["EvictedConnector", "StatelessConnector"])
async def test_of_a_failed_load_nothing_is_used(start, daemon, fault):  # noqa: F811
    """All blocks are gone when the load begins, or the states alone."""
    name, connector = f"failing-{fault}", (fault, "tests.engines.vllm_faults")
    with start(cache(name), **STATES) as engine:
        cold = engine.generate(ASKED)
        await whole(daemon, name, STORED)
    with start(cache(name), connector=connector, **STATES) as engine:
        found = engine.generate(ASKED)
        assert_same(found, cold)
        assert found.external > 0


async def test_an_unfinished_state_is_seen(start, daemon):  # noqa: F811
    mutant = ("UnfinishedConnector", "tests.engines.vllm_faults")
    with start(cache("unfinished"), connector=mutant, **STATES) as engine:
        cold = engine.generate(ASKED)
        await whole(daemon, "unfinished", STORED)
        engine.forget()
        warm = engine.generate(ASKED)
        assert warm.external == sum(CACHED)
        same = [one.same(other) for one, other in zip(warm.completions, cold.completions, strict=True)]
        assert same == [not tokens for tokens in CACHED]


def test_drafts_are_refused(start):  # noqa: F811
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with start(cache("drafts") | {"on_error": "continue"}, speculative_config=drafts, **STATES) as engine:
        assert "this engine runs without kvtier: speculative_config = ngram: must be left out" in engine.log


MODES = """
from types import SimpleNamespace as Some
import torch
from vllm.v1.kv_cache_interface import MambaSpec
from kvtier.connectors.vllm_layout import require_supported
parallel = dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1)
cached = Some(prefix_caching_hash_algo="sha256", enable_prefix_caching=True)
role = Some(kv_role="kv_both")
config = Some(parallel_config=Some(**parallel), cache_config=cached, speculative_config=None, kv_transfer_config=role)
for mode in ("align", "all"):
    spec = MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    groups = [Some(kv_cache_spec=spec, layer_names=["layer"])]
    try:
        require_supported(config, Some(kv_cache_groups=groups, prefix_cacheable_group_ids=[0]))
        print(mode, "is supported")
    except Exception as error:
        print(error)
"""


def test_other_modes_are_refused(engines):
    """vLLM has no other mode with prefix caching."""
    ended = subprocess.run(
        [require(engines, "vllm"), "-c", MODES], env=environment(), capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == [
        "align is supported",
        "mamba_cache_mode = all: must be align: states are kept at block ends",
    ]


def prefixes(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The prefixes of whole blocks."""
    return [tuple(tokens[: end * BLOCK]) for end in range(1, len(tokens) // BLOCK + 1)]


class Ideal:
    """A cache that knows the future: it has every block, and the states at which a later prompt goes on, or may."""

    def __init__(self) -> None:
        self._blocks: set[tuple[int, ...]] = set()
        self._returns: set[tuple[int, ...]] = set()

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def known(self, prompt: Sequence[int]) -> int:
        """The tokens of a prompt that need not be computed."""
        return sum(BLOCK for prefix in prefixes(prompt[:-1]) if prefix in self._blocks)

    def take(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        if known := self.known(prompt):
            self._returns.add(tuple(prompt[:known]))
        self._blocks.update(prefixes([*prompt, *answer[:-1]]))

    def nbytes(self, chats: Sequence[Sequence[int]]) -> int:
        """``chats``: all that was said, where each may go on."""
        ends = {max((each for each in prefixes(said) if each in self._blocks), key=len) for said in chats}
        return self.blocks * ATTENTION_BYTES + len(self._returns | ends) * GROUPS * STATE_BYTES


async def kept(daemon: DaemonProcess, prefix: str) -> tuple[int, int]:  # noqa: F811
    """Blocks of attention, and states, in every tier."""
    async with await connect(daemon.address) as client:
        (cache,) = [each for each in (await client.stats()).caches if each.name.startswith(prefix)]
    states = sum(group.blocks for group in cache.groups if group.window_tokens)
    return cache.blocks - states, states


async def test_states_are_kept_where_chats_go_on(start, daemon):  # noqa: F811
    """Chats with one system prompt take turns; the engine itself remembers nothing."""
    ideal, chats, lost = Ideal(), [draw(7, 300) for _ in range(3)], []
    with start(cache("chats"), max_model_len=2048, **STATES) as engine:

        async def ask(said: Sequence[int], tokens: int) -> Sequence[int]:
            engine.forget()
            (completion,) = engine.generate([said], tokens=tokens).completions
            lost.append(ideal.known(said) - completion.cached)
            ideal.take(said, completion.tokens)
            await eventually(lambda: kept(daemon, "chats"), lambda found: found[0] >= ideal.blocks)
            return completion.tokens

        for turn in range(6):
            for number, said in enumerate(chats):
                said += draw(100 * turn + number, 190)
                said += await ask(said, 60 + 150 * (turn % 2))
        assert lost == [0, 2 * BLOCK, *[0] * 16], "a state is stored once a second chat branches"
        assert (await kept(daemon, "chats"))[0] == ideal.blocks
        wanted = ideal.nbytes(chats)

        def within(found: tuple[int, int]) -> bool:
            return found[0] * ATTENTION_BYTES + found[1] * STATE_BYTES <= 1.1 * wanted

        await eventually(lambda: kept(daemon, "chats"), within)
        del chats[0][-(60 + 150 + 20) :]  # the last turn is taken back, and asked in other words
        await ask(chats[0] + draw(999, 100), 8)
        assert lost[-1] < 3 * BLOCK
