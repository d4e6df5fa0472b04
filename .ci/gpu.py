"""Runs tests/gpu, or ``kvtier bench gpu``, on a host with a GPU, without a network and without a virtual environment.

``gpu.py wheels``, where there is a network: carries into .whl/ what such a host lacks. ``gpu.py test [ARGUMENTS]`` (of
pytest) and ``gpu.py bench [ARGUMENTS]``, on the host: by the Python that its torch is installed for. The bench ends
with a table of its goals.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
WHEELS: Final = ROOT / ".whl"
SITE: Final = ROOT / "build" / "gpu-site"
PYTHON: Final = "3.12"
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
HOSTS: Final = frozenset({"torch", "numpy"})
"""Packages that the host has, as it has NVIDIA's bindings."""
TOOLS: Final = frozenset({"hypothesis", "pytest", "pytest-asyncio"})
NEEDED: Final = ("torch", "numpy", "cuda.bindings", "lmdb", "grpc", "pydantic_settings", "pytest", "pytest_asyncio")
LIMIT_S: Final = os.environ.get("KVTIER_GPU_SECONDS") or "450"
"""Of a run. Then it is interrupted, so that it says what it has seen: a GPU may be lent for minutes."""
GOALS: Final = {64 << 10: 0.85, 1 << 20: 0.95}
"""Least share of bare copies that moves of many blocks of one pool reach, by the bytes of a block."""


def wanted() -> list[str]:
    """Requirements of the client, the daemon and the tests, without what is the host's own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {
        re.split(r"[\[<>=]", each)[0]: each for each in [*project["dependencies"], *extras["daemon"], *extras["dev"]]
    }
    ours = {re.split(r"[\[<>=]", each)[0] for each in [*project["dependencies"], *extras["daemon"]]} | TOOLS
    return [named[name] for name in sorted(ours - HOSTS)]


def carry() -> int:
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={PYTHON}", *(f"--platform={each}" for each in PLATFORMS)]
    command += ["-c", str(ROOT / "constraints-dev.txt"), "-d", str(WHEELS), *wanted()]
    return subprocess.run(command, check=False).returncode


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


def last_run() -> str:
    """What a GPU run last proved, as docs/benchmarks.md says it."""
    found = re.search(r"^Last run on a GPU: (.+?)$", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    return found[1] if found else "docs/benchmarks.md does not say"


def install() -> None:
    """Installs the carried wheels into SITE, and lets kvtier, which runs from its sources, find its own version."""
    shutil.rmtree(SITE, ignore_errors=True)
    if wheels := sorted(map(str, WHEELS.glob("*.whl"))):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--target", str(SITE), *wheels], check=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    metadata = SITE / f"kvtier-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: kvtier\nVersion: {version}\n")


def environment() -> dict[str, str]:
    paths = [SITE, ROOT / "client", ROOT / "daemon", ROOT, os.environ.get("PYTHONPATH", "")]
    # The host's plugins of pytest are of other versions; and its own packages may warn of this and that.
    return os.environ | {
        "KVTIER_TEST_DEVICE": os.environ.get("KVTIER_TEST_DEVICE") or "cuda:0",
        "PYTEST_ADDOPTS": f"-o filterwarnings=default {os.environ.get('PYTEST_ADDOPTS', '')}",
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_asyncio.plugin",
    }


def works(arguments: Sequence[str]) -> list[str]:
    if arguments[0] == "bench":
        return ["-c", "from kvtier.cli import main; main()", "bench", "gpu", "-o", "json", *arguments[1:]]
    # tests/limits.py ends a test that hangs, and not the run with it.
    options = ["-v", "--durations=10", "-o", "faulthandler_timeout=0"]
    return ["-m", "pytest", "tests/gpu", "-m", "gpu", *options, *arguments[1:]]


def goals(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each figure that has a goal: figure, bytes of a block, goal, ratio and verdict."""
    lines = ["figure           block  goal  measured"]
    for result in results:
        params, ratio = result["params"], result["ratio"]
        goal = GOALS.get(params["piece_bytes"]) if params["pools"] == 1 and params["blocks"] > 1 else None
        if goal is not None:
            verdict = "met" if ratio >= goal else "MISSED"
            size = f"{params['piece_bytes'] >> 10} KiB"
            lines.append(f"{result['name']:15}{size:>9}  {goal:.2f}  {ratio:8.2f}  {verdict}")
    return lines


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["wheels"]:
        return carry()
    if arguments[:1] not in (["test"], ["bench"]):
        sys.exit(__doc__)
    if reason := why_not():
        print(f"gpu: skipped: {reason}. Last run on a GPU: {last_run()}")
        return 0
    install()
    look = f"import importlib\nfor name in {NEEDED}: importlib.import_module(name)"
    if subprocess.run([sys.executable, "-c", look], env=environment(), check=False).returncode:
        sys.exit(f"gpu: {sys.executable} lacks what stands above; `make gpu-wheels` carries all but the host's own")
    os.chdir(ROOT)
    command = ["timeout", "--signal=INT", "--kill-after=60", LIMIT_S, sys.executable, "-X", "faulthandler"]
    command += works(arguments)
    if arguments[0] == "test":
        os.execvpe(command[0], command, environment())
    ended = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=False)
    print(ended.stdout)
    if not ended.returncode:
        print(*goals(json.loads(ended.stdout)), sep="\n")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
