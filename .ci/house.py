"""Prints the meters of the house, and fails if one is above its limit: ``house.py [PREFIX...]``.

With prefixes of paths, lists the sentences below them that the language meters count.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import fmean
from typing import Final

# Limits of lines hold what is there from growing; a change that takes lines away lowers them.
LIMITS: Final[Mapping[str, float]] = {
    "docstring openings, %": 4.0,
    "docstring pronouns, %": 3.0,
    "docs openings, %": 4.0,
    "docs pronouns, %": 3.0,
    "class names that stand twice": 0,
    "modules in a circle of imports": 0,
    "modules": 250,
    "modules over 600 lines": 0,
    "production lines": 53_000,
    "test lines": 62_000,  # at most 62,000 when all open issues are done
    "docs words": 20_000,
    "kvtier bench lines": 880,
    "benchmarks lines": 930,
    ".ci lines": 1_190,
}
ROOT: Final = Path(__file__).resolve().parent.parent
PRODUCTION: Final = ("client/**/*.py", "daemon/**/*.py")
DOCS: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md")
LANGUAGE: Final = {
    "openings": r"(What|Who|Whoever|Whatever|Of|Those|So many|That|Others|One|Where|It|They|As|Also|Such|Likewise|Once"
    r"|Up to|By)\b",
    "pronouns": r".*\b(what|whoever|those|such|so many|so much|nobody|somebody|anybody)\b",
}


def files(*patterns: str) -> list[Path]:
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    return [path for path in found if path.parent.name != "v1"]  # generated


def lines(*patterns: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in files(*patterns))


def cut(path: Path, line: int, text: str) -> Iterator[tuple[str, str]]:
    """Yields the sentences of two words or more, each after its file and line."""
    for part in re.split(r"[.:;]\s+|[.:;]$", text):
        words = " ".join(part.split()).strip("`*-# ")
        if " " in words:
            yield f"{path.relative_to(ROOT)}:{line}", words


def in_docstrings(path: Path, nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yields the sentences of every string that is a statement."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from cut(path, node.lineno, node.value.value)


def in_page(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the sentences of paragraphs, titles, list items and table cells, without code."""
    text, line = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.DOTALL), 1
    for part in re.split(r"(\n\s*\n|\n(?=\||- |\d+\. |#)|\|)", text):
        yield from cut(path, line, part)
        line += part.count("\n")


def circle(modules: Mapping[str, Sequence[ast.AST]]) -> list[str]:
    """Returns the modules of a circle of imports, if there is one."""
    below: dict[str, set[str]] = {}
    for name, nodes in modules.items():
        found = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [f"{getattr(node, 'module', '')}.{each.name}".lstrip(".") for node in found for each in node.names]
        below[name] = {each if each in modules else each.rpartition(".")[0] for each in names} & modules.keys() - {name}
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return sorted({*error.args[1]})
    return []


def main(prefixes: Sequence[str]) -> int:
    short = {path: re.sub(r"^\w+/|(/__init__)?\.py$", "", str(path.relative_to(ROOT))) for path in files(*PRODUCTION)}
    paths = {name.replace("/", "."): path for path, name in short.items()}
    modules = {name: list(ast.walk(ast.parse(path.read_text()))) for name, path in paths.items()}
    texts = {
        "docstring": [each for name, nodes in modules.items() for each in in_docstrings(paths[name], nodes)],
        "docs": [each for page in files(*DOCS) for each in in_page(page)],
    }
    for place, words in (each for sentences in texts.values() for each in sentences):
        if prefixes and place.startswith(tuple(prefixes)) and any(re.match(each, words) for each in LANGUAGE.values()):
            print(f"{place}: {words}")
    if prefixes:
        return 0
    classes = Counter(node.name for nodes in modules.values() for node in nodes if isinstance(node, ast.ClassDef))
    meters: dict[str, float | list[str]] = {
        f"{kind} {name}, %": 100 * fmean(bool(re.match(counted, words)) for _, words in sentences)
        for kind, sentences in texts.items()
        for name, counted in LANGUAGE.items()
    }
    meters |= {
        "class names that stand twice": sorted(name for name, count in classes.items() if count > 1),
        "modules in a circle of imports": circle(modules),
        "modules": len(modules),
        "modules over 600 lines": [name for name, path in paths.items() if len(path.read_text().splitlines()) > 600],
        "production lines": lines(*PRODUCTION, "client/**/__init__.pyi"),
        "test lines": lines("tests/**/*.py"),
        "docs words": sum(len(path.read_text().split()) for path in files(*DOCS)),
        "kvtier bench lines": lines("client/kvtier/bench/*.py", "client/kvtier/cli/bench.py"),
        "benchmarks lines": lines("benchmarks/*"),
        ".ci lines": lines(".ci/*"),
    }
    above = 0
    for name, value in meters.items():
        number, names = (len(value), ", ".join(value)) if isinstance(value, list) else (value, "")
        verdict = f"limit {LIMITS[name]:,}" + ", ABOVE" * (number > LIMITS[name])
        print(f"{name:31}{number:8,.{int('%' in name)}f}  {verdict:21}{names}".rstrip())
        above += number > LIMITS[name]
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
