"""Every benchmark runs, on sizes of no significance, and prints its figures in the documented form."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.fake_cuda import fake_environment
from tests.integration.test_cli import DEADLINE_S, kvtier

FIELDS = ["name", "params", "value", "unit", "floor", "ratio"]


def results(measurement):
    """Of a measurement of sizes that the command does not take."""
    imports = "from kvtier.bench import engine, gpu, host; from kvtier.cli.bench import tell"
    code = f"{imports}; tell({measurement}, 'json')"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for result in json.loads(done.stdout):
        assert list(result) == FIELDS
        assert result["value"] > 0
        if result["floor"] is not None:
            assert result["ratio"] == pytest.approx(result["value"] / result["floor"])
        by_name.setdefault(result["name"], []).append(result)
    return by_name


def test_client():
    found = results("host.client((4096, 256 << 10), 1)")
    one = {f"client.put_one{step}" for step in ("", ".reserve", ".commit")}
    assert set(found) == one | {f"client.{name}" for name in ("first_fill", "store", "store_full", "get", "daemon_cpu")}
    assert [result["params"]["block_bytes"] for result in found["client.first_fill"]] == [4096, 256 << 10]
    for name in ("client.store", "client.get"):
        rows = [(result["params"]["block_bytes"], result["params"]["checksum"]) for result in found[name]]
        assert rows == [(4096, "disk"), (4096, "commit"), (256 << 10, "disk"), (256 << 10, "commit")]
        assert all(result["floor"] > 0 for result in found[name])


def test_tiers():
    found = results("host.tiers((65536,), 1, 32 << 20)")
    assert set(found) == {f"tiers.{edge}" for edge in ("host>disk", "disk>host", "sustained")}
    assert all(result["floor"] > 0 for each in found.values() for result in each)


def test_events():
    found = results("host.events(2, 1, 8)")
    (changes,) = found["events.changes"]
    assert changes["params"] == {"watchers": 2, "changes": 18 * 256}
    assert changes["floor"] > 0


def test_scale():
    found = results("host.scale((10_000, 12_000), 1, 2048)")
    assert set(found) == {f"scale.{name}" for name in ("memory", "acquire", "store", "restart")}
    for name in ("scale.acquire", "scale.store"):
        smallest, larger = found[name]
        assert (smallest["params"]["blocks"], smallest["ratio"]) == (10_000, 1.0)
        assert (larger["params"]["blocks"], larger["floor"]) == (12_000, smallest["value"])


def test_engine():
    found = results("engine.engine(20, 2, 8192, 1)")
    assert set(found) == {f"engine.{name}" for name in ("step.p50", "step.p99", "save", "load")}
    for name in ("engine.step.p50", "engine.step.p99"):
        params = [{"blocks": 20, "daemon": state} for state in ("runs", "stopped")]
        assert [result["params"] for result in found[name]] == params
    assert found["engine.save"][0]["params"] == {"planes": 4, "block_bytes": 8192}
    assert all(result["floor"] > 0 for name in ("engine.save", "engine.load") for result in found[name])


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    for variable, value in fake_environment().items():
        monkeypatch.setenv(variable, value)
    said = kvtier("bench", "gpu", "--device", "cuda:7", status=1)
    assert "there is no GPU to measure" in said.stderr
    assert "cuda:7" in said.stderr


def test_results_are_a_table_without_json():
    said = kvtier("bench", "client", "--block-bytes", "4096", "--rounds", "1").stdout
    assert "client.daemon_cpu" in said
    assert "ratio" in said
