"""Measures vLLM without a connector, with kvtier and with others, in turn, on three kinds of traffic.

``python -m benchmarks.vllm .venv-engines``, after ``make test-engines`` has made that environment. The model has random
weights, 8 layers and 8 x 128 heads, and runs on the CPU with a pool of 66 blocks. In a round one engine after the other
answers the same prompts, and each round begins with another engine. Ratios are of two engines in one round.

``cold``: prompts never seen. ``chat``: conversations that share an opening, two requests at a time. ``warm-640``: a
stored prompt of 640 tokens that the engine has forgotten. ``--beside lmcache lmcache-256 mooncake``: connectors with as
much memory as kvtier, all full before the clock. kvtier alone writes to disk, too; ``--disk 0``: it has none. LMCache
keeps chunks of 32 tokens, like vLLM, or of 256, its default. Mooncake is installed before, into a folder of its own:
``pip install --no-deps -t .venv-engines/mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1``, pip of that venv.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final, TypeAlias

import numpy as np

from kvtier import Tier
from kvtier.replay.private import PrivateDaemon
from tests.engines.engines import ROOT, Answer, Engine, Template, environment
from tests.engines.serving import free_port, serving

MEMORY: Final = 512
"""MiB of a connector; a block has one."""
BLOCK: Final = 32
WORDS: Final = range(3, 512)

Connector: TypeAlias = tuple[Mapping[str, Any] | None, Mapping[str, str]]
"""vLLM's ``kv_transfer_config``, and variables of the environment."""
Turn: TypeAlias = tuple[list[list[int]], Answer]
"""Prompts, and their answer."""


