"""Hooks of mkdocs.yml: pages link to files beside docs/, fences say how they are tested, and docstrings have
reStructuredText's roles."""

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./|(?=[\w-]+\.json))([^)#]*)[^)]*\)")
_FENCE = re.compile(r"^(```\w+) \S+$", re.MULTILINE)
_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod):<code>~?([^<]*)</code>")

_log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files that are not in the site become their names, once the files are found. A fence keeps its language
    alone: Markdown's own parser knows no more."""

    def named(link: re.Match[str]) -> str:
        if not any((folder / link[2]).exists() for folder in (ROOT, ROOT / "docs")):
            _log.warning("%s: no file %s", page.file.src_path, link[2])
        return link[1] if link[1].endswith(link[2].rpartition("/")[2]) else f"{link[1]} (`{link[2]}`)"

    return _FENCE.sub(r"\1", _OUTSIDE.sub(named, markdown))


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub(r"<code>\1</code>", html)
