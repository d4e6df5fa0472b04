"""docs/api.md has every public name, each with the first sentence of its docstring; `make docs` renders the rest.

``python -m tests.unit.project.test_api_page`` writes these sentences into the page.
"""

import inspect
import re
from pathlib import Path

import kvtier

PAGE = Path(__file__).parents[3] / "docs/api.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


def renewed(row):
    """The row with the sentence of today."""
    sentence = re.split(r"[.:;]+(?=\s)|\.$", inspect.getdoc(getattr(kvtier, row[1])) or "", maxsplit=1)[0]
    text = re.sub(r":\w+:`(?:kvtier\.)?(.+?)`", r"`\1`", " ".join(sentence.split()).replace("``", "`"))
    return f"| `{row[1]}` | {text} |"


def test_the_page_has_every_public_name_with_its_meaning():
    page = PAGE.read_text()
    public = sorted(name for name in dir(kvtier) if not name.startswith("__"))
    assert sorted(name for name, _ in ROW.findall(page)) == public
    assert ROW.sub(renewed, page) == page, __doc__


if __name__ == "__main__":
    PAGE.write_text(ROW.sub(renewed, PAGE.read_text()))
