"""Runs tests/gpu, or `kvtier bench gpu`, on a host with a GPU, without a network and without a virtual environment.

To be run by the Python that the host's torch is installed for; needs only that and what `make gpu-wheels` carried.
`gpu_test.py bench [ARGUMENTS]` measures; all other arguments are pytest's.
"""

import ctypes
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
WHEELS: Final = ROOT / ".whl"
BUILD: Final = ROOT / "build" / "gpu-test"
NEEDED: Final = ("torch", "numpy", "cuda.bindings", "lmdb", "pydantic_settings", "pytest", "pytest_asyncio")
LEAST_PYTHON: Final = (3, 11)
LIMIT_VARIABLE: Final = "KVTIER_GPU_SECONDS"
LIMIT_S: Final = 450.0
"""Of a run, the wheels' installation included. What has not ended then is stopped, and says what it has seen: a GPU may
be lent for so long that nothing would be heard of a run that others end."""
END_S: Final = 30.0

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


def run(command: Sequence[str], env: Mapping[str, str], until: float, patience_s: float = END_S) -> int:
    """Its exit status; nothing of its process group outlives it. What runs on at ``until``, of the monotonic clock, is
    interrupted, as by Ctrl-C, so that it says what it has seen; what hangs even then is ended, and says where.
    """
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))  # not between fork and try
    try:
        process = subprocess.Popen(command, cwd=ROOT, env=env, process_group=0)
    except BaseException:
        signal.signal(signal.SIGINT, before)
        raise
    with process:
        try:
            signal.signal(signal.SIGINT, before)
            if interrupts:
                raise KeyboardInterrupt
            return process.wait(max(0.0, until - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as why:
            ours = isinstance(why, subprocess.TimeoutExpired)
            print(f"\ngpu-test: {'stopped: its time is over' if ours else 'interrupted'}", file=sys.stderr, flush=True)
            return _end(process, patience_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], patience_s: float) -> int:
    for number in (signal.SIGINT, signal.SIGABRT):
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(patience_s) or 1
    process.kill()
    return process.wait()


def main() -> int:
    until = time.monotonic() + float(os.environ.get(LIMIT_VARIABLE) or LIMIT_S)
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
    return run(command_of(sys.argv[1:]), env, until)


def command_of(arguments: Sequence[str]) -> list[str]:
    python = [sys.executable, "-X", "faulthandler"]
    if arguments[:1] == ["bench"]:
        return [*python, "-c", "from kvtier.cli import main; main()", "bench", "gpu", "--json", *arguments[1:]]
    command = [*python, "-m", "pytest", "tests/gpu", "-m", "gpu", "-v", "--durations=10"]
    # tests/limits.py ends a test that hangs, and not the run with it.
    command += ["-o", "faulthandler_timeout=0", f"--junitxml={BUILD / 'report.xml'}"]
    return [*command, *arguments]


if __name__ == "__main__":
    sys.exit(main())
