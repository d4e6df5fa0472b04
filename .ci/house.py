"""Measures the house: lines, modules, import circles, docs.

An import circle is a strongly connected set of modules. "At run time" counts the imports that are executed, at the top
of a module or inside a function; "with typing" counts those under ``if TYPE_CHECKING`` too.
"""

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = (f"{ROOT}/client/", f"{ROOT}/daemon/")
DOCS: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md")


def modules() -> dict[str, Path]:
    """The production modules by dotted name, without generated stubs; a package stands for its ``__init__``."""
    paths = {path: path.relative_to(source) for source in SOURCES for path in sorted(Path(source).rglob("*.py"))}
    names = {path: ".".join(short.with_suffix("").parts).removesuffix(".__init__") for path, short in paths.items()}
    return {name: path for path, name in names.items() if not name.startswith("kvtier.v1")}


def lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def imports(path: Path, *, typing: bool) -> set[str]:
    """The names that a module imports, those of ``from a import b`` as ``a.b``."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not typing:
            node.body = []
    nodes = list(ast.walk(tree))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {
        f"{node.module}.{each.name}" for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names
    }


def circles(found: dict[str, Path], *, typing: bool) -> list[str]:
    """Those of more than three modules."""
    below: dict[str, set[str]] = {}
    for name, path in found.items():
        targets = {each if each in found else each.rpartition(".")[0] for each in imports(path, typing=typing)}
        below[name] = (targets & found.keys()) - {name}
    for between in found:
        for name in found:
            if between in below[name]:
                below[name] |= below[between]
    together = {frozenset(other for other in below[name] if name in below[other]) for name in found}
    return [f"{len(circle)} ({', '.join(sorted(circle))})" for circle in together if len(circle) > 3]


def long_docstrings(path: Path) -> list[str]:
    """Public definitions whose docstring has more than ten lines."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds) and node.name[0] != "_"]
    return [node.name for node in nodes if len((ast.get_docstring(node) or "").splitlines()) > 10]


def show_structure() -> None:
    found = modules()
    length = {name: lines(path) for name, path in found.items()}
    short = [name for name, count in length.items() if count < 60 and found[name].name != "__init__.py"]
    long = [name for name, count in length.items() if count > 600]
    wordy = [f"{name}.{each}" for name, path in found.items() for each in long_docstrings(path)]
    docs = [path for pattern in DOCS for path in ROOT.glob(pattern)]
    running, typing = circles(found, typing=False), circles(found, typing=True)
    for name, count, members in (
        ("production lines", sum(length.values()) + lines(ROOT / "client/kvtier/__init__.pyi"), []),
        ("modules", len(found), []),
        ("  under 60 lines, without __init__", len(short), short),
        ("  over 600 lines", len(long), long),
        ("public docstrings over ten lines", len(wordy), wordy),
        ("modules at the top of client/kvtier", len(list(ROOT.glob("client/kvtier/*.py"))), []),
        ("import circles of > 3, at run time", len(running), running),
        ("import circles of > 3, with typing", len(typing), typing),
        ("test lines", lines(*ROOT.glob("tests/**/*.py")), []),
        ("docs lines", lines(*docs), []),
        ("docs words", sum(len(path.read_text().split()) for path in docs), []),
    ):
        print(f"{name:37}{count:7,}  {', '.join(members)}")


if __name__ == "__main__":
    show_structure()
