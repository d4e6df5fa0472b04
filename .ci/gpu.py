"""Proves kvtier on a host with a GPU, in steps and in a given time: without a network, without a virtual environment.

``gpu.py wheels``, where there is a network: fills .whl/ with the packages that the host lacks. ``gpu.py hour``, on the
host, by the Python of its torch: runs the steps and writes gpu-hour.md, gpu-hour.json and gpu-hour.log.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parent.parent
WHEELS: Final = ROOT / ".whl"
SITE: Final = ROOT / "build" / "gpu-site"
OUT: Final = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-hour")
PYTHON: Final = "3.12"
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
TOOLS: Final = ("hypothesis", "pytest", "pytest-asyncio")
DEVICE: Final = os.environ.get("KVTIER_TEST_DEVICE") or "cuda:0"
FAKE: Final = DEVICE == "fake"
MARK: Final = "KVTIER_GPU_STEP"
"""In the environment of all that a step starts."""
GOALS: Final = {64 << 10: 0.85, 1 << 20: 0.95}
"""Least share of bare copies that moves of many blocks of one pool reach, by the bytes of a block."""
LEAST_S: Final = 4.0
"""With less time no step is started."""
_GRACE_S: Final = 5.0
_TIMED_OUT: Final = (124, 137)
"""Exit statuses of ``timeout``: the command ended after the interrupt, or had to be killed."""
_TOLD: Final = 4000
"""Characters of a step's output that are told if it fails."""


@dataclass(slots=True, frozen=True)
class Step:
    """``limit_s``: the most it may take. ``tests``: arguments of pytest; on the fake without tests/integration, which
    ``make test-long`` runs on it."""

    name: str
    limit_s: float
    shows: str
    tests: str


_EDGES: Final = "tests/integration/test_verbs.py tests/integration/test_transfer.py"
_KEPT: Final = "tests/gpu/test_pool_kept.py tests/gpu/test_processes.py tests/integration/test_dead_clients.py"
_RACES: Final = "tests/gpu/test_races.py tests/integration/test_torture.py tests/gpu/test_sanitizer.py"
STEPS: Final = (
    Step("host", 20, "what the host can do", "tests/gpu/test_host.py"),
    Step("bench-short", 60, "the speed of copies", "tests/gpu/test_bench.py -k short"),
    Step("bytes", 120, "right bytes over every edge", f"tests/gpu/test_kernels.py tests/gpu/test_memory.py {_EDGES}"),
    Step("pool", 90, "a pool that outlives engine and daemon", _KEPT),
    Step("races", 120, "right bytes under chaos", _RACES),
    Step("bench", 150, "the speed of copies", "tests/gpu/test_bench.py -k long"),
)


def carry() -> int:
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={PYTHON}", *(f"--platform={each}" for each in PLATFORMS)]
    command += ["-c", str(ROOT / "constraints-dev.txt"), "-d", str(WHEELS), f"{ROOT}[daemon]", *TOOLS]
    status = subprocess.run(command, check=False).returncode
    for host_has in WHEELS.glob("numpy-*"):  # its torch may not load another
        host_has.unlink()
    return status


def why_not() -> str:
    """Why no CUDA device can be used; empty if one can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed (libcuda.so.1)"
    count = ctypes.c_int()
    if (status := driver.cuInit(0)) or (status := driver.cuDeviceGetCount(ctypes.byref(count))) or not count.value:
        return f"the NVIDIA driver finds no device it can use (status {status})"
    return ""


def carried() -> list[str]:
    """Wheels for the Python that runs this."""
    fits = f"{sys.version_info.major}.{sys.version_info.minor}" == PYTHON
    return sorted(map(str, WHEELS.glob("*.whl"))) if fits else []


def install() -> None:
    """Installs the carried wheels into SITE, and lets kvtier, which runs from its sources, find its own version."""
    if wheels := carried():
        shutil.rmtree(SITE, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--target", str(SITE), *wheels], check=True)
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        metadata = SITE / f"kvtier-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: kvtier\nVersion: {version}\n")


def commit() -> str:
    """``unknown`` where the sources came without their history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return "unknown"


