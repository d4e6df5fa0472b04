"""What every test here needs: a device, and torch for the kernels that use it beside the daemon."""

import importlib.util

import pytest

from kvtier.abi.cuda.driver import Driver
from kvtier.abi.cuda.errors import CudaUnavailable
from tests import devices


def why_not():
    """Why nothing can run here; empty where it can."""
    if not devices.ON_CUDA:
        return f"{devices.VARIABLE} names no device (`make gpu-hour` does)"
    try:
        Driver.open(devices.NAME).close()
    except CudaUnavailable as error:
        return str(error)
    if not devices.ON_FAKE and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return ""


@pytest.fixture(scope="session", autouse=True)
def device():
    """The device, open in this process; without one everything is skipped for one reason."""
    if reason := why_not():
        pytest.skip(f"no GPU to test on: {reason}")
    driver = Driver.open(devices.NAME)
    yield driver
    driver.close()


@pytest.fixture
def tell(record_property):
    """What a test appends is in the report of ``make gpu-hour``."""
    facts: list[str] = []
    yield facts
    for fact in facts:
        record_property("told", fact)
