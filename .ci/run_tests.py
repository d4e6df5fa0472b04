"""Runs the tests, then each failed test once more: `run_tests.py [PYTEST-OPTION...] [FILE...]`.

A failed test runs again, after the others, in a pytest session of its own with one xdist worker: a test that ends its
process fails there, too. A test that then passes is flaky. Tests that failed twice, and more than `MOST_FLAKY`
flaky tests, fail the run; the last lines name both. Collection errors, interrupts and internal errors fail it at once.
"""

import subprocess
import sys
from collections.abc import Sequence

import pytest

MOST_FLAKY = 3
MOST_AGAIN = 20
"""With more failures something else is wrong than a test, and none runs again."""


class Record:
    """The tests that ran, those that failed, and whether a file could not be collected. For the controller of xdist."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.failed: dict[str, None] = {}  # in the order of their failures
        self.collected = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)
        if report.failed:  # in the test, its setup or its teardown, or its worker died
            self.failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.collected = self.collected and not report.failed


def run(options: Sequence[str]) -> int:
    """Returns the exit status."""
    record = Record()
    status = int(pytest.main([*options], plugins=[record]))
    if status != pytest.ExitCode.TESTS_FAILED or not record.failed or not record.collected:
        return status
    of = f"of {len(record.ran)}"
    if len(record.failed) > MOST_AGAIN:
        print(f"failed: {len(record.failed)} {of}, too many to run once more", flush=True)
        return status
    twice = [test for test in record.failed if not _passes_alone(options, test)]
    flaky = [test for test in record.failed if test not in twice]
    for fault, tests in (("failed twice", twice), ("flaky", flaky)):
        if tests:
            print(f"{fault}: {len(tests)} {of}: {' '.join(tests)}", flush=True)
    return 1 if twice or len(flaky) > MOST_FLAKY else 0


def _passes_alone(options: Sequence[str], test: str) -> bool:
    print(f"\nonce more, alone: {test}", flush=True)
    others = [option for option in options if not option.endswith(".py")]
    command = [sys.executable, "-m", "pytest", *others, "-n", "1", "--junitxml=", test]  # the first run's report stays
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