def environment() -> dict[str, str]:
    first = [ROOT / "tests" / "fakes"] * FAKE + [SITE] * bool(carried())
    paths = [*first, ROOT / "client", ROOT / "daemon", ROOT, os.environ.get("PYTHONPATH", "")]
    # The host's plugins of pytest are of other versions; and its own packages may warn of this and that.
    return os.environ | {
        "KVTIER_TEST_DEVICE": DEVICE,
        "PYTEST_ADDOPTS": f"-o filterwarnings=default {os.environ.get('PYTEST_ADDOPTS', '')}",
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_asyncio.plugin",
    }


# A step. -------------------------------------------------------------------------------------------------------------


def run(step: Step, limit_s: float, log: Path) -> dict[str, Any]:
    """Runs a step, and after ``limit_s`` kills it with all its processes. Returns its verdict and its findings."""
    began, at = time.monotonic(), log.stat().st_size if log.exists() else 0
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as out:
        status = _status(step, limit_s, Path(folder) / "junit.xml", out)
        found = _found(Path(folder) / "junit.xml")
    failed = f"killed after {limit_s:.0f} s" if status in _TIMED_OUT else f"failed: status {status}" if status else ""
    if not failed and "passed" not in found["tests"].values():
        failed = "failed: nothing was tested"
    said = log.read_bytes()[at:][-_TOLD:].decode(errors="replace")
    seconds = round(time.monotonic() - began, 1)
    return {"verdict": failed or "passed", "seconds": seconds, **found, **({"output": said} if failed else {})}


