"""A real vLLM with kvtier beside one without, in turn: throughput where nothing is stored, and time to the first token.

``python -m benchmarks.vllm .venv-engines``, after ``make test-engines`` has made that environment. The model has random
weights, 8 layers and 8 x 128 heads, and runs on the CPU. A warm prompt comes from kvtier: the engine has forgotten it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvtier import Tier
from kvtier.replay.private import PrivateDaemon
from tests.engines.engines import ROOT, Engine, Template

LENGTHS: Final = (320, 640, 1280)
"""Of prompts, in tokens."""
BATCH: Final = 4
SIZES: Final = {Tier.HOST: 1 << 30, Tier.DISK: 4 << 30}


def prompt(length: int) -> list[int]:
    """That nobody has seen."""
    return [random.randrange(3, 512) for _ in range(length)]


def engine(template: Template, model: Path, home: Path, name: str, transfer: Mapping[str, Any] | None) -> Engine:
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "disable_log_stats": False,
        "block_size": 32,
        **({"kv_transfer_config": dict(transfer)} if transfer else {}),
    }
    started = template.start(arguments, home / f"{name}.log", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    for _ in range(2):  # what an engine does once
        started.generate([prompt(LENGTHS[0])], 2)
    return started


def first_s(engine: Engine, tokens: list[int]) -> float:
    return engine.generate([tokens], 1).completions[0].first_s


def measure(plain: Engine, ours: Engine, rounds: int) -> None:
    seconds: dict[Engine, list[float]] = {plain: [], ours: []}
    for _ in range(rounds):
        for each in (plain, ours):
            seconds[each].append(each.generate([prompt(LENGTHS[0]) for _ in range(BATCH)], 16, together=True).seconds)
    costs = median(mine / theirs for mine, theirs in zip(seconds[ours], seconds[plain], strict=True))
    print(f"requests without a hit take {costs:.3f} of the time without kvtier ({rounds} rounds of {BATCH})")
    print(f"{'tokens':>7}{'cold':>10}{'warm':>10}{'of cold':>9}")
    for length in LENGTHS:
        cold, warm = [], []
        for _ in range(rounds):
            asked = prompt(length)
            cold.append(first_s(plain, asked))
            ours.generate([asked], 1)
            ours.forget()
            warm.append(first_s(ours, asked))
        print(f"{length:7}{median(cold) * 1e3:7.0f} ms{median(warm) * 1e3:7.0f} ms{median(warm) / median(cold):9.2f}")


def compare(python: Path, home: Path, address: str, rounds: int) -> None:
    model = home / "model"
    subprocess.run([python, ROOT / "tests/engines/models.py", "medium", model], check=True, capture_output=True)
    transfer = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address},
    }
    template = Template(python, "vllm_runner.py", home / "template.log")
    with (
        engine(template, model, home, "plain", None) as plain,
        engine(template, model, home, "ours", transfer) as ours,
    ):
        measure(plain, ours, rounds)
    template.close()


async def main(python: Path, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        async with PrivateDaemon(SIZES) as daemon:
            await asyncio.to_thread(compare, python, Path(home), daemon.address, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    asyncio.run(main(asked.engines.absolute() / "bin/python", asked.rounds))
