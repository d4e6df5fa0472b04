"""Every benchmark runs, on sizes of no significance, and prints its figures in the documented form."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import fake_environment
from tests.integration.terminal import terminal
from tests.integration.test_cli import DEADLINE_S, kvtier
from tests.integration.waiting import eventually

FIELDS = ["name", "params", "value", "unit", "floor", "ratio"]
TIERS = "from kvtier.bench import host; asyncio.run(host.tiers((65536,), 10**6, 32 << 20))"
EVENTS = "from kvtier.bench import host; asyncio.run(host.events(2, 10**6, 64))"
STOPPED = """from kvtier.replay.private import PrivateDaemon, Tier
async def main():
    async with PrivateDaemon({Tier.HOST: 1 << 20}) as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)
        await asyncio.sleep(600)
asyncio.run(main())"""


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
    names = ("first_fill", "store", "store_full", "get", "put_one", "call", "daemon_cpu")
    assert set(found) == {f"client.{name}" for name in names}
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


def processes(directory):
    """The processes whose temporary directory this is, or was: command lines by pid."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={directory}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().decode()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            pass
    return found


@pytest.mark.parametrize(
    ("work", "number"),
    [
        *((TIERS, number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)),
        *((EVENTS, number) for number in (signal.SIGINT, signal.SIGKILL)),
        (STOPPED, signal.SIGKILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value.split()[-1].split("(")[0],
)
async def test_nothing_is_left_of_private_daemons(work, number):
    """Neither a process nor a file, whatever ends the process that started the daemon."""

    def started():
        names = "".join(processes(home).values())
        return {
            TIERS: bool(list(home.glob("*/raw"))),
            EVENTS: names.count("import spawn_main") == 2 and bool(list(home.glob("*/run/attach.sock"))),
            STOPPED: any("State:\tT" in Path(f"/proc/{pid}/status").read_text() for pid in processes(home)),
        }[work]

    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        home = Path(name)
        own_signals = ("env", "--default-signal=INT,TERM,HUP")  # a test run under nohup ignores SIGHUP
        command = [*own_signals, sys.executable, "-c", f"import asyncio, os, signal\n{work}"]
        env = {**os.environ, "TMPDIR": name}
        with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:  # noqa: ASYNC220
            try:
                await eventually(started, bool)
            finally:
                process.send_signal(number)
        await eventually(lambda: processes(home), lambda left: not left)
        assert os.listdir(name) == []


def test_results_are_a_table_after_a_bar_on_a_terminal():
    bench = ("bench", "client", "--block-bytes", "4096", "--rounds", "1")
    with terminal(*bench) as shown:
        shown.until("measurement 1 ")
        shown.until("client.daemon_cpu")
        assert shown.ended() == 0
    piped = kvtier(*bench)
    assert piped.stderr == ""
    assert "ratio" in piped.stdout
