"""What is published is what vLLM publishes: structs of its form read it, of either age, to the field."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvtier.bridge.vllm_form import CLEARED, BlockRemoved, BlockStored, Encoding, VllmEvent, batch_of
from tests import vllm_reader as vllm

NUMBER = 2**64 - 1
STORED = BlockStored(
    block_hashes=[NUMBER, 5],
    parent_block_hash=7,
    token_ids=[1, 2, 3, 4],
    block_size=2,
    lora_id=3,
    medium="CPU",
    lora_name="sql",
    extra_keys=[["sql", "aa" * 32], ["sql"]],
    group_idx=1,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=4096,
    cache_salt="tenant",
)
BARE = BlockStored([b"\xff" * 32], None, [], 2, None, "GPU", None, None, 0, "full_attention", None)
REMOVED = BlockRemoved([NUMBER, b"\x00" * 32], "DISK", 0)
EVENTS: list[VllmEvent] = [STORED, BARE, REMOVED, CLEARED]


def packed(encoding: Encoding, *events: VllmEvent) -> bytes:
    return msgspec.msgpack.encode(batch_of(events, encoding, 12.5, 3))


def test_maps_are_those_of_vllm() -> None:
    batch = vllm.MAPS.decode(packed(Encoding.MAP, *EVENTS))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    stored, bare, removed, cleared = batch.events
    assert stored == vllm.BlockStored(
        block_hashes=[NUMBER, 5],
        parent_block_hash=7,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=3,
        medium="CPU",
        lora_name="sql",
        extra_keys=[("sql", "aa" * 32), ("sql",)],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=4096,
    )
    assert isinstance(bare, vllm.BlockStored)
    assert (bare.block_hashes, bare.parent_block_hash, bare.extra_keys) == ([b"\xff" * 32], None, None)
    assert removed == vllm.BlockRemoved([NUMBER, b"\x00" * 32], "DISK", 0)
    assert cleared == vllm.AllBlocksCleared()


def test_maps_are_byte_for_byte_what_vllm_s_encoder_makes() -> None:
    """But for the salt, which vLLM does not send by name."""
    events: list[VllmEvent] = [replace(STORED, cache_salt=None), BARE, REMOVED, CLEARED]
    payload = packed(Encoding.MAP, *events)
    assert msgspec.msgpack.encode(vllm.MAPS.decode(payload)) == payload


def test_arrays_are_byte_for_byte_what_vllm_s_encoder_made() -> None:
    payload = packed(Encoding.ARRAY, *EVENTS)
    batch = vllm.ARRAYS.decode(payload)
    assert [type(event) for event in batch.events] == [
        vllm.ArrayStored,
        vllm.ArrayStored,
        vllm.ArrayRemoved,
        vllm.ArrayCleared,
    ]
    assert msgspec.msgpack.encode(batch) == payload


def test_the_oldest_readers_understand_arrays() -> None:
    """Further fields are at the end, where a reader of vLLM 0.9 does not look."""
    _, (event,), _ = msgspec.msgpack.decode(packed(Encoding.ARRAY, STORED))
    first = msgspec.convert(event, vllm.FirstStored)
    assert (first.block_hashes, first.token_ids, first.lora_id) == ([NUMBER, 5], [1, 2, 3, 4], 3)


def test_the_salt_stands_in_maps_by_name() -> None:
    """As SGLang sends it; vLLM's readers skip it, as the tests above show."""
    _, (event,), _ = msgspec.msgpack.decode(packed(Encoding.MAP, STORED))
    assert event["cache_salt"] == "tenant"


@pytest.mark.parametrize("encoding", Encoding)
def test_the_rank_is_always_a_number(encoding: Encoding) -> None:
    """AIBrix refuses a null there, Dynamo a batch of two."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch_of([CLEARED], encoding, 0.0, 0)))[2] == 0
