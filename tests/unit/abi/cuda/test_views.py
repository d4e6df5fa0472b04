"""Views say where the bytes are, keep the memory, and give torch what it takes."""

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.abi.cuda.driver import Driver
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.views import DeviceView
from tests.fake_cuda import load_fake

SIZE = 4 << 20


@pytest.fixture
def fake():
    return load_fake()


@pytest.fixture
def memory(fake):
    return DeviceMemory.create(Driver(fake, "cuda"), SIZE)


@pytest.mark.parametrize("readonly", [False, True])
def test_the_interface_is_of_version_3(memory, readonly):
    view = DeviceView(memory, 4096, 8192, readonly=readonly)
    assert view.address == memory.address + 4096
    assert view.__cuda_array_interface__ == {
        "shape": (8192,),
        "strides": None,
        "typestr": "|u1",
        "data": (memory.address + 4096, readonly),
        "stream": None,
        "version": 3,
    }


def test_a_view_of_nothing_points_nowhere(memory):
    assert DeviceView(memory, SIZE, 0).__cuda_array_interface__["data"] == (0, False)


def test_a_tensor_of_nothing_points_into_the_memory(memory, monkeypatch):
    """torch asks the driver whose the pointer is, also of an empty array."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(as_tensor=lambda kept, device: kept))
    made: Any = DeviceView(memory, SIZE, 0).tensor()
    assert made.__cuda_array_interface__["data"] == (memory.address, False)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, SIZE + 1), (SIZE, 1)])
def test_a_view_is_within_its_memory(memory, offset, nbytes):
    with pytest.raises(ValueError, match=f"the memory has {SIZE}"):
        DeviceView(memory, offset, nbytes)


def test_memory_lives_as_long_as_what_was_made_of_it(fake, monkeypatch):
    """torch keeps the object that it was given for as long as the tensor's storage."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(as_tensor=lambda kept, device: (kept, device)))
    memory = DeviceMemory.create(Driver(fake, "cuda"), SIZE)
    address = memory.address
    kept: Any
    kept, device = DeviceView(memory, 0, 4096, readonly=True).tensor()
    assert device == "cuda:0"
    del memory
    gc.collect()
    assert fake.fake_left() == {"mappings": 1, "reservations": 1, "contexts": 1}
    assert kept.__cuda_array_interface__["data"] == (address, False)  # torch refuses what is read-only
    del kept
    gc.collect()
    assert fake.fake_left() == {"contexts": 1}
