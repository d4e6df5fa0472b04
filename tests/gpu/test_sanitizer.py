"""No kernel and no copy touches memory that it may not, of client and daemon: NVIDIA's checker watches a short race."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests import devices

_LIMIT_S: Final = 60.0
"""Watched, everything takes a multiple of its time."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.limit(_LIMIT_S + 20),
    pytest.mark.skipif(devices.ON_FAKE, reason="the fake checks the addresses of every copy itself"),
]

ROOT: Final = Path(__file__).parents[2]
_FOUND: Final = 86
"""Exit status of a process in which it found something."""
_REFUSED: Final = "Device not supported"
_SUMMARY: Final = re.compile(r"ERROR SUMMARY: (\d+) error")
"""Of each process that it watched, or of all."""


def test_memcheck_finds_nothing(tmp_path):
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed: no memory access was checked")
    log = tmp_path / "memcheck.log"
    # Calls that fail are the daemon's own to report; here it is about memory.
    command = [tool, "--tool=memcheck", "--target-processes=all", "--report-api-errors=no"]
    command += [f"--error-exitcode={_FOUND}", f"--log-file={log}", sys.executable, "-m", "pytest"]
    command += ["tests/gpu/test_races.py", "-m", "gpu", "-k", "short", "-q", "-p", "no:cacheprovider"]
    status, output = _ended(command)
    said = log.read_text() if log.exists() else "it wrote no log"
    if _REFUSED in said + output:
        pytest.skip(f"compute-sanitizer says {_REFUSED!r} of this machine's GPU: no memory access was checked")
    assert status == 0, output[-20_000:] + said[-20_000:]
    assert "1 passed" in output
    assert set(_SUMMARY.findall(said)) == {"0"}, said[-20_000:]


def _ended(command):
    """Exit status and what it printed. In time, or killed with all that it started: that would go on to use the GPU."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=_LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output
