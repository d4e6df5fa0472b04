"""What the compiler of setup.py takes without a word and gets wrong stays out of the modules that it is given."""

import ast
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("setuptools.setup", _nothing)
        sources: Callable[[], list[str]] = runpy.run_path("setup.py")["sources"]
        return {source: ast.parse(Path(source).read_text()) for source in sources()}


def test_the_core_is_among_them(modules: dict[str, ast.Module]) -> None:
    assert {"daemon/kvtierd/core/manager.py", "daemon/kvtierd/core/block.py"} < set(modules)
    assert "daemon/kvtierd/core/errors.py" not in modules


def test_no_function_is_made_inside_a_comprehension(modules: dict[str, ast.Module]) -> None:
    """It finds nothing of what is around it (mypyc 2.4: ``attribute '__mypyc_env__' undefined``)."""
    assert list(_lines(modules, _functions_in_comprehensions)) == []


def test_no_method_has_a_second_name(modules: dict[str, ast.Module]) -> None:
    """``enter = use`` in a class fails when the class is instantiated (mypyc 2.4: ``KeyError: 'use'``)."""
    assert list(_lines(modules, _second_names)) == []


def test_no_function_inside_another_outlives_it(modules: dict[str, ast.Module]) -> None:
    """It and what is around it refer to each other (mypyc 2.4), so only a garbage collection frees them, and what a
    collection of the daemon's has met alive none looks at again. Nothing in the core waits, so there none meets it."""
    around_the_core = {source: module for source, module in modules.items() if "/core/" not in source}
    assert list(_lines(around_the_core, _functions_in_functions)) == []


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("[one(lambda: two) for two in three]", "comprehension"),
        ("class A:\n def b(self): ...\n c = b", "name"),
        ("def a():\n if b:\n  def c(): ...\n  return c", "function"),
    ],
)
def test_what_is_looked_for_is_found(text: str, check: str) -> None:
    checks = {"comprehension": _functions_in_comprehensions, "name": _second_names, "function": _functions_in_functions}
    found = checks[check]
    assert len(list(_lines({"here": ast.parse(text)}, found))) == 1


def _nothing(**_: Any) -> None: ...


def _lines(modules: dict[str, ast.Module], found: Callable[[ast.AST], Iterator[ast.AST]]) -> Iterator[str]:
    for source, module in modules.items():
        for node in ast.walk(module):
            yield from (f"{source}:{getattr(part, 'lineno', 0)}" for part in found(node))


def _functions_in_comprehensions(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        yield from (part for part in ast.walk(node) if isinstance(part, ast.Lambda))


def _second_names(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.ClassDef):
        methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        for part in node.body:
            if isinstance(part, ast.Assign) and isinstance(part.value, ast.Name) and part.value.id in methods:
                yield part


def _functions_in_functions(node: ast.AST) -> Iterator[ast.AST]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, kinds):
        yield from (part for part in ast.walk(node) if part is not node and isinstance(part, kinds))
