"""Measures vLLM with kvtier and without, in turn: the cost where no block is stored, and the time to the first token.

``python -m benchmarks.vllm .venv-engines``, after ``make test-engines`` has made that environment. The model has random
weights, 8 layers and 8 x 128 heads, and runs on the CPU. A warm prompt comes from kvtier: the engine has forgotten it.

``--beside lmcache lmcache-256 mooncake``: other connectors take turns with it, each with 1 GiB of memory. LMCache keeps
chunks of 32 tokens, like vLLM, or of 256, its default. Mooncake is installed before, into a folder of its own:
``.venv-engines/bin/pip install --no-deps -t .venv-engines/mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

from kvtier import Tier
from kvtier.replay.private import PrivateDaemon
from tests.engines.engines import ROOT, Engine, Template, environment
from tests.engines.serving import free_port, serving

LENGTHS: Final = (300, 320, 640, 1280)
"""Tokens of the prompts."""
BATCH: Final = 4
BLOCK: Final = 32
TRIES: Final = 5
SIZES: Final = {Tier.HOST: 1 << 30, Tier.DISK: 4 << 30}

Connector: TypeAlias = tuple[Mapping[str, Any], Mapping[str, str]]
"""vLLM's ``kv_transfer_config``, and variables of the environment."""


def ours(address: str) -> Connector:
    transfer = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address},
    }
    return transfer, {}


@contextmanager
def lmcache(engines: Path, home: Path, chunk: int) -> Iterator[Connector]:
    port = free_port()
    server = [engines / "bin/python", "-m", "lmcache.cli.main", "server", "--port", port, "--http-port", free_port()]
    server += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--chunk-size", str(chunk), "--disable-observability"]
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "benchmarks.lmcache_connector",
        # The server copies; the other mode, in which the engine does, takes longer here.
        "kv_connector_extra_config": {"lmcache.mp.port": int(port), "lmcache.mp.mp_transfer_mode": "lmcache_driven"},
    }
    variables = {"PYTHONPATH": str(engines / "lmcache"), "LMCACHE_TRACK_USAGE": "false"}
    with serving(server, variables, "Uvicorn running"):
        yield transfer, variables


@contextmanager
def mooncake(engines: Path, home: Path) -> Iterator[Connector]:
    port, settings = free_port(), home / "mooncake.json"
    master = engines / "mooncake/mooncake/mooncake_master"
    master.chmod(0o755)
    shared = {"metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}", "protocol": "tcp"}
    settings.write_text(json.dumps({**shared, "global_segment_size": "1GB", "local_buffer_size": "256MB"}))
    variables = {"MOONCAKE_CONFIG_PATH": str(settings), "PYTHONHASHSEED": "0"}
    server = [master, f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    with serving(server, variables, "Master admin server started"):
        yield {"kv_connector": "MooncakeStoreConnector"}, variables


OTHERS: Final[Mapping[str, Callable[[Path, Path], AbstractContextManager[Connector]]]] = {
    "lmcache": partial(lmcache, chunk=BLOCK),
    "lmcache-256": partial(lmcache, chunk=256),
    "mooncake": mooncake,
}


def prompt(length: int) -> list[int]:
    """Returns a new prompt."""
    return [random.randrange(3, 512) for _ in range(length)]


def engine(template: Template, model: Path, log: Path, connector: Connector) -> Engine:
    transfer, variables = connector
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "disable_log_stats": False,
        "block_size": BLOCK,
        **({"kv_transfer_config": {**transfer, "kv_role": "kv_both"}} if transfer else {}),
    }
    started = template.start(arguments, log, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables})
    for _ in range(2):  # lets the engine do what it does once
        started.generate([prompt(LENGTHS[-1])], 2)
        started.forget()
    return started


def warm_s(engine: Engine, tokens: list[int]) -> float:
    """Returns the seconds to the first token of a stored prompt. A store may end after the answer: then it repeats."""
    engine.generate([tokens], 1)
    for _ in range(TRIES):
        engine.forget()
        (warm,) = engine.generate([tokens], 1).completions
        if 4 * warm.cached >= 3 * len(tokens):
            return warm.first_s
    raise AssertionError(f"{len(tokens)} tokens are not stored\n{engine.log}")


def measure(plain: Engine, engines: Mapping[str, Engine], rounds: int) -> None:
    costs: defaultdict[str, list[float]] = defaultdict(list)
    firsts: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        taken = {
            name: each.generate([prompt(LENGTHS[1]) for _ in range(BATCH)], 16, together=True).seconds
            for name, each in {"computed": plain, **engines}.items()
        }
        for name, seconds in taken.items():
            costs[name].append(seconds / taken["computed"])
    for length in [length for length in LENGTHS for _ in range(rounds)]:
        asked = prompt(length)
        firsts["computed", length].append(plain.generate([asked], 1).completions[0].first_s)
        for name, each in engines.items():
            firsts[name, length].append(warm_s(each, asked))
    print(f"medians of {rounds}: time without a hit / time without a connector; ms to the first token of a warm prompt")
    print(f"{'':14}{'no hit':>8}" + "".join(f"{f'{length} tokens':>13}" for length in LENGTHS))
    for name, ratios in costs.items():
        row = "".join(f"{median(firsts[name, length]) * 1e3:13.0f}" for length in LENGTHS)
        print(f"{name:14}{median(ratios):8.3f}{row}")


def compare(engines: Path, home: Path, address: str, beside: Sequence[str], rounds: int) -> None:
    model, python = home / "model", engines / "bin/python"
    make = (python, ROOT / "tests/engines/models.py", "medium", model)
    subprocess.run(make, env=environment(), check=True, capture_output=True)
    template = Template(python, "vllm_runner.py", home / "template.log", engines / "lmcache", engines / "mooncake")
    with ExitStack() as stack:
        stack.callback(template.close)
        connectors: dict[str, Connector] = {"computed": ({}, {}), "kvtier": ours(address)}
        connectors |= {name: stack.enter_context(OTHERS[name](engines, home)) for name in beside}
        started = {
            name: stack.enter_context(engine(template, model, home / f"{name}.log", each))
            for name, each in connectors.items()
        }
        measure(started.pop("computed"), started, rounds)


async def main(engines: Path, beside: Sequence[str], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        async with PrivateDaemon(SIZES) as daemon:
            await asyncio.to_thread(compare, engines, Path(home), daemon.address, beside, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--beside", nargs="+", choices=OTHERS, default=[])
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    asyncio.run(main(asked.engines.absolute(), asked.beside, asked.rounds))
