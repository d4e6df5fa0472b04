"""LMCache on kvtier: its own benchmark of L2 adapters, and its server with the client that checks every byte."""

import json
import os
import re
import subprocess

import pytest

from kvtier import Tier
from tests.engines.conftest import require
from tests.engines.engines import ROOT
from tests.engines.hosts import daemon_on
from tests.engines.serving import START_S, changed, command_of_the_page, free_port, serving
from tests.integration.daemon import DaemonProcess

pytestmark = [pytest.mark.engines, pytest.mark.limit(300)]

READY = "Uvicorn running"
SHAPE = ["--kvcache-shape-spec", "(2,128,16,2,32):float16:2", "--num-blocks", "128", "--num-tokens", "512"]


@pytest.fixture(scope="module")
def daemon():
    with daemon_on(None, {Tier.HOST: 256 << 20, Tier.DISK: 512 << 20}, []) as daemon:
        yield daemon


@pytest.fixture
def python(engines):
    return require(engines, "lmcache")


@pytest.fixture
def variables(engines):
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), str(engines / "lmcache")]),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }


@pytest.fixture
def lmcache(python, variables):
    """Runs a command of LMCache, which must succeed, and returns its output."""

    def run(*words: str) -> str:
        command = [str(python), "-m", "lmcache.cli.main", *words]
        done = subprocess.run(
            command,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def adapter(daemon: DaemonProcess, cache: str, **more: object) -> str:
    budgets = {"host_bytes": 64 << 20, "disk_bytes": 128 << 20}
    plugin = {"type": "native_plugin", "module_path": "kvtier.connectors.lmcache", "class_name": "KvtierL2"}
    return json.dumps(plugin | {"adapter_params": {"address": daemon.address, "cache": cache} | budgets | more})


def test_its_benchmark_stores_finds_and_loads(lmcache, daemon):
    plugin = adapter(daemon, "bench", block_bytes=1 << 20)
    # Of 1,500 KiB: an object is two blocks.
    size = ["--num-keys", "8", "--in-flight", "2", "--rounds", "2", "--warmup-rounds", "0", "--data-size-kb", "1500"]
    words = ["bench", "l2", "--l2-adapter", plugin, *size, "--format", "json", "--no-skip-verify"]
    first = lmcache(*words, "--lookup-max-hit-rate", "1.0")
    assert "All 16 keys data verified OK" in first
    assert re.findall(r'"total_success": (\d+)', first) == ["32", "32", "32"], first
    again = lmcache(*words, "--only", "load")
    assert re.findall(r'"total_success": (\d+)', again) == ["32"], again


def test_its_restarted_server_has_what_the_last_one_stored(lmcache, variables, python, daemon):
    """The server is started as docs/engines.md says, with less memory."""
    rpc, http = free_port(), free_port()
    small = {"address": daemon.address, "cache": "server", "host_bytes": 64 << 20, "disk_bytes": 128 << 20}
    page = changed(command_of_the_page("lmcache server"), "--l2-adapter", small, "adapter_params")
    page[page.index("--l1-size-gb") + 1] = "1"
    served = [
        *(python, "-m", "lmcache.cli.main", *page[1:]),
        *("--disable-observability", "--supported-transfer-mode", "engine_driven"),
        *("--host", "127.0.0.1", "--port", rpc, "--http-host", "127.0.0.1", "--http-port", http),
    ]
    asked = ["bench", "server", "--mode", "cpu", *SHAPE, "--start", "0", "--end", "3"]
    asked += ["--rpc-url", f"tcp://127.0.0.1:{rpc}", "--url", f"http://127.0.0.1:{http}"]
    with serving(served, variables, READY):
        first = lmcache(*asked)
        assert hits(first, "cold") == [0, 0, 0]
        assert hits(first, "warm") == [2, 2, 2], "two chunks of 256 tokens"
    with serving(served, variables, READY):  # its own memory is empty
        again = lmcache(*asked)
        assert hits(again, "cold") == [2, 2, 2]
    assert checksums(again) == checksums(first)
    assert len(checksums(first)) == 3


def hits(output: str, phase: str) -> list[int]:
    return [int(found) for found in re.findall(rf"/{phase}\] LOOKUP: (\d+)/2 chunks hit", output)]


def checksums(output: str) -> list[str]:
    """Of what the client has after the second retrieve of each request."""
    return re.findall(r"/warm\] CHECKSUM: ([0-9a-f]+)", output)