def _status(step: Step, limit_s: float, junit: Path, log: IO[bytes]) -> int:
    """Returns the exit status. After the limit, interrupts pytest, which shows where it hangs."""
    mark = f"{step.name}-{os.getpid()}"
    tests = [each for each in step.tests.split() if not (FAKE and each.startswith("tests/integration"))]
    # tests/limits.py ends a test that hangs, and not the run with it.
    options = ["-v", "-m", "not long", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    options += [f"--junitxml={junit}", "-o", "junit_family=xunit1"]
    timeout = ["timeout", "--foreground", "--signal=INT", f"--kill-after={_GRACE_S}", str(limit_s)]
    command = [*timeout, sys.executable, "-X", "faulthandler", "-m", "pytest", *tests, *options]
    env = environment() | {MARK: mark}
    try:
        return subprocess.run(
            command, check=False, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ).returncode
    finally:
        end_all(mark)


def end_all(mark: str) -> None:
    """Kills every process that has this mark, also in other sessions."""
    marked = True
    while marked:
        marked = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                    marked = True
                    os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(0.01)


def _found(junit: Path) -> dict[str, Any]:
    """Reads the ends of the tests, their lines, facts by name, and figures. All are empty if pytest was killed."""
    tests, told, facts, figures = dict[str, str](), list[str](), dict[str, str](), list[dict[str, Any]]()
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        ends = [end for end in case if end.tag in ("failure", "error", "skipped")]
        said = ends[0].get("message", "").partition("\n")[0] if ends else ""
        tests[name] = f"{ends[0].tag}: {said}" if ends else "passed"
        for kind, value in ((each.get("name", ""), each.get("value", "")) for each in case.iter("property")):
            if kind == "told":
                told.append(f"{name}: {value}")
            elif kind == "figure":
                figures.append(judged(json.loads(value)))
            else:
                facts[kind] = value
    return {"tests": tests, "told": told, "facts": facts, "figures": figures}


def judged(figure: dict[str, Any]) -> dict[str, Any]:
    """A figure with its goal, if it has one. None of the fake has."""
    params = figure["params"]
    least = GOALS.get(params["piece_bytes"]) if params["pools"] == 1 and params["blocks"] > 1 else None
    if FAKE:
        return figure | {"name": f"fake {figure['name']}"}
    return figure if least is None else figure | {"goal": f"{least} {'met' if figure['ratio'] >= least else 'MISSED'}"}


# All steps. -----------------------------------------------------------------------------------------------------------


def chosen(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Returns the named steps, or all, after the first step, which describes the host."""
    known = [step.name for step in steps]
    if unknown := sorted({*names} - {*known}):
        sys.exit(f"gpu: there is no step {', '.join(unknown)}: they are {', '.join(known)}")
    return [step for step in steps if not names or step.name in (known[0], *names)]


def hour(steps: Sequence[Step], budget_s: float, out: Path, began: float) -> int:
    """Runs the steps and writes the report after each. Returns 0 if all passed.

    A step has its own limit, but at most half of the time left: a step that hangs leaves time to others.
    """
    failed, left_out, when = list[str](), list[str](), datetime.now(UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"fake": FAKE, "when": when, "commit": commit(), "steps": {}, "left_out": left_out}
    for step in steps:
        left = budget_s - _GRACE_S - (time.monotonic() - began)
        limit_s = min(step.limit_s, left if step is steps[-1] else left / 2)
        if limit_s < min(LEAST_S, step.limit_s):
            left_out += [each.name for each in steps[steps.index(step) :]]
            break
        print(f"gpu: {step.name}: {step.shows}, within {limit_s:.0f} s", flush=True)
        found = run(step, limit_s, out / "gpu-hour.log")
        print(found.get("output", "") + f"gpu: {step.name}: {found['verdict']}, {found['seconds']} s", flush=True)
        failed += [step.name] * (found["verdict"] != "passed")
        left_out += [step.name] * found["verdict"].startswith("killed")
        report["steps"][step.name] = found | {"shows": step.shows}
        write(report, out)
    write(report, out)
    ends = f"failed: {', '.join(failed)}" if failed else "all that ran passed"
    go_on = f"; go on with KVTIER_GPU_STEPS='{' '.join(left_out)}'" if left_out else ""
    print(f"gpu: {ends}; {out}/gpu-hour.md{go_on}")
    return int(bool(failed))


def write(report: Mapping[str, Any], out: Path) -> None:
    (out / "gpu-hour.json").write_text(json.dumps(report, indent=1))
    (out / "gpu-hour.md").write_text(markdown(report))


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the report in the form of docs/benchmarks.md."""
    steps: Mapping[str, Any] = report["steps"]
    facts = {fact: value for step in steps.values() for fact, value in step["facts"].items()}
    host = ", ".join(f"{name} {facts[name]}" for name in ("device", "driver", "CUDA", "packages") if name in facts)
    where = "the fake driver (no figure here is a GPU's)" if report["fake"] else "a GPU"
    lines = [f"Last run on {where}: {report['when'][:10]}, {host}, commit {report['commit']}", ""]
    rows = [[name, *(step[key] for key in ("shows", "verdict", "seconds"))] for name, step in steps.items()]
    lines += [*_table(["step", "shows", "result", "seconds"], rows), ""]
    for name, step in steps.items():
        ends = [f"{each}: {end}" for each, end in step["tests"].items() if end != "passed" or name == "host"]
        lines += [f"- {name}: {each}" for each in ends + step["told"]]
    columns = ["pools", "bytes in each", "blocks", "MiB/s", "bare", "ratio", "goal"]
    for name, step in steps.items():
        if step["figures"]:
            lines += ["", *_table([name, *columns], map(_row, step["figures"]))]
    return "\n".join([*lines, "", *_table(["host", ""], facts.items()), ""])


def _row(figure: Mapping[str, Any]) -> list[Any]:
    rates = [f"{figure[name]:,.0f}" for name in ("value", "floor")]
    return [figure["name"], *figure["params"].values(), *rates, f"{figure['ratio']:.2f}", figure.get("goal", "")]


def _table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]


def main(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    if list(arguments) == ["wheels"]:
        return carry()
    if list(arguments) != ["hour"]:
        sys.exit(__doc__)
    if not FAKE and (reason := why_not()):
        print(f"gpu: skipped: {reason}")
        return 0
    steps = chosen(STEPS, os.environ.get("KVTIER_GPU_STEPS", "").split())
    OUT.mkdir(parents=True, exist_ok=True)
    install()
    return hour(steps, float(os.environ.get("KVTIER_GPU_SECONDS") or 540), OUT, began)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
