"""A model of transformers that takes up prompts from kvtier computes what it computes without it, to the bit."""

import logging
from contextlib import closing, contextmanager

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kvtier import Client, Hint, InvalidArgument, Scope, Tier, chain_keys
from kvtier.connectors.transformers import PrefixStore
from tests.connectors import tiny
from tests.integration.blocks import SPEC
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually

BLOCK = 16
SPLIT = 18 * BLOCK
"""Tokens of :data:`PROMPT` in full blocks."""
BUDGETS = {Tier.HOST: 8 << 20, Tier.DISK: 8 << 20}
PROMPT = torch.randint(1, tiny.VOCABULARY, (1, SPLIT + 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def daemon(start_daemon):
    return start_daemon("--host-bytes", "64MiB", "--disk-bytes", "64MiB")


@contextmanager
def opened(daemon, model, timeout=30.0):
    """As in a process of its own."""
    with Client(daemon.address) as client:
        yield PrefixStore(client, model, budgets=BUDGETS, timeout=timeout)


@torch.no_grad()
def run(model, ids, past):
    """The logits of all given tokens."""
    return model(ids, **{tiny.ARGUMENT: past}, use_cache=True).logits


def prefill(model, ids=PROMPT, past=None):
    """The prompt in two parts, and what the model keeps of it."""
    kept = DynamicCache() if past is None else past
    run(model, ids[:, :SPLIT], kept)
    return run(model, ids[:, SPLIT:], kept), kept


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_the_logits_are_the_same_to_the_bit_after_the_daemon_was_killed(daemon, dtype, attention):
    model = tiny.llama(dtype, attention)
    cold, past = prefill(model)
    with opened(daemon, model) as store:
        assert store.load_prefix(PROMPT)[1] == 0
        assert store.save_prefix(past, PROMPT) == SPLIT
        store.save_prefix(past, PROMPT, conversation="chat")
        assert store.cache.hint(Hint("return", "chat"))[0].blocks == SPLIT // BLOCK
        keys = chain_keys(PROMPT[0, :SPLIT].numpy(), BLOCK)
        await eventually(lambda: store.cache.match(keys).residency, lambda tiers: min(tiers) >= Tier.DISK.bit)
    daemon.kill()
    daemon.start()
    with opened(daemon, tiny.llama(dtype, attention)) as store:
        past, known = store.load_prefix(PROMPT[0].tolist())
    assert known == SPLIT
    assert torch.equal(run(model, PROMPT[:, known:], past), cold)


async def test_a_prefix_comes_from_another_host(start_fresh, tmp_path):
    model = tiny.llama()
    cold, past = prefill(model)
    (tmp_path / "store").mkdir()
    remote = f'{{"url": "file://{tmp_path}/store", "write": "through"}}'
    hosts = [start_fresh("--remote", remote, "--host-bytes", "64MiB", "--disk-bytes", "64MiB") for _ in range(2)]
    with opened(hosts[0], model) as store:
        store.save_prefix(past, PROMPT)
        await eventually(lambda: sum(each.is_file() for each in tmp_path.rglob("*")), lambda found: found >= 18)
    with opened(hosts[1], model) as store:
        past, known = store.load_prefix(PROMPT)
    assert known == SPLIT
    assert torch.equal(run(model, PROMPT[:, known:], past), cold)


def test_generate_goes_on_from_what_is_stored(daemon):
    model, computed = tiny.llama(), []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: computed.append(args[0].shape[1]))

    def generate(store):
        past, known = store.load_prefix(PROMPT)
        computed.clear()
        options = {"max_new_tokens": 8, "do_sample": False, store.argument: past}
        ids = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)
        assert sum(computed) == ids.shape[1] - known - 1, "the last token is not run through the model"
        assert store.save_prefix(past, ids) == (ids.shape[1] - 1) // BLOCK * BLOCK
        return known, ids

    with opened(daemon, model) as store:
        (none, cold), (known, warm) = generate(store), generate(store)
        # The next turn of a chat, of which the answer's tokens are known, too.
        assert store.load_prefix(torch.cat([cold, PROMPT], dim=1))[1] == SPLIT + BLOCK
    assert (none, known) == (0, SPLIT)
    assert torch.equal(warm, cold)


