"""The replay's traces, bytes and report: a bad line is named, and wrong bytes are seen."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.errors import InvalidArgument
from kvtier.replay.runner import ReplayReport
from kvtier.replay.trace import Payload, key_of, read, replay_spec
from kvtier.types import Tier

BLOCK_BYTES = 4096


def contents(key: bytes) -> NDArray[np.uint8]:
    block = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    Payload(BLOCK_BYTES).write(key, block)
    return block


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


async def test_requests_come_in_order_and_no_more_than_asked(tmp_path: Path) -> None:
    trace = write(tmp_path / "t", *({"timestamp": n, "hash_ids": [0, n + 1]} for n in range(5)))
    assert await read(trace) == [(0, n + 1) for n in range(5)]
    assert await read(trace, 2) == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    "line",
    ["not json", "[1]", {"ids": [1]}, {"hash_ids": 5}, {"hash_ids": ["a"]}, {"hash_ids": [-1]}, {"hash_ids": [2**64]},
     {"hash_ids": [1, 2, 1]}, {"hash_ids": [True]}],
)  # fmt: skip
async def test_a_bad_line_is_named(tmp_path: Path, line: object) -> None:
    trace = write(tmp_path / "t", {"hash_ids": [1]}, line)
    with pytest.raises(InvalidArgument, match="t:2"):
        await read(trace)


async def test_a_file_that_cannot_be_read_is_the_caller_s_argument(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="trace"):
        await read(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="trace"):
        await read(tmp_path / "binary")


@pytest.mark.parametrize("block_bytes", [256, 4096, 256 * 1021, 65536, 1 << 20, 4 << 20, 16 << 20])
def test_a_specification_has_blocks_of_exactly_the_size_asked_for(block_bytes: int) -> None:
    spec = replay_spec(block_bytes)
    assert spec.block_bytes(0) == block_bytes
    assert len(spec.groups[0].pools) == 1


@pytest.mark.parametrize("block_bytes", [0, -256, 8, 4097, (16 << 20) + 256])
def test_sizes_that_no_specification_has_are_refused(block_bytes: int) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        replay_spec(block_bytes)
    assert refusal.value.field == "block_bytes"


def test_no_two_places_of_any_blocks_have_the_same_word() -> None:
    words = [contents(key_of(n)).view(np.uint64) for n in range(8)]
    assert len(np.unique(np.concatenate(words))) == 8 * BLOCK_BYTES // 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda block: block ^ (np.arange(BLOCK_BYTES) == 77).astype(np.uint8),
        lambda block: np.roll(block, 8),
        lambda block: np.roll(block, BLOCK_BYTES // 2),
        lambda block: np.concatenate([block[: BLOCK_BYTES // 2]] * 2),
        np.zeros_like,
        lambda block: np.concatenate([block[:-8], np.zeros(8, np.uint8)]),
    ],
    ids=["one bit", "shifted by a word", "halves swapped", "first half twice", "never written", "last word missing"],
)
def test_wrong_bytes_are_seen(damage: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
    block = contents(key_of(1))
    assert Payload(BLOCK_BYTES).matches(key_of(1), block)
    assert not Payload(BLOCK_BYTES).matches(key_of(2), block)
    assert not Payload(BLOCK_BYTES).matches(key_of(1), np.ascontiguousarray(damage(block)))


def test_the_report_as_json() -> None:
    report = ReplayReport(requests=2, block_refs=10, hits={Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 1}, seconds=0.5)
    assert report.to_json() == {
        "requests": 2,
        "block_refs": 10,
        "hits": {"device": 1, "host": 2, "disk": 1},
        "misses": 6,
        "hit_ratio": 0.4,
        "stored": 0,
        "verify_failures": 0,
        "seconds": 0.5,
        "requests_per_s": 4.0,
        "event_gaps": 0,
        "residency_mismatches": 0,
    }
    assert report.flawless


@pytest.mark.parametrize("fault", ["verify_failures", "event_gaps", "residency_mismatches"])
def test_a_report_with_a_fault_is_not_flawless(fault: str) -> None:
    report = ReplayReport()
    setattr(report, fault, 1)
    assert not report.flawless
