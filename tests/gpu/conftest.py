"""What every test here needs: a device, and torch for the kernels that use it beside the daemon."""

from __future__ import annotations

import importlib.util
import os
from typing import Final

import gpu
import pytest

from kvtier.abi.cuda.driver import Driver
from kvtier.abi.cuda.errors import CudaUnavailable
from tests import devices

_FACTS: Final = pytest.StashKey[list[str]]()


def why_not():
    """Why nothing can run here; empty where it can."""
    if not devices.ON_CUDA:
        return f"{devices.VARIABLE} names no device (`make gpu-test` does)"
    try:
        Driver.open(devices.NAME).close()
    except CudaUnavailable as error:
        return str(error)
    if not devices.ON_FAKE and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return ""


@pytest.fixture(scope="session", autouse=True)
def device(request):
    """The device, open in this process; without one everything is skipped for one reason."""
    if reason := why_not():
        pytest.skip(f"no GPU to test on: {reason}")
    driver = Driver.open(devices.NAME)
    free, total = driver.memory()
    features = driver.features
    note(
        request.config,
        f"{driver.name}, {free >> 20} of {total >> 20} MiB free, driver {features.driver_version}, "
        f"vmm {features.vmm}, fd {features.posix_fd}, batched copies {features.batch_copy}",
    )
    yield driver
    driver.close()


def note(config, fact):
    """For the summary."""
    config.stash.setdefault(_FACTS, []).append(fact)


@pytest.fixture
def tell(request):
    """What a test appends is told in the summary, after its name."""
    facts: list[str] = []
    yield facts
    for fact in facts:
        note(request.config, f"{request.node.name}: {fact}")


def pytest_terminal_summary(terminalreporter, config):
    if config.option.markexpr != "gpu":
        return
    terminalreporter.section("GPU")
    for fact in config.stash.get(_FACTS, []):
        terminalreporter.write_line(fact)
    counts = ", ".join(
        f"{len(terminalreporter.stats[kind])} {kind}"
        for kind in ("passed", "failed", "error", "skipped")
        if kind in terminalreporter.stats
    )
    terminalreporter.write_line(f"this run: {counts} on {devices.DEVICE}, {os.cpu_count()} cores")
    terminalreporter.write_line(f"last run on a GPU, by docs/benchmarks.md: {gpu.last_run()}")
