"""No kernel and no copy touches memory that it may not, of client and daemon: NVIDIA's checker watches a short race."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests import devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(devices.ON_FAKE, reason="the fake checks the addresses of every copy itself"),
]

ROOT: Final = Path(__file__).parents[2]
_FOUND: Final = 86
"""Exit status of a process in which it found something."""
_REFUSED: Final = "Device not supported"
_LIMIT_S: Final = 180.0


def test_memcheck_finds_nothing(tmp_path: Path) -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed: no memory access was checked")
    log = tmp_path / "memcheck.log"
    # Calls that fail are the daemon's own to report; here it is about memory.
    command = [tool, "--tool=memcheck", "--target-processes=all", "--report-api-errors=no"]
    command += [f"--error-exitcode={_FOUND}", f"--log-file={log}", sys.executable, "-m", "pytest"]
    command += ["tests/gpu/test_races.py", "-m", "gpu", "-k", "short", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=_LIMIT_S)
    said = log.read_text() if log.exists() else "it wrote no log"
    if _REFUSED in said + done.stdout:
        pytest.skip(f"compute-sanitizer says {_REFUSED!r} of this machine's GPU: no memory access was checked")
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:] + said[-20_000:]
    assert "1 passed" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in said
