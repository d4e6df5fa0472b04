"""docs/cuda-calls.md has a line for every call of NVIDIA's driver that the code makes, and for no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cuda.bindings import driver as real

ROOT = Path(__file__).parents[3]
ROWS = re.findall(r"^\| `(cu\w+)` \| (yes|no) \|", (ROOT / "docs/cuda-calls.md").read_text(), re.MULTILINE)


def test_the_calls_of_the_code_are_the_calls_of_the_page() -> None:
    code = "".join(page.read_text() for page in (ROOT / "client/kvtier/abi/cuda").glob("*.py"))
    used = set(re.findall(r"(?:\.|\")(cu[A-Z]\w+)", code))
    assert len(used) > 30
    assert sorted(used) == sorted(name for name, _ in ROWS)


@pytest.mark.parametrize(("call", "context"), [row for row in ROWS if hasattr(real, row[0])])
def test_which_calls_need_a_context(call: str, context: str) -> None:
    assert ("INVALID_CONTEXT" in getattr(real, call).__doc__) == (context == "yes")