def test_only_the_rest_of_a_prompt_is_stored(daemon):
    model = tiny.llama()
    other = torch.cat([PROMPT[:, : 5 * BLOCK], PROMPT.flip(1)[:, 5 * BLOCK :]], dim=1)
    with opened(daemon, model) as store:
        for ids in (PROMPT, other):
            store.save_prefix(prefill(model, ids)[1], ids)
        assert len(list(store.cache.blocks())) == (18 - 5) + 18
        for ids in (PROMPT, other):
            past, known = store.load_prefix(ids)
            assert known == SPLIT
            assert torch.equal(run(model, ids[:, known:], past), prefill(model, ids)[0])
        store.cache.drop(chain_keys(PROMPT[0, :BLOCK].numpy(), BLOCK))
        assert list(store.cache.blocks()) == [], "blocks that nothing leads to"


def retrained():
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny.llama(torch.bfloat16),
        lambda: tiny.llama(attention="eager"),
        lambda: tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        lambda: tiny.llama(num_key_value_heads=4),
        retrained,
    ],
    ids=["dtype", "attention", "config", "heads", "weights"],
)
def test_another_model_has_no_hits(daemon, make):
    model = tiny.llama()
    with opened(daemon, model) as store:
        store.save_prefix(prefill(model)[1], PROMPT)
    with opened(daemon, make()) as store:
        assert store.load_prefix(PROMPT)[1] == 0


def test_another_salt_or_adapter_has_no_hits(daemon):
    model = tiny.llama()
    with opened(daemon, model) as store:
        store.save_prefix(prefill(model)[1], PROMPT, Scope(salt="a"))
        found = [store.load_prefix(PROMPT, scope)[1] for scope in (Scope(salt="a"), Scope(salt="b"), Scope(lora_id=1))]
    assert found == [SPLIT, 0, 0]


def test_prompts_shorter_than_a_block(daemon):
    model = tiny.llama()
    with opened(daemon, model) as store:
        past = store.load_prefix(PROMPT[:, :1])[0]
        run(model, PROMPT[:, : BLOCK - 1], past)
        assert store.save_prefix(past, PROMPT[:, : BLOCK - 1]) == 0
        run(model, PROMPT[:, BLOCK - 1 : BLOCK], past)
        assert store.save_prefix(past, PROMPT[:, :BLOCK]) == BLOCK
        assert store.load_prefix(PROMPT[:, :BLOCK])[1] == 0, "the last token has to be computed"
        assert store.load_prefix(PROMPT[:, : BLOCK + 1])[1] == BLOCK


def test_a_sliding_window_in_a_cache_that_keeps_all_tokens(daemon):
    model = tiny.sliding(3 * BLOCK)
    cold, past = prefill(model)
    with opened(daemon, model) as store:
        assert store.save_prefix(past, PROMPT) == SPLIT
        past, known = store.load_prefix(PROMPT)
        assert torch.equal(run(model, PROMPT[:, known:], past), cold)
        slid = prefill(model, past=DynamicCache(config=model.config))[1]
        with pytest.raises(
            InvalidArgument, match=r"past\.layers\[0\] = the last 47 of 300 tokens: must be all of them"
        ):
            store.save_prefix(slid, PROMPT)
        inside = DynamicCache(config=model.config)
        run(model, PROMPT.flip(1)[:, : 2 * BLOCK], inside)
        assert store.save_prefix(inside, PROMPT.flip(1)) == 2 * BLOCK


def test_a_static_cache_is_saved(daemon):
    model = tiny.llama()
    _, static = prefill(model, past=StaticCache(model.config, max_cache_len=512))
    with opened(daemon, model) as store:
        assert store.save_prefix(static, PROMPT) == SPLIT
        past, _ = store.load_prefix(PROMPT)
    for layer, kept in zip(past.layers, static.layers, strict=True):
        assert torch.equal(layer.keys, kept.keys[:, :, :SPLIT])
        assert torch.equal(layer.values, kept.values[:, :, :SPLIT])


