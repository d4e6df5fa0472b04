"""The specifications that docs/models.md shows are ones, and are as large as it says."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier import CacheSpec

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def shown() -> dict[str, CacheSpec]:
    (code,) = re.findall(r"```python runnable\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102 - our own documentation
    return {name: value for name, value in names.items() if isinstance(value, CacheSpec)}


def test_every_specification_is_valid() -> None:
    specs = shown()
    assert len(specs) == 5
    assert len({spec.fingerprint() for spec in specs.values()}) == 5


def test_sizes_are_as_told() -> None:
    specs = shown()
    assert specs["deepseek"].block_bytes(0) == 1_124_352
    data, scales = (specs["nvfp4"].pool_bytes(0, pool) for pool in (0, 1))
    assert (data, scales) == (32 * 2 * 8 * 128 * 32 // 2, 32 * 2 * 8 * 128 * 32 // 16)
