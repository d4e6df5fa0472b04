"""A prompt's blocks: their keys, and what a commit of some of them tells."""

import numpy as np
import pytest

from kvtier import CacheOptions, InvalidArgument, MultimodalItem, Prompt, Scope, chain_keys, event_hashes
from kvtier.wire import split_keys as split

IDS = list(range(100, 111))
EXTRA = [0, 0, 0, 0, 0, 2**64 - 1, 0, 0, 0, 0, 0]
IMAGE = Scope(7, "tenant", (MultimodalItem(b"i" * 32, 2, 5),))
HASHED = CacheOptions(event_hash="v1_block_key")
KEPT_ALONE = CacheOptions(keep_tokens=True)
KEPT = CacheOptions(event_hash="v2_sha256", keep_tokens=True)


def test_its_keys_are_those_of_the_chain() -> None:
    prompt = Prompt(IDS, 4, IMAGE, EXTRA)
    assert prompt.keys == chain_keys(IDS, 4, IMAGE, EXTRA)
    assert len(prompt) == 2


def test_a_cache_without_options_is_told_nothing() -> None:
    prompt = Prompt(IDS, 4)
    assert prompt.told(prompt.keys, CacheOptions()) == {}


def test_hashes_are_told_of_just_these_keys_and_in_their_order() -> None:
    prompt = Prompt(IDS, 2)
    keys, hashes = split(prompt.keys), event_hashes("v1_block_key", IDS, 2)
    told = prompt.told(keys[3] + keys[1], HASHED)
    assert told == {"event_hashes": hashes[24:32] + hashes[8:16]}


def test_tokens_and_all_of_their_scope_are_told_where_the_cache_keeps_them() -> None:
    prompt = Prompt(IDS, 4, IMAGE, salt_id=1, vocab_size=1000)
    second = split(prompt.keys)[1]
    told = prompt.told(second + prompt.keys[:32], KEPT)
    hashes = event_hashes("v2_sha256", IDS, 4, IMAGE, salt_id=1, vocab_size=1000)
    assert told == {
        "event_hashes": hashes[32:] + hashes[:32],
        "tokens": np.array([104, 105, 106, 107, 100, 101, 102, 103], "<u4").tobytes(),
        "lora_id": 7,
        "cache_salt": "tenant",
        "mm_digests": b"i" * 64,
        "mm_blocks": [0, 1],
        "mm_offsets": [2, 0],
    }


def test_extra_ids_are_told() -> None:
    prompt = Prompt(IDS, 4, Scope(), EXTRA)
    told = prompt.told(prompt.keys, CacheOptions(keep_tokens=True))
    assert told["token_extra_ids"] == np.array(EXTRA[:8], "<u8").tobytes()


def test_a_partial_block_is_told_with_the_tokens_that_it_has() -> None:
    prompt = Prompt(IDS, 4, IMAGE, EXTRA, salt_id=1, partial=True)
    keys = split(prompt.keys)
    assert (len(prompt), prompt.partial_tokens, prompt.tokens(2), prompt.tokens(3)) == (3, 3, 8, 11)
    told = prompt.told(keys[1] + keys[2], CacheOptions(event_hash="v1_block_key", keep_tokens=True))
    assert told["tokens"] == np.array(IDS[4:], "<u4").tobytes()
    assert told["token_extra_ids"] == np.array(EXTRA[4:], "<u8").tobytes()
    assert (told["partial_tokens"], told["mm_blocks"], len(told["event_hashes"])) == (3, [0], 16)
    assert "partial_tokens" not in prompt.told(keys[0], KEPT_ALONE)
    assert Prompt(IDS[:8], 4, partial=True).keys == chain_keys(IDS, 4)
    with pytest.raises(InvalidArgument) as refused:
        prompt.told(keys[2] + keys[1], KEPT_ALONE)
    assert refused.value.field == "keys"


@pytest.mark.parametrize(
    ("prompt", "blocks", "tokens"),
    [
        (Prompt(IDS, 4), 0, IDS[:3]),
        (Prompt(IDS, 4), 2, IDS[8:]),
        (Prompt(IDS, 4, partial=True), 3, []),
        (Prompt(IDS, 4, IMAGE), 0, IDS[:2]),
        (Prompt(IDS, 4, IMAGE), 1, []),
        (Prompt(IDS, 4, Scope(), EXTRA), 1, IDS[4:5]),
        (Prompt(IDS, 1), 3, []),
    ],
)
def test_the_tokens_that_follow_end_before_those_that_ids_alone_do_not_name(
    prompt: Prompt, blocks: int, tokens: list[int]
) -> None:
    assert prompt.following(blocks) == np.array(tokens, "<u4").tobytes()


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (Prompt(IDS, 4, Scope(salt="x")), HASHED, "salt_id"),
        (Prompt(IDS, 4, Scope(), EXTRA), KEPT, "extra_ids"),
        (Prompt(IDS[1:], 4), HASHED, "prompt"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(prompt: Prompt, options: CacheOptions, field: str) -> None:
    keys = prompt.keys if field != "prompt" else Prompt(IDS, 4).keys
    with pytest.raises(InvalidArgument) as refused:
        prompt.told(keys, options)
    assert refused.value.field == field


def test_bad_tokens_are_refused_at_once() -> None:
    with pytest.raises(InvalidArgument) as refused:
        Prompt([1, -1], 2)
    assert refused.value.field == "token_ids[1]"
