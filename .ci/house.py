"""Measures the house: lines, modules, import circles, docs; with ``--calls`` also what a request crosses.

An import circle is a strongly connected set of modules. "At run time" counts the imports that are executed, at the top
of a module or inside a function; "with typing" counts those under ``if TYPE_CHECKING`` too.
"""

import ast
import asyncio
import inspect
import opcode
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = (f"{ROOT}/client/", f"{ROOT}/daemon/")
DOCS: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md")
PAUSING: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
START: Final = opcode.opmap["RETURN_GENERATOR"]
SETTLE_S: Final = 0.2
"""How long the daemon may go on working after it has answered."""


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


class Counter:
    """Counts Python calls of product code in this process, and the files that they are in.

    A coroutine or generator that goes on after a pause is not another call.
    """

    def __init__(self) -> None:
        self.clear()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def clear(self) -> None:
        self.calls, self.files = 0, set[str]()

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES) and "/v1/" not in code.co_filename:
            self.files.add(code.co_filename)
            self.calls += not code.co_flags & PAUSING or code.co_code[frame.f_lasti] == START


async def count_calls(address: str, counter: Counter) -> None:
    """Makes each request 15 times; shows the median count of calls, and the files that every repetition crossed."""
    import numpy as np

    from kvtier import CacheSpec, Tier, connect

    spec = CacheSpec.single("house", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=128)
    rows = np.ones((4, spec.block_bytes(0)), np.uint8)
    found: dict[str, list[tuple[int, set[str]]]] = {}

    async def measure(name: str, work: Awaitable[object], settle_s: float = SETTLE_S) -> None:
        counter.clear()
        await work
        await asyncio.sleep(settle_s)
        found.setdefault(name, []).append((counter.calls, set(counter.files)))

    async def store(keys: list[bytes]) -> None:
        async with cache.reserve(len(keys), Tier.HOST) as lease:
            await lease.commit(keys)

    async with await connect(address) as client:
        cache = await client.open_cache("house", spec)
        chains = [[os.urandom(32) for _ in range(64)] for _ in range(15)]
        for keys in chains:
            four = [key[::-1] for key in keys[:4]]
            await measure("reserve + commit of 4", store(four))
            await measure("get of 4", cache.get(four, rows), settle_s=0)  # it makes no call
            await asyncio.sleep(SETTLE_S)  # the daemon is told which blocks were read
            await measure("move of 4 to disk", cache.move(four, Tier.DISK))
            await measure("reserve + commit of 64", store(keys))
        async with client.watch() as watch:
            for keys in chains:
                await measure("one event to a watcher", asyncio.gather(anext(watch), cache.drop(keys[63:])))
        for _ in range(3):
            await measure("an idle second", asyncio.sleep(1), settle_s=0)
    for name, runs in found.items():
        crossed = set.intersection(*(files for _, files in runs))
        print(f"{name:37}{len(crossed):7} files {statistics.median(calls for calls, _ in runs):7,.0f} calls")
        print("    " + " ".join(sorted(str(Path(file).relative_to(ROOT)) for file in crossed)), flush=True)


def show_calls() -> None:
    """Runs a daemon in the main thread and its client in another, so that one counter sees both."""
    from kvtierd.main import main

    def work() -> None:
        while not Path(f"{directory}/runtime/attach.sock").exists():
            time.sleep(0.1)
        try:
            asyncio.run(count_calls(f"{directory}/runtime", counter))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    counter = Counter()
    with tempfile.TemporaryDirectory() as directory:
        sys.argv = ["kvtierd", *(f"--{name}-dir={directory}/{name}" for name in ("runtime", "state", "disk"))]
        sys.argv += ["--host-bytes=32MiB", "--disk-bytes=32MiB"]
        threading.Thread(target=work).start()
        main()


if __name__ == "__main__":
    show_structure()
    if "--calls" in sys.argv:
        show_calls()
