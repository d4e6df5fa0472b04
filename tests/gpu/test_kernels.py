"""That the kernels of these tests can tell wrong bytes from right ones, on this device."""

from typing import Final

import numpy as np
import pytest

from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.views import DeviceView
from tests.gpu.kernels import WORD, kernels
from tests.integration.torture_blocks import chain
from tests.integration.touching import bytes_in, write_into

pytestmark = pytest.mark.gpu

POOLS: Final = (4096, 320)


@pytest.fixture
def parts(device):
    memory = DeviceMemory.create(device, sum(POOLS))
    return [DeviceView(memory, sum(POOLS[:index]), nbytes) for index, nbytes in enumerate(POOLS)]


@pytest.fixture
def at(device):
    return kernels(device, 0)


def wrong_words(at, parts, key):
    """In one stream with nothing before it."""
    wrong = at.check(parts, key, stream := at.stream())
    at.finish(stream)
    return wrong()


def test_what_one_kernel_wrote_another_finds_right(at, parts):
    key, other = chain(0)[:2]
    at.write(parts, key, stream := at.stream())
    at.finish(stream)
    assert wrong_words(at, parts, key) == 0
    assert wrong_words(at, parts, other) == sum(POOLS) // WORD


@pytest.mark.parametrize("place", [0, 4095, 4096, 4096 + 319])
def test_one_wrong_byte_is_found(at, parts, place):
    (key,) = chain(0)[:1]
    at.write(parts, key, stream := at.stream())
    at.finish(stream)
    found = bytes_in(parts)
    found[place] ^= 1
    write_into(parts, found)
    assert wrong_words(at, parts, key) == 1
    assert np.array_equal(bytes_in(parts), found)


def test_who_does_not_wait_for_a_kernel_reads_something_else(at, parts):
    """So what a race shows is that the daemon and the library wait."""
    key, spoils, reads = chain(0)[0], at.stream(), at.stream()
    at.write(parts, key, reads)
    at.finish(reads)
    at.scribble_for(0.2, parts, spoils)
    wrong = at.check(parts, key, reads)
    at.finish(reads)
    assert wrong() > 0
    at.finish(spoils)
