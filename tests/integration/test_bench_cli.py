"""Every benchmark runs, on sizes of no significance, and says what it measured in the one form there is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_cuda import fake_environment
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.test_cli import kvtier

FIELDS = ["name", "params", "value", "unit", "floor", "ratio"]


def results(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    """By name. Absolute figures mean nothing here; that they are figures does."""
    listed = json.loads(kvtier("bench", *arguments, "--json").stdout)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for result in listed:
        assert list(result) == FIELDS
        assert result["value"] > 0
        if result["floor"] is not None:
            # Both are rounded to five digits.
            assert abs(result["ratio"] - result["value"] / result["floor"]) <= 1e-3 * result["ratio"]
        by_name.setdefault(result["name"], []).append(result)
    return by_name


def test_client_with_a_daemon_of_its_own() -> None:
    sizes = ("--block-bytes", "4KiB", "--block-bytes", "64KiB", "--entries", "10000")
    found = results("client", *sizes, "--rounds", "2")
    by_size = {f"client.{name}" for name in ("acquire_release", "load", "match", "store", "store_pipelined", "get")}
    long = {f"client.{name}" for name in ("match.long", "locate", "keys")}
    assert set(found) == by_size | long | {f"client.prefix_length.{part}" for part in ("all", "half", "none")}
    for name, each in found.items():
        if name in by_size:
            assert [r["params"]["block_bytes"] for r in each] in ([4096, 65536], [4096] * 3 + [65536] * 3)
        assert all(result["floor"] > 0 for result in each)


async def test_client_leaves_nothing_in_a_daemon_that_runs(start_daemon: StartDaemon) -> None:
    daemon: DaemonProcess = start_daemon(device=1024)
    assert results("client", "--address", daemon.address, "--block-bytes", "4KiB", "--rounds", "1")
    (cache,) = json.loads(kvtier("cache", "ls", "--json", "--address", daemon.address).stdout)
    assert cache["blocks"] == 0


def test_tiers_measures_every_edge_there_is() -> None:
    found = results("tiers", "--block-bytes", "256KiB", "--disk-bytes", "64MiB", "--rounds", "1")
    edges = {"device>host", "host>device", "host>disk", "disk>host", "device>disk", "disk>device"}
    assert set(found) == {f"tiers.{edge}" for edge in edges}
    assert all(result["floor"] > 0 for each in found.values() for result in each)
    assert found["tiers.host>disk"][0]["params"]["recycled_bytes"] == 64 << 20


def test_sizes_that_the_disk_cannot_have_are_refused() -> None:
    said = kvtier("bench", "tiers", "--block-bytes", "1000", status=1)
    assert "block_bytes" in said.stderr


def test_scale_says_how_each_cost_grows() -> None:
    found = results("scale", "--blocks", "4096", "--blocks", "8192", "--rounds", "2", "--no-disk")
    operations = {"match", "acquire_release", "commit", "evict"}
    named = {f"scale.{where}.{what}" for where in ("core", "client") for what in operations}
    assert set(found) == named | {"scale.core.memory", "scale.daemon.memory", "scale.daemon.itself"}
    for name in named:
        smallest, larger = found[name]
        assert (smallest["params"]["blocks"], smallest["ratio"]) == (4096, 1.0)
        assert (larger["params"]["blocks"], larger["floor"]) == (8192, smallest["value"])


@pytest.mark.long
def test_scale_with_a_disk_says_how_soon_it_serves_again() -> None:
    found = results("scale", "--blocks", "4096", "--rounds", "2")
    assert [result["params"]["blocks"] for result in found["scale.restart"]] == [4096]
    assert {"scale.stop", "scale.daemon.memory", "scale.daemon.itself"} <= set(found)


def test_latency_is_that_of_a_loaded_daemon() -> None:
    found = results("latency", "--block-bytes", "4KiB", "--rounds", "1", "--seconds", "0.5")
    edges = {f"latency.load.{edge}" for edge in ("device>host", "host>disk", "disk>device", "disk>host", "host>device")}
    quantiles = {f"latency.callback.{name}" for name in ("p50", "p99", "p99.9", "max")}
    assert set(found) == edges | quantiles | {"latency.match.p50", "latency.match.p99"}
    (p50,), (p99,) = found["latency.match.p50"], found["latency.match.p99"]
    assert 0 < p50["value"] <= p99["value"]
    assert 0 < p50["floor"] <= p99["floor"]
    assert found["latency.callback.max"][0]["params"]["callbacks"] > 100


def test_a_restart_is_seen_by_a_caller_and_by_a_reader() -> None:
    found = results("restart", "--blocks", "640", "--rounds", "1")
    times = {f"restart.{what}" for what in ("answered", "answered.cpu", "matched", "matched.cpu")}
    assert set(found) == times | {"restart.read", "restart.longest_read"}
    (read,) = found["restart.read"]
    said = {name: read["params"][name] for name in ("blocks", "short", "wrong", "errors", "calls")}
    assert said == {"blocks": 640, "short": 0, "wrong": 0, "errors": 0, "calls": 0}
    assert found["restart.answered"][0]["value"] <= found["restart.matched"][0]["value"]


def test_a_gpu_is_measured_each_way_and_both_ways_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in fake_environment(max_delay_ms=0.05).items():
        monkeypatch.setenv(variable, value)
    little = ("--batch-bytes", "1", "--rounds", "1", "--swaps", "2", "--settle-seconds", "0")
    found = results("gpu", "--fragment-bytes", "16KiB", *little)
    shapes = [(256 << 10, 16, 16 << 10, 8)]
    for name in ("gpu.device>host.copy", "gpu.device>host.move", "gpu.host>device.copy", "gpu.host>device.move"):
        assert [_shape(result) for result in found.pop(name)] == shapes
    both = found.pop("gpu.both.move")
    assert [_shape(result) for result in both] == shapes
    assert all(result["params"]["bare_ratio"] > 0 for result in both)
    swaps = {f"gpu.{edge}.swap.{q}" for edge in ("device>host", "host>device") for q in ("p50", "p99")}
    assert set(found) == swaps
    for name in swaps:
        (swap,) = found[name]
        assert swap["params"]["above_us"] == pytest.approx(swap["value"] - swap["floor"], abs=1, rel=1e-3)


def _shape(result: dict[str, Any]) -> tuple[int, ...]:
    assert result["floor"] > 0
    return tuple(result["params"][name] for name in ("block_bytes", "pools", "fragment_bytes", "blocks"))


def test_what_of_a_gpu_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = kvtier("bench", "gpu", "--device", "the fast one", status=1)
    assert "there is no GPU to measure" in said.stderr
    for variable, value in fake_environment().items():
        monkeypatch.setenv(variable, value)
    said = kvtier("bench", "gpu", "--device", "cuda:7", status=1)
    assert "there is no GPU to measure" in said.stderr
    assert "cuda:7" in said.stderr


def test_watchers_have_every_event_and_say_what_they_cost() -> None:
    kinds = ("mixed", "pressure")
    traffic = [argument for kind in kinds for argument in ("--traffic", kind)]
    found = results("events", *traffic, "--watchers", "2", "--rounds", "1", "--seconds", "0.2", "--chain", "32")
    compared = {"changes", "daemon_cpu.moved", "daemon_cpu.change", "put.p50", "put.p99"}
    alone = {"delivered", "watcher_cpu.change", "latency.p50", "latency.p99", "catch_up.running", "catch_up.log"}
    assert set(found) == {f"events.{name}" for name in compared | alone}
    for name, each in found.items():
        assert tuple(result["params"]["traffic"] for result in each) == kinds
        assert all((result["floor"] is not None) == (name.removeprefix("events.") in compared) for result in each)
    for changes, delivered in zip(found["events.changes"], found["events.delivered"], strict=True):
        assert delivered["value"] == pytest.approx(2 * changes["value"], rel=1e-3)
