"""Reading traces: the keys are the same in every run, and a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.cli.replay import replay_spec
from kvtier.errors import InvalidArgument
from kvtier.replay.runner import Report
from kvtier.replay.trace import Request, hottest, key_of, read
from kvtier.types import Tier


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


async def test_requests_come_in_order_and_no_more_than_asked(tmp_path: Path) -> None:
    trace = write(tmp_path / "t", *({"timestamp": n, "hash_ids": [0, n + 1]} for n in range(5)))
    assert await read(trace) == [Request((0, n + 1)) for n in range(5)]
    assert await read(trace, 2) == [Request((0, 1)), Request((0, 2))]


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


def test_keys_are_the_same_in_every_run() -> None:
    # Disk tiers outlive runs: pinned.
    assert key_of(0).hex() == "c45db752431f68edcdebaabc0c8fde94ea153e82320a64ecfd81cf8a8aa5bfb4"
    assert len({key_of(n) for n in range(1000)}) == 1000


def test_the_hottest_block_is_the_most_referenced_one() -> None:
    assert hottest([Request((1, 2)), Request((1, 3)), Request((1, 2))]) == 1
    assert hottest([Request((7, 3))]) == 3
    assert hottest([]) is None


@pytest.mark.parametrize("block_bytes", [16, 48, 4096, 16 * 1021, 65536, 1 << 20, 4 << 20, 64 << 20])
def test_a_specification_has_blocks_of_exactly_the_size_asked_for(block_bytes: int) -> None:
    spec = replay_spec(block_bytes)
    assert spec.block_bytes(0) == block_bytes
    assert len(spec.groups[0].pools) == 1


@pytest.mark.parametrize("block_bytes", [0, -16, 8, 17, 16 * 999_983])
def test_sizes_that_no_specification_has_are_refused(block_bytes: int) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        replay_spec(block_bytes)
    assert refusal.value.field == "block_bytes"


def test_the_report_has_exactly_the_fields_promised() -> None:
    report = Report(requests=2, block_refs=10, hits={Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 1}, seconds=0.5)
    assert report.to_json() == {
        "requests": 2,
        "block_refs": 10,
        "hits": {"device": 1, "host": 2, "disk": 1},
        "misses": 6,
        "hit_ratio": 0.4,
        "hits_besides_first": 0,
        "stored": 0,
        "moves": {},
        "removed": 0,
        "verify_failures": 0,
        "seconds": 0.5,
        "requests_per_s": 4.0,
        "events_seen": 0,
        "event_gaps": 0,
        "residency_mismatches": 0,
    }
    assert report.flawless


@pytest.mark.parametrize("fault", ["verify_failures", "event_gaps", "residency_mismatches"])
def test_a_report_with_a_fault_is_not_flawless(fault: str) -> None:
    assert not Report(**{fault: 1}).flawless  # type: ignore[arg-type]