@pytest.fixture
def lines(caplog):
    """The lines of kvtier's log."""

    def lines():
        return [record.getMessage() for record in caplog.records if record.name.startswith("kvtier")]

    with caplog.at_level(logging.WARNING):
        yield lines


@pytest.mark.parametrize("reason", ["host tier: 4.0 KiB of 64.0 MiB are free", "no daemon answers at"])
async def test_a_cache_that_can_be_opened_later(daemon, lines, reason):
    model, late = tiny.llama(), "daemon" in reason
    past = prefill(model)[1]
    if late:
        daemon.stop()
    else:
        with Client(daemon.address) as client:
            client.open_cache("other", SPEC, budgets={Tier.HOST: 64 << 20})
    with closing(PrefixStore(daemon.address, model, budgets=BUDGETS)) as store:
        assert (store.load_prefix(PROMPT)[1], store.save_prefix(past, PROMPT)) == (0, 0)
        if late:
            daemon.start()
        else:
            kvtier("cache", "rm", "other", "--address", daemon.address)
        await eventually(lambda: store.save_prefix(past, PROMPT), lambda saved: saved == SPLIT)
        assert store.load_prefix(PROMPT)[1] == SPLIT
        without, back = await eventually(lines, lambda said: len(said) == 2)
    assert without.startswith(f"the engine runs without kvtier's cache {store.name}: {reason}")
    assert without.endswith("; kvtier tries again in the background")
    assert back == f"kvtier's cache {store.name} is back"


async def test_without_the_daemon_nothing_is_loaded_or_saved_and_nothing_fails(daemon, lines):
    model = tiny.llama()
    past = prefill(model)[1]
    with opened(daemon, model, timeout=1.0) as store:
        assert store.save_prefix(past, PROMPT) == SPLIT
        daemon.kill()
        assert store.load_prefix(PROMPT)[1] == SPLIT, "what is mapped is there without the daemon"
        unknown = PROMPT.flip(1)
        assert store.load_prefix(unknown)[1] == 0
        past = prefill(model, unknown)[1]
        assert [store.save_prefix(past, unknown) for _ in range(3)] == [0, 0, 0]
        daemon.start()
        await eventually(lambda: store.save_prefix(past, unknown), lambda saved: saved == SPLIT)
        without, back = await eventually(lines, lambda said: len(said) == 2)
    assert "runs without" in without and back == f"kvtier's cache {store.name} is back"


def test_arguments_that_make_no_sense_change_nothing(daemon):
    model, ids = tiny.llama(), torch.cat([PROMPT, PROMPT])
    with Client(daemon.address) as client:
        store = PrefixStore(client, model)
        of_another = prefill(tiny.llama(num_key_value_heads=4))[1]
        for past, wrong in (
            (prefill(model, ids)[1], "2 prompts"),
            (of_another, "of the model"),
            (DynamicCache(), "a decoder"),
        ):
            with pytest.raises(InvalidArgument, match=wrong):
                store.save_prefix(past, PROMPT)
        with pytest.raises(InvalidArgument, match="conversation = 129 bytes"):
            store.save_prefix(prefill(model)[1], PROMPT, conversation=129 * "x")
        with pytest.raises(InvalidArgument, match="2 dimensions"):
            store.load_prefix(ids)
        with pytest.raises(InvalidArgument, match="2 dimensions"):
            store.save_prefix(prefill(model)[1], ids)
        assert store.load_prefix(PROMPT)[1] == 0
        with pytest.raises(InvalidArgument, match="tokens_per_block = 0"):
            PrefixStore(client, model, tokens_per_block=0)
        with pytest.raises(InvalidArgument, match=r"budgets\[host\] = 100: must be 8192 to "):
            PrefixStore(client, model, budgets={Tier.HOST: 100})
        with pytest.raises(InvalidArgument, match=r"model(\.layers\[0\] = LinearAttention| = NoneType)"):
            PrefixStore(client, tiny.recurrent())
