"""SGLang on kvtier: a real engine on the CPU computes the same tokens whatever happens below it."""

import json
import os
import random
import re
import shlex
import subprocess
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier import Tier, connect
from tests.engines.conftest import require
from tests.engines.engines import ROOT, Answer, Engine, assert_same
from tests.engines.hosts import daemon_on
from tests.engines.serving import changed, command_of_the_page, free_port, running, serving
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.limit(400)]

PAGE = 16
SHARED = 160
FULL = 288
"""Tokens of a prompt of 300 that whole pages have."""
EACH = [FULL] * 4
LOADED = FULL + 3 * (FULL - SHARED)
"""Tokens of ``prompts`` that come from kvtier: the engine itself has what the first prompt shares with the others."""
PAGES = (SHARED + 4 * (304 - SHARED)) // PAGE
"""Stored of ``prompts``, with the page that the first tokens of an answer fill."""
HICCUP_S = 2.5


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(3, 512) for _ in range(SHARED)]
    return [shared + [draw.randrange(3, 512) for _ in range(300 - SHARED)] for _ in range(4)]


@pytest.fixture(scope="module")
def python(engines):
    return require(engines, "sglang")


@pytest.fixture(scope="module")
def daemon():
    with daemon_on(None, {Tier.HOST: 256 << 20, Tier.DISK: 512 << 20}, []) as daemon:
        yield daemon


@pytest.fixture
def arguments(daemon, make_model):
    """Of ``sglang.Engine``. ``settings``: kvtier's, besides the address."""

    def arguments(settings: dict[str, Any], kind: str = "llama") -> dict[str, Any]:
        backend = {
            "backend_name": "kvtier",
            "module_path": "kvtier.connectors.sglang",
            "class_name": "KvtierHiCache",
            "interface_v1": 1,
            "prefetch_threshold": PAGE,
            "kvtier": {"address": daemon.address, "host_bytes": 32 << 20, "disk_bytes": 64 << 20} | settings,
        }
        return {
            "model_path": str(make_model(kind)),
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "page_size": PAGE,
            "context_length": 1024,
            "log_level": "warning",
            "max_total_tokens": 4096,
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "hicache_write_policy": "write_through",
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(backend),
        }

    return arguments


@pytest.fixture
def path(engines):
    """Where an engine's Python finds kvtier, SGLang and what lets it run on the CPU."""
    paths = [ROOT / "client", ROOT, engines / "sglang", ROOT / "tests/engines/sglang_cpu"]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths))}


@pytest.fixture
def start(python, arguments, path, tmp_path):
    """Starts an engine that is ended with the test."""
    with ExitStack() as stack:

        def start(settings: dict[str, Any], variables: dict[str, str] | None = None, **more: Any) -> Engine:
            log = tmp_path / f"{settings['cache']}.log"
            words = [python, ROOT / "tests/engines/sglang_runner.py", json.dumps(arguments(settings) | more)]
            return stack.enter_context(running(words, log, path | (variables or {})))

        yield start


async def stored(daemon: DaemonProcess, prefix: str, tier: Tier = Tier.DISK) -> int:
    """Blocks in a tier of the caches whose names begin so."""
    async with await connect(daemon.address) as client:
        stats = await client.stats()
    tiers = [each for cache in stats.caches if cache.name.startswith(prefix) for each in cache.tiers]
    return sum(each.ready for each in tiers if each.tier is tier)


async def until_stored(daemon: DaemonProcess, prefix: str, blocks: int) -> None:
    await eventually(lambda: stored(daemon, prefix), lambda found: found == blocks)


async def test_a_restarted_engine_loads_what_the_last_one_computed(start, daemon):
    engine = start({"cache": "restart", "on_error": "fail"})
    cold = engine.generate(prompts(1))
    assert (cold.cached, cold.external) == ([0, SHARED, SHARED, SHARED], 0)
    await until_stored(daemon, "restart", PAGES)
    engine.kill()

    engine = start({"cache": "restart", "on_error": "fail"})
    warm = engine.generate(prompts(1))
    assert (warm.cached, warm.external) == (EACH, LOADED), engine.log
    assert_same(warm, cold)

    daemon.kill()  # what is in mapped memory is there all the same
    engine.forget()
    alone = engine.generate(prompts(1))
    assert (alone.cached, alone.external) == (EACH, 2 * LOADED), engine.log
    assert_same(alone, cold)
    new = engine.generate(prompts(2))
    assert alone.seconds + new.seconds < 2 * warm.seconds + HICCUP_S

    daemon.start()

    def again() -> Answer:
        engine.forget()
        return engine.generate(prompts(2))

    back = await eventually(again, lambda answer: answer.cached == EACH)
    assert_same(back, new)

    daemon.pause()
    engine.forget()
    silent = engine.generate(prompts(1))
    later = engine.generate(prompts(3))
    daemon.resume()
    assert_same(silent, cold)
    assert silent.seconds + later.seconds < 2 * warm.seconds + HICCUP_S
    engine.close()


