"""docs/api.md has every public name; `make docs` finds each of them, and follows every link."""

import importlib
import re
from pathlib import Path

import kvtier

PAGE = Path(__file__).parents[3] / "docs/api.md"


def test_the_reference_has_every_public_name():
    text = PAGE.read_text()
    named = [path.rpartition(".")[::2] for path in re.findall(r"^::: kvtier\.(\S+)$", text, re.MULTILINE)]
    shown = {getattr(importlib.import_module(f"kvtier.{module}"), name) for module, name in named if module}
    shown |= {getattr(kvtier.errors, name) for name in re.findall(r"^ +- (\w+)$", text, re.MULTILINE)}
    assert {name for name in vars(kvtier)["__all__"] if getattr(kvtier, name) not in shown} == set()
