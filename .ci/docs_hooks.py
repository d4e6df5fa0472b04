"""Hooks of mkdocs.yml: README as home, docstrings in docs/api.md, links that leave the site as names, plain fences."""

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./|(?=[\w-]+\.json))([^)#]*)[^)]*\)")
_NAME = re.compile(r"(?m)(?<=^\| )`([\w.]+)`")
_SOURCE = "".join(path.read_text() for path in ROOT.glob("client/kvtier/**/*.py"))
_DEFAULTS = dict(re.findall(r"(?m)^(DEFAULT_\w+): Final = (\S+)$", _SOURCE))


def on_files(files: Any, config: Any) -> None:
    text = re.sub(r"\]\((?=\w+[/.])", "](../", (ROOT / "README.md").read_text()).replace("](../docs/", "](")
    files.append(type(next(iter(files))).generated(config, "index.md", content=text))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def named(link: re.Match[str]) -> str:
        if not any((folder / link[2]).exists() for folder in (ROOT, ROOT / "docs")):
            logging.getLogger("mkdocs.hooks").warning("%s: no file %s", page.file.src_path, link[2])
        return link[1] if link[1].endswith(link[2].rpartition("/")[2]) else f"{link[1]} (`{link[2]}`)"

    if page.file.src_path == "api.md":
        for part in markdown.split("\n## "):
            markdown = markdown.replace(part, part + "".join(f"\n::: kvtier.{each}" for each in _NAME.findall(part)))
        markdown = _NAME.sub(r"[`\1`][kvtier.\1]", markdown)
    return re.sub(r"(?m)^(```\w+) \S+$", r"\1", _OUTSIDE.sub(named, markdown))


def on_page_content(html: str, **_: Any) -> str:
    html = re.sub(r"\bDEFAULT_\w+\b", lambda name: _DEFAULTS.get(name[0], name[0]), html)
    return re.sub(r":(?:class|meth|func|attr|data|mod):<code>~?([^<]*)</code>", r"<code>\1</code>", html)
