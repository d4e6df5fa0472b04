"""Runs tests/gpu on a host with a GPU, without a network and without a virtual environment.

To be run by the Python that the host's torch is installed for; needs only that and what `make gpu-wheels` carried.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
WHEELS: Final = ROOT / ".whl"
BUILD: Final = ROOT / "build" / "gpu-test"
NEEDED: Final = ("torch", "numpy", "cuda.bindings", "lmdb", "pydantic_settings", "pytest", "pytest_asyncio")
LEAST_PYTHON: Final = (3, 11)

_SUCCESS: Final = 0
_LAST_RUN: Final = re.compile(r"^Last run on a GPU: (.+?)$", re.MULTILINE)


def last_run() -> str:
    """What a GPU run last proved, as docs/benchmarks.md says it."""
    found = _LAST_RUN.search((ROOT / "docs" / "benchmarks.md").read_text())
    return found[1] if found else "docs/benchmarks.md does not say"


def no_gpu() -> str:
    """Why no CUDA device can be used; empty where one can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed (libcuda.so.1)"
    if (status := driver.cuInit(0)) != _SUCCESS:
        return f"the NVIDIA driver finds no device it can use (cuInit returns {status})"
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS or not count.value:
        return "the NVIDIA driver has no device"
    return ""


def site() -> Path | None:
    """A directory with the carried wheels, installed once; None where none were carried."""
    wheels = sorted(WHEELS.glob("*.whl"))
    if not wheels:
        return None
    names = "\n".join([sys.version, *(wheel.name for wheel in wheels)])
    directory = BUILD / f"site-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    if not directory.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        for old in BUILD.glob("site-*"):
            shutil.rmtree(old)
        unfinished = BUILD / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(unfinished), *map(str, wheels)]
        if subprocess.run(command, check=False).returncode:
            sys.exit("gpu-test: pip could not install the carried wheels")
        _call_itself_installed(unfinished)
        unfinished.rename(directory)
    return directory


def _call_itself_installed(directory: Path) -> None:
    """kvtier runs from its sources and asks for its own version, as an installed package does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = directory / f"kvtier-{project['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kvtier\nVersion: {project['version']}\n")


def environment(packages: Path | None) -> dict[str, str]:
    sources = [ROOT / "client", ROOT / "daemon", ROOT]
    paths = [*([packages] if packages else []), *sources]
    # Plugins of pytest that the host happens to have are of other versions than ours; the one that is needed is named.
    # And a host's own packages may warn of this and that, which is no fault of what is tested here.
    return os.environ | {
        "KVTIER_TEST_DEVICE": os.environ.get("KVTIER_TEST_DEVICE") or "cuda:0",
        "PYTEST_ADDOPTS": f"-o filterwarnings=default {os.environ.get('PYTEST_ADDOPTS', '')}",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_asyncio.plugin",
    }


def missing(env: dict[str, str]) -> list[str]:
    """Modules that the tests need and this Python does not find."""
    look = "import importlib, sys\nfor name in sys.argv[1:]:\n try: importlib.import_module(name)\n"
    look += " except ImportError: print(name)"
    found = subprocess.run([sys.executable, "-c", look, *NEEDED], env=env, check=True, capture_output=True, text=True)
    return found.stdout.split()


def main() -> int:
    if sys.version_info < LEAST_PYTHON:
        print(f"gpu-test: {sys.executable} is Python {sys.version.split()[0]}; kvtier needs 3.11 (set GPU_PYTHON)")
        return 1
    if reason := no_gpu():
        print(f"gpu-test: skipped: {reason}. Last run on a GPU: {last_run()}")
        return 0
    env = environment(site())
    if absent := missing(env):
        advice = "`make gpu-wheels`, where there is a network, carries all but torch, numpy and cuda-bindings"
        print(f"gpu-test: {sys.executable} lacks {', '.join(absent)}; {advice}", file=sys.stderr)
        return 1
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-v", "--durations=10"]
    command += ["-o", "faulthandler_timeout=540", f"--junitxml={BUILD / 'report.xml'}", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
