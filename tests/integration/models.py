"""Specifications of real models' kinds, and bytes that follow from a key and its window group."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier import CacheSpec, PoolSpec, Tier, WindowGroupSpec

MLA: Final = CacheSpec.single("mla", "float8_e4m3", 32, layers=61, kv_heads=1, head_size=576, kv_factor=1)
"""Multi-head latent attention: keys only, and a block of 1,124,352 bytes, which are no whole number of pages."""

VGQA: Final = CacheSpec(
    "vgqa", "bfloat16", 16, groups=(WindowGroupSpec(0, (PoolSpec(3, 8, 16), PoolSpec(2, 2, 16), PoolSpec(1, 1, 3))),)
)
"""Layers of three KV-head configurations."""

SCALES: Final = CacheSpec(
    "nvfp4",
    "bfloat16",
    16,
    groups=(WindowGroupSpec(0, (PoolSpec(2, 4, 64, dtype="uint8"), PoolSpec(2, 4, 8, dtype="float8_e4m3"))),),
)
"""4-bit KV, two values a byte, and a pool of its scales."""

VSWA: Final = CacheSpec(
    "vswa",
    "float16",
    16,
    groups=(
        WindowGroupSpec(64, (PoolSpec(2, 1, 24),)),
        WindowGroupSpec(0, (PoolSpec(1, 1, 72), PoolSpec(1, 2, 40))),
        WindowGroupSpec(100, (PoolSpec(1, 3, 100),)),
    ),
)
"""Full attention and two windows, one of which is no whole number of blocks; the full group is not the first."""

MODELS: Final[Mapping[str, CacheSpec]] = {"mla": MLA, "vgqa": VGQA, "scales": SCALES, "vswa": VSWA}

Arrays = Sequence[NDArray[Any] | None]


def groups_of(spec: CacheSpec) -> range:
    return range(len(spec.groups))


def by_hand(spec: CacheSpec, **slots: int) -> dict[Tier, list[int]]:
    """Budgets of so many slots for each window group."""
    return {
        Tier[tier.upper()]: [count * spec.record_bytes(group) for group in groups_of(spec)]
        for tier, count in slots.items()
    }


def content(spec: CacheSpec, group: int, keys: Sequence[bytes]) -> list[NDArray[np.uint8]]:
    """The bytes of blocks; different in every group, though keys are the same."""
    nbytes = spec.block_bytes(group)
    return [np.frombuffer(hashlib.shake_128(b"%d" % group + key).digest(nbytes), dtype=np.uint8) for key in keys]


def assert_content(spec: CacheSpec, group: int, keys: Sequence[bytes], found: Arrays) -> None:
    """That ``found`` are the blocks of these keys in a group, to the byte."""
    assert len(found) == len(keys)
    right = content(spec, group, keys)
    pairs = enumerate(zip(found, right, strict=True))
    wrong = [index for index, (got, true) in pairs if got is None or not np.array_equal(got, true)]
    assert not wrong, f"wrong bytes in blocks {wrong} of {len(keys)} in group {group}"
