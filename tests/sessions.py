"""Tests run once more, on another device: a pytest session for each module, several at a time.

Each is a process of its own, since the device is a property of a whole session; see :mod:`tests.devices`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from xml.etree import ElementTree

from tests import devices

ROOT: Final = Path(__file__).parents[1]
_TEST_S: Final = 240
"""How long one test may hang before its session ends, with every thread's stack. Some start twenty daemons, each of
which opens the device, beside as many other sessions as there are cores."""
_SHOWN_CHARACTERS: Final = 20_000


@dataclass(slots=True, frozen=True)
class Outcome:
    """How a session went. ``skipped``: why, once for each test that was."""

    status: int
    tests: int
    skipped: tuple[str, ...]
    output: str

    def assert_passed(self) -> None:
        assert self.status == 0, self.output[-_SHOWN_CHARACTERS:]
        assert self.tests > len(self.skipped), f"nothing was tested\n{self.output}"


class Sessions:
    """Runs modules on a device from the moment it is entered, ``jobs`` at a time, in the given order.

    ``selections``: for each module, a path below ``tests`` without its ending, the keyword expression of pytest that
    chooses tests in it; empty for all of them. Tests marked ``gpu`` are run, those marked ``long`` are not.
    """

    def __init__(self, device: str, selections: Mapping[str, str], jobs: int) -> None:
        self._device = device
        self._selections = selections
        self._jobs = ThreadPoolExecutor(jobs, thread_name_prefix="session")
        self._outcomes: dict[str, Future[Outcome]] = {}
        self._running: set[subprocess.Popen[str]] = set()

    def outcome(self, module: str) -> Outcome:
        """Waits for its session."""
        return self._outcomes[module].result()

    def __enter__(self) -> Self:
        for module, selection in self._selections.items():
            self._outcomes[module] = self._jobs.submit(self._run, module, selection)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.shutdown(wait=False, cancel_futures=True)
        for process in tuple(self._running):
            process.send_signal(signal.SIGINT)  # so that it stops its daemons
        self._jobs.shutdown()

    def _run(self, module: str, selection: str) -> Outcome:
        with tempfile.NamedTemporaryFile(prefix="kv-report-", suffix=".xml") as report:
            command = [sys.executable, "-m", "pytest", f"tests/{module}.py", "-m", "not long", "-q"]
            command += ["-p", "no:cacheprovider", "-o", f"faulthandler_timeout={_TEST_S}"]
            command += [f"--junitxml={report.name}", *(["-k", selection] if selection else [])]
            environment = os.environ | {devices.VARIABLE: self._device}
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self._running.add(process)
            try:
                output, _ = process.communicate()
            finally:
                self._running.discard(process)
            return _read(process.returncode, output, Path(report.name))


def _read(status: int, output: str, report: Path) -> Outcome:
    text = report.read_text()
    if not text:  # it ended before it could write one
        return Outcome(status or 1, 0, (), output)
    cases = list(ElementTree.fromstring(text).iter("testcase"))
    skips = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    return Outcome(status, len(cases), tuple(skips), output)
