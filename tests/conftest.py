"""What every test can count on."""

import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine

from tests import devices
from tests.limits import SHRINKING_S, limit_s, limited

devices.prepare()

# Unix sockets lie below it, and their paths have at most 107 bytes.
if len(tempfile.gettempdir()) > 24:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

# Engines keep resets there that the daemon has not heard of.
_STATE = tempfile.TemporaryDirectory(prefix="kv-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# Hundreds of processes import numpy, whose OpenBLAS starts a thread a core in each of them. They spin for each other: a
# tenth of a second of every core that another test has a use for.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No deadline: the machines that run this are small and shared. In CI the examples are the same each time, so that a red
# run there is about the change.
settings.register_profile("kvtier", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("kvtier-ci", settings.get_profile("kvtier"), derandomize=True, print_blob=True)
settings.load_profile("kvtier-ci" if os.environ.get("CI") else "kvtier")
# There is no setting for it.
engine.MAX_SHRINKING_SECONDS = SHRINKING_S


# A shell that runs this in the background has SIGINT ignored, children inherit that, and Python leaves it so: no test
# of Ctrl-C would ever end.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _in_time(item: pytest.Item) -> Generator[None, object, object]:
    with limited(limit_s(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _in_time(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _in_time(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _in_time(item))


@pytest.fixture(scope="session", autouse=True)
def _bytecode_kept() -> Iterator[None]:
    """Hundreds of daemons are started: where the environment forbids Python to keep what it compiled, as images of
    containers like to, each of them would compile all of kvtier anew, a third of its start."""
    with tempfile.TemporaryDirectory(prefix="kv-pyc-") as directory, pytest.MonkeyPatch.context() as patch:
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):
            patch.delenv("PYTHONDONTWRITEBYTECODE")
            patch.setenv("PYTHONPYCACHEPREFIX", directory)
        yield


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory, private to the test, whose path is short enough for unix sockets (107 bytes): `tmp_path` is not."""
    directory = Path(tempfile.mkdtemp(prefix="kv-"))
    yield directory
    shutil.rmtree(directory)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the runs of ``tests/torture`` did and found."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, line in report.user_properties:
            if name == "torture" and report.when == "call":
                terminalreporter.write_line(f"torture: {line}")