async def test_failures_and_delays_of_the_storage_change_no_token(start, daemon):
    faults = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3"}
    engine = start({"cache": "faults", "on_error": "fail"}, faults, hicache_mem_layout="layer_first")
    cold = engine.generate(prompts(1))
    loaded = 0
    for _ in range(5):
        engine.forget()
        answer = engine.generate(prompts(1))
        assert [each.tokens for each in answer.completions] == [each.tokens for each in cold.completions]
        loaded = answer.external
    assert loaded > 0, engine.log


async def test_an_engine_starts_without_a_daemon_and_finds_it_later(start, daemon):
    daemon.stop()
    engine = start({"cache": "late"})
    first = engine.generate(prompts(1))
    assert first.external == 0
    assert "runs without kvtier's cache late-" in engine.log
    daemon.start()

    def again() -> Answer:
        engine.forget()
        return engine.generate(prompts(1))

    found = await eventually(again, lambda answer: answer.cached == EACH)
    assert_same(found, first)


def test_the_command_of_the_page_serves(python, path, make_model, daemon):
    """``sglang.launch_server`` as docs/engines.md has it, with less memory and on the CPU."""
    small = {"address": daemon.address, "host_bytes": 32 << 20, "disk_bytes": 64 << 20}
    page = changed(
        command_of_the_page("python -m sglang.launch_server"), "--hicache-storage-backend-extra-config", small, "kvtier"
    )
    page[page.index("--model-path") + 1] = str(make_model("llama"))
    cpu = shlex.split(
        "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph "
        "--disable-overlap-schedule --page-size 16 --context-length 1024 --max-total-tokens 4096 --host 127.0.0.1"
    )
    with serving([python, *page[1:], *cpu, "--port", free_port()], path, "The server is fired up") as said:
        assert re.search(r"kvtier: cache \S+, 32.0 MiB host, 64.0 MiB disk, daemon at ", said), said


@pytest.fixture
def in_pools(python, path, daemon, make_model):
    """Runs ``sglang_pools.py``; its end and all that it wrote."""

    def in_pools(what: str, **settings: Any) -> tuple[int, str]:
        given = {"address": daemon.address, "host_bytes": 8 << 20, "disk_bytes": 16 << 20} | settings
        command = [python, ROOT / "tests/engines/sglang_pools.py", what, make_model("llama"), json.dumps(given)]
        ended = subprocess.run(
            command, env=os.environ | path, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return ended.returncode, ended.stdout.decode()

    return in_pools


@pytest.mark.parametrize("what", ["window", "states", "ranks"])
def test_pools_have_windows_or_states_and_ranks_share_what_they_have_alike(in_pools, daemon, what):
    status, said = in_pools(what, on_error="fail")
    assert (status, said.splitlines()[-1]) == (0, "ok"), said


async def test_pages_come_from_another_host(in_pools, tmp_path):
    (tmp_path / "store").mkdir()
    flags = ["--remote", json.dumps({"url": f"file://{tmp_path}/store", "write": "through"})]
    for what in ("put", "fetch"):
        with daemon_on(None, {Tier.HOST: 16 << 20, Tier.DISK: 32 << 20}, flags) as daemon:
            status, said = in_pools(what, address=daemon.address, on_error="fail")
            assert (status, said.splitlines()[-1]) == (0, "ok"), said
            await eventually(lambda: sum(each.is_file() for each in tmp_path.rglob("*")), lambda found: found >= 6)


@pytest.mark.parametrize(
    ("setting", "limit"),
    [
        ({"hots_bytes": 5}, "left out: settings are address, cache, disk_bytes"),
        ({"host_bytes": 5}, "at least 16384: a block of each group of layers"),
    ],
)
def test_a_wrong_setting_is_one_line(in_pools, daemon, setting, limit):
    message = f"kvtier setting {next(iter(setting))} = 5: must be {limit}"
    status, said = in_pools("off", **setting)
    assert (status, said.splitlines()[-1]) == (0, "ok"), said
    assert said.count(f"SGLang runs without kvtier: {message}") == said.count("without kvtier") == 1
    status, said = in_pools("off", **setting, on_error="fail")
    assert status != 0
    assert f"InvalidArgument: {message}" in said
