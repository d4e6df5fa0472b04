"""Every benchmark runs, on sizes of no significance, and prints its figures in the documented form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_cuda import fake_environment
from tests.integration.test_cli import kvtier

FIELDS = ["name", "params", "value", "unit", "floor", "ratio"]


def results(*arguments):
    by_name: dict[str, list[dict[str, Any]]] = {}
    for result in json.loads(kvtier("bench", *arguments, "--json").stdout):
        assert list(result) == FIELDS
        assert result["value"] > 0
        if result["floor"] is not None:
            assert result["ratio"] == pytest.approx(result["value"] / result["floor"])
        by_name.setdefault(result["name"], []).append(result)
    return by_name


def test_client():
    found = results("client", "--block-bytes", "4096", "--block-bytes", "65536", "--rounds", "1", "--keys", "128")
    assert set(found) == {"client.store", "client.get", "client.prefix_length"}
    for name in ("client.store", "client.get"):
        rows = [(result["params"]["block_bytes"], result["params"]["checksum"]) for result in found[name]]
        assert rows == [(4096, "disk"), (4096, "commit"), (65536, "disk"), (65536, "commit")]
        assert all(result["floor"] > 0 for result in found[name])


def test_tiers():
    found = results("tiers", "--block-bytes", "65536", "--disk-bytes", str(32 << 20), "--rounds", "1")
    assert set(found) == {f"tiers.{edge}" for edge in ("device>host", "host>device", "host>disk", "disk>host")}
    assert all(result["floor"] > 0 for each in found.values() for result in each)


def test_events():
    found = results("events", "--watchers", "2", "--rounds", "1", "--puts", "8")
    (changes,) = found["events.changes"]
    assert changes["params"] == {"watchers": 2, "changes": 18 * 256}
    assert changes["floor"] > 0


def test_scale():
    found = results("scale", "--blocks", "10000", "--blocks", "12000", "--rounds", "1", "--on-disk", "2048")
    callbacks = {f"scale.callback.{name}" for name in ("p50", "p99", "p99.9", "max")}
    assert set(found) == {"scale.memory", "scale.acquire", "scale.store", "scale.restart", *callbacks}
    for name in ("scale.acquire", "scale.store"):
        smallest, larger = found[name]
        assert (smallest["params"]["blocks"], smallest["ratio"]) == (10_000, 1.0)
        assert (larger["params"]["blocks"], larger["floor"]) == (12_000, smallest["value"])


def test_gpu_on_the_fake(monkeypatch):
    for variable, value in fake_environment(max_delay_ms=0.05).items():
        monkeypatch.setenv(variable, value)
    found = results("gpu", "--shape", "16", "16384", "--batch-bytes", "1", "--rounds", "1", "--settle-seconds", "0")
    assert set(found) == {"gpu.device>host", "gpu.host>device"}
    for each in found.values():
        assert [result["params"] for result in each] == [
            {"pools": 16, "piece_bytes": 16384, "blocks": blocks} for blocks in (1, 8)
        ]
        assert all(result["floor"] > 0 for result in each)


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    for variable, value in fake_environment().items():
        monkeypatch.setenv(variable, value)
    said = kvtier("bench", "gpu", "--device", "cuda:7", status=1)
    assert "there is no GPU to measure" in said.stderr
    assert "cuda:7" in said.stderr


def test_results_are_a_table_without_json():
    said = kvtier("bench", "client", "--block-bytes", "4096", "--rounds", "1", "--keys", "128").stdout
    assert "client.prefix_length" in said
    assert "ratio" in said