def transfer(name: str, module: str | None = None, **settings: Any) -> Mapping[str, Any]:
    connector = {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": settings}
    return {**connector, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


@contextmanager
def lmcache(engines: Path, home: Path, chunk: int) -> Iterator[Connector]:
    port = free_port()
    server = [engines / "bin/python", "-m", "lmcache.cli.main", "server", "--port", port, "--http-port", free_port()]
    server += ["--l1-size-gb", str(MEMORY / 1024), "--eviction-policy", "LRU", "--chunk-size", str(chunk)]
    server += ["--disable-observability", "--max-workers", "2"]
    # The server copies; the other mode, in which the engine does, takes longer here.
    settings = {"port": int(port), "mp_transfer_mode": "lmcache_driven", "save_decode_cache": True}
    settings = {f"lmcache.mp.{name}": value for name, value in {**settings, "eager_prefetch": True}.items()}
    variables = {"PYTHONPATH": str(engines / "lmcache"), "LMCACHE_TRACK_USAGE": "false"}
    with serving(server, variables, "Uvicorn running"):
        yield transfer("LMCacheMPConnector", "benchmarks.lmcache_connector", **settings), variables


@contextmanager
def mooncake(engines: Path, home: Path) -> Iterator[Connector]:
    port, settings = free_port(), home / "mooncake.json"
    master = engines / "mooncake/mooncake/mooncake_master"
    master.chmod(0o755)
    shared = {"metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}", "protocol": "tcp"}
    settings.write_text(json.dumps({**shared, "global_segment_size": f"{MEMORY}MB", "local_buffer_size": "256MB"}))
    server = [master, f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    with serving(server, {}, "Master admin server started"):
        yield transfer("MooncakeStoreConnector"), {"MOONCAKE_CONFIG_PATH": str(settings), "PYTHONHASHSEED": "0"}


OTHERS: Final[Mapping[str, Callable[[Path, Path], AbstractContextManager[Connector]]]] = {
    "lmcache": partial(lmcache, chunk=BLOCK),
    "lmcache-256": partial(lmcache, chunk=256),
    "mooncake": mooncake,
}


def talk(engine: Engine, draw: Random, opening: int, question: int, turns: int) -> Iterator[Turn]:
    """Runs eight conversations with a common opening; each turn adds a question. Lengths are in tokens. Answers differ
    in length: otherwise the two requests at a time would begin and end together."""
    chats = [draw.choices(WORDS, k=opening)] * 8
    for _ in range(turns):
        chats = [chat + draw.choices(WORDS, k=question) for chat in chats]
        answer = engine.generate(chats, draw.choices(range(8, 41), k=8), at_once=2)
        yield chats, answer
        chats = [chat + list(each.tokens) for chat, each in zip(chats, answer.completions, strict=True)]


def warm(engine: Engine, draw: Random, length: int) -> Iterator[Turn]:
    asked = [draw.choices(WORDS, k=length)]
    engine.generate(asked, 1)
    time.sleep(0.2)  # the prompt is stored by then
    engine.forget()
    yield asked, engine.generate(asked, 1)


KINDS: Final[Mapping[str, Callable[[Engine, Random], Iterator[Turn]]]] = {
    "cold": partial(talk, opening=0, question=320, turns=1),
    "chat": partial(talk, opening=256, question=96, turns=4),
    **{f"warm-{length}": partial(warm, length=length) for length in (300, 320, 640, 1280)},
}


def start(template: Template, home: Path, name: str, connector: Connector) -> Engine:
    sizes = {"max_model_len": 2048, "num_gpu_blocks_override": 66, "block_size": BLOCK, "dtype": "float32"}
    more = {"enforce_eager": True, "disable_log_stats": False, "kv_transfer_config": connector[0]}
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **connector[1]}
    return template.start({"model": str(home / "model"), **sizes, **more}, home / f"{name}.log", variables)


def fill(engines: Collection[Engine]) -> None:
    """Fills the connectors' memory, and lets the engines do what they do once."""
    for _ in range(MEMORY // 40):
        for each in engines:
            each.begin([Random().choices(WORDS, k=40 * BLOCK)], 1)
        for each in engines:
            each.answer()
    for each in engines:
        list(warm(each, Random(), 40 * BLOCK))


def measure(engines: Mapping[str, Engine], kind: str, rounds: int) -> None:
    names, runs = list(engines), {name: list[list[Turn]]() for name in engines}
    for number in range(rounds):
        for name in sorted(names, key=lambda name: (names.index(name) + number) % len(names)):
            runs[name].append(list(KINDS[kind](engines[name], Random(f"{kind} {number}"))))
    asked = [len(each) for prompts, _ in runs[names[0]][0] for each in prompts]
    seconds = {name: np.array([sum(answer.seconds for _, answer in run) for run in runs[name]]) for name in names}
    print(f"\n{kind}: {rounds} rounds of {len(asked)} requests, {sum(asked)} tokens; load {os.getloadavg()[1]:.1f}")
    print(f"{'':12}requests/s  first token p50  p99 ms   hits", *(f"time / {name}'s".center(21) for name in names))
    for name in names:
        done = [each for run in runs[name] for _, answer in run for each in answer.completions]
        row = [len(asked) / median(seconds[name]), *np.percentile([1e3 * each.first_s for each in done], (50, 99))]
        row.append(sum(each.cached for each in done) / rounds)
        quartiles = [np.percentile(seconds[name] / seconds[other], (25, 50, 75)) for other in names]
        columns = [" ".join(f"{each:6.3f}" for each in three) for three in quartiles]
        print("{:12}{:10.2f}{:17.0f}{:8.0f}{:7.0f}".format(name, *row), *columns, sep="  ", flush=True)


def compare(home: Path, address: str, engines: Path, asked: argparse.Namespace) -> None:
    python = engines / "bin/python"
    make = (python, ROOT / "tests/engines/models.py", "medium", home / "model")
    subprocess.run(make, env=environment(), check=True, capture_output=True)
    template = Template(python, "vllm_runner.py", home / "template.log", engines / "lmcache", engines / "mooncake")
    with ExitStack() as stack:
        stack.callback(template.close)
        ours = transfer("KvtierConnector", "kvtier.connectors.vllm", address=address)
        connectors: dict[str, Connector] = {"plain": (None, {}), "kvtier": (ours, {})}
        connectors |= {name: stack.enter_context(OTHERS[name](engines, home)) for name in asked.beside}
        running = {name: stack.enter_context(start(template, home, name, each)) for name, each in connectors.items()}
        fill(running.values())
        for kind in asked.measure:
            measure(running, kind, asked.rounds)


async def main(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as home:
        async with PrivateDaemon({Tier.HOST: MEMORY << 20, Tier.DISK: asked.disk << 30}) as daemon:
            await asyncio.to_thread(compare, Path(home), daemon.address, asked.engines.absolute(), asked)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--beside", nargs="+", choices=OTHERS, default=[])
    parser.add_argument("--measure", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk", type=int, default=4, metavar="GIB")
    asyncio.run(main(parser.parse_args()))
