import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.keys import KeyChainError, MultimodalItem, Scope, chain_keys, root
from kvtier.wire import split_keys as split

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)
scopes = st.builds(
    Scope,
    lora_id=st.none() | st.integers(0, 2**64 - 1),
    salt=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
CAT, DOG = b"c" * 32, b"d" * 32


def little(value, size):
    return value.to_bytes(size, "little")


def packed(*ids):
    return b"".join(little(token, 4) for token in ids)


def test_chain_is_the_documented_encoding():
    # Written out by hand, so that it depends on nothing of the module.
    scope_bytes = (
        b"kvtier.scope" + little(1, 4) + b"\x01" + little(7, 8) + b"\x01" + little(6, 4) + b"tenant" + little(0, 4)
    )
    parent = hashlib.sha256(scope_bytes).digest()
    first = hashlib.sha256(parent + packed(1, 2, 3)).digest()
    second = hashlib.sha256(first + packed(4, 2**32 - 1, 0)).digest()

    scope = Scope(lora_id=7, salt="tenant")
    assert root(scope) == parent
    assert chain_keys([1, 2, 3, 4, 2**32 - 1, 0, 99], 3, scope) == first + second


def test_blocks_under_items_and_extra_ids_have_the_documented_encoding():
    # Tokens 3 to 7 are a cat, 8 and 9 a dog; token 5 has an extra id.
    scope = Scope(multimodal=(MultimodalItem(CAT, 3, 5), MultimodalItem(DOG, 8, 2)))
    extra = [0, 0, 0, 0, 0, 2**64 - 1, 0, 0, 0, 0, 0, 0]

    def covered(digest, offset, position, tokens):
        return digest + little(offset, 8) + little(position, 4) + little(tokens, 4)

    ids = [bytes(8)] * 4
    ids[1] = little(2**64 - 1, 8)
    tails = [
        b"kvtier.block\x00" + little(1, 4) + covered(CAT, 0, 3, 1),
        b"kvtier.block\x01" + b"".join(ids) + little(1, 4) + covered(CAT, 1, 0, 4),
        b"kvtier.block\x00" + little(1, 4) + covered(DOG, 0, 0, 2),
    ]
    parent, expected = root(scope), b""
    for start, tail in zip((0, 4, 8), tails, strict=True):
        parent = hashlib.sha256(parent + packed(*range(start, start + 4)) + tail).digest()
        expected += parent
    assert chain_keys(range(12), 4, scope, extra) == expected


def test_pinned_vector():
    """Stored blocks are found by it: this value never changes."""
    assert chain_keys(range(32), 16)[32:].hex() == "f1ad630e3ab65ea9023738c88380c20082c1a5a1af551302f167dbc1be878cd9"


@given(tokens, st.integers(0, 60), st.integers(1, 9), scopes)
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(ids, cut, step, scope):
    whole = chain_keys(ids, step, scope)
    part = chain_keys(ids[:cut], step, scope)
    assert whole.startswith(part)
    assert len(whole) == len(ids) // step * 32


@given(tokens.filter(bool), st.integers(1, 4), st.data())
def test_one_changed_token_changes_its_block_and_all_after(ids, step, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[at] ^= 1
    before, after = split(chain_keys(ids, step)), split(chain_keys(changed, step))
    assert before[: at // step] == after[: at // step]
    assert all(a != b for a, b in zip(before[at // step :], after[at // step :], strict=True))


@given(scopes, scopes)
def test_different_scopes_share_no_key(one, other):
    ones, others = split(chain_keys(range(8), 2, one)), split(chain_keys(range(8), 2, other))
    assert (one == other) == (ones == others) == bool({*ones} & {*others})


@given(tokens.filter(bool), st.integers(1, 4), st.data())
def test_blocks_before_an_item_are_shared_and_none_from_there_on(ids, step, data):
    first = data.draw(st.integers(0, len(ids) - 1))
    count = data.draw(st.integers(1, len(ids)))
    chains = [
        split(chain_keys(ids, step, scope))
        for scope in (
            Scope(),
            Scope(multimodal=(MultimodalItem(CAT, first, count),)),
            Scope(multimodal=(MultimodalItem(DOG, first, count),)),
        )
    ]
    shared = first // step
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert chains[one][:shared] == chains[other][:shared]
        assert not {*chains[one][shared:]} & {*chains[other][shared:]}


def test_where_an_item_starts_decides():
    """The same placeholder tokens, the same image, one token further right."""
    one, other = (Scope(multimodal=(MultimodalItem(CAT, first, 6),)) for first in (4, 5))
    assert not {*split(chain_keys([9] * 16, 4, one))[1:]} & {*split(chain_keys([9] * 16, 4, other))[1:]}


@given(tokens.filter(bool), st.integers(1, 4), st.data())
def test_an_extra_id_changes_its_block_and_all_after(ids, step, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    extra = [0] * len(ids)
    assert chain_keys(ids, step, Scope(), extra) == chain_keys(ids, step)
    extra[at] = data.draw(st.integers(1, 2**64 - 1))
    before, after = split(chain_keys(ids, step)), split(chain_keys(ids, step, Scope(), extra))
    assert before[: at // step] == after[: at // step]
    assert all(a != b for a, b in zip(before[at // step :], after[at // step :], strict=True))


@given(tokens, st.integers(2, 6), scopes)
def test_a_partial_block_has_the_documented_key_and_no_other_block_has_it(ids, step, scope):
    full, left = divmod(len(ids), step)
    keys = split(chain_keys(ids, step, scope, partial=True))
    assert b"".join(keys[:full]) == chain_keys(ids, step, scope)
    assert len(keys) == full + (left > 0)
    if left and not scope.multimodal:
        above = keys[full - 1] if full else root(scope)
        own = np.array(ids[full * step :], "<u4").tobytes()
        assert keys[full] == hashlib.sha256(above + own + b"kvtier.partial" + left.to_bytes(4, "little")).digest()
    shorter = {key for count in range(len(ids)) for key in split(chain_keys(ids[:count], step, scope, partial=True))}
    others = shorter | set(split(chain_keys(ids, max(left, 1), scope)))
    assert left == 0 or keys[full] not in others


def test_no_full_block_is_hashed_from_the_bytes_of_a_partial_one():
    """Its tokens may be any numbers, those of the ending of a partial block among them."""
    ending = b"kvtier.partial" + (1).to_bytes(4, "little")
    spelled = np.frombuffer((5).to_bytes(4, "little") + ending + bytes(2), "<u4")
    partial = chain_keys([5], len(spelled), partial=True)
    assert partial != chain_keys(spelled, len(spelled))
    assert partial == hashlib.sha256(root(Scope()) + spelled.tobytes()[: 4 + len(ending)]).digest()


def test_of_an_item_a_partial_block_knows_what_it_has_of_it():
    long, short = (Scope(multimodal=(MultimodalItem(b"i" * 32, 5, tokens),)) for tokens in (4, 2))
    ids, extra = range(7), [0, 0, 0, 0, 0, 0, 9]
    assert chain_keys(ids, 4, long, partial=True) == chain_keys(ids, 4, short, partial=True)
    assert chain_keys(range(5), 4, long, partial=True) == chain_keys(range(5), 4, partial=True)
    assert chain_keys(ids, 4, extra_ids=extra, partial=True)[32:] != chain_keys(ids, 4, partial=True)[32:]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32, np.uint16, np.uint64, np.dtype(">i4")])
def test_keys_do_not_depend_on_how_tokens_are_held(dtype):
    ids = [0, 1, 300, 65535, 5, 6]
    held = np.array(ids, dtype=dtype)
    assert chain_keys(held, 2) == chain_keys(ids, 2) == chain_keys(tuple(ids), 2)
    assert chain_keys(np.repeat(held, 2)[::2], 2) == chain_keys(ids, 2)


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ([5, -1], "token_ids[1]"),
        ([5, 2**32], "token_ids[1]"),
        ([5, 2**70], "token_ids[1]"),
        ([-1, 2**63], "token_ids[0]"),
        ([5, 1.5], "token_ids[1]"),
        ([True, False], "token_ids[0]"),
        (np.array([5, -1]), "token_ids[1]"),
        (np.array([5, 2**32], dtype=np.uint64), "token_ids[1]"),
        (np.array([5.0, 6.0]), "token_ids[0]"),
        (np.array([[1, 2]]), "token_ids"),
        ([[1, 2], [3]], "token_ids"),
        ("12", "token_ids"),
    ],
)
def test_bad_tokens_are_refused_by_name(ids, field):
    with pytest.raises(KeyChainError) as refused:
        chain_keys(ids, 1)
    assert refused.value.field == field


@pytest.mark.parametrize("step", [0, -16, 1.0, 2**33])
def test_bad_tokens_per_block(step):
    with pytest.raises(KeyChainError, match="tokens_per_block"):
        chain_keys([1, 2], step)


@pytest.mark.parametrize(
    ("scope", "field"),
    [
        ({"lora_id": -1}, "scope.lora_id"),
        ({"lora_id": 2**64}, "scope.lora_id"),
        ({"lora_id": "tenant-a"}, "scope.lora_id"),
        ({"salt": b"tenant-a"}, "scope.salt"),
        ({"multimodal": (5,)}, "scope.multimodal"),
        ({"salt": "\ud800"}, "scope.salt"),
        ({"multimodal": (MultimodalItem(b"cat", 0, 1),)}, "scope.multimodal[0].digest"),
        ({"multimodal": (MultimodalItem(CAT, -1, 1),)}, "scope.multimodal[0].first_token"),
        ({"multimodal": (MultimodalItem(CAT, 0, 0),)}, "scope.multimodal[0].tokens"),
        ({"multimodal": (MultimodalItem(CAT, 0, 3), MultimodalItem(DOG, 2, 3))}, "scope.multimodal[1].first_token"),
    ],
)
def test_bad_scopes(scope, field):
    with pytest.raises(KeyChainError) as refused:
        chain_keys(range(8), 4, Scope(**scope))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("extra", "field"), [([1, 2], "extra_ids"), ([0, 0, 0, -1], "extra_ids[3]"), ([0, 2**64, 0, 0], "extra_ids[1]")]
)
def test_bad_extra_ids(extra, field):
    with pytest.raises(KeyChainError) as refused:
        chain_keys(range(4), 4, Scope(), extra)
    assert refused.value.field == field
