"""The import rule: its own contract type, and what importing a package really loads."""

import subprocess
import sys

import pytest
from grimp import ImportGraph
from import_rule import AllowlistContract


def check(*imports, **more):
    graph = ImportGraph()
    for importer, imported in imports:
        graph.add_module(importer)
        graph.add_module(imported)
        graph.add_import(importer=importer, imported=imported, line_number=1, line_contents="")
    options = {"importers": ["app.seam"], "allowed": ["numpy", "lib.wire"], **more}
    return AllowlistContract(name="seam", session_options={}, contract_options=options).check(graph, verbose=False)


@pytest.mark.parametrize(
    "imported", ["numpy", "lib.wire", "lib.wire.deep", "app.seam.other", "json", "collections.abc"]
)
def test_allows_the_listed_itself_and_the_standard_library(imported):
    assert check(("app.seam.part", imported)).kept


@pytest.mark.parametrize("imported", ["grpc", "lib", "lib.wires", "app", "app.seams"])
def test_refuses_everything_else(imported):
    broken = check(("app.seam.part", "numpy"), ("app.seam.part", imported))
    assert not broken.kept
    assert broken.metadata["broken"] == [("app.seam.part", 1, imported)]


def test_judges_only_the_importers():
    assert check(("app.elsewhere", "grpc")).kept


def test_what_is_exempt_is_not_judged():
    assert check(("app.seam.part.deep", "grpc"), exempt=["app.seam.part"]).kept
    assert not check(("app.seam.parts", "grpc"), exempt=["app.seam.part"]).kept


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("kvtier; from kvtier import *", ("torch", "cuda", "lmdb", "kvtierd")),
        ("kvtier.abi", ("grpc", "google.protobuf", "click", "rich", "torch", "cuda", "lmdb", "kvtierd")),
        ("kvtier.abi.cuda.views", ("torch", "cuda")),
        ("kvtier; from kvtier import sync", ("asyncio", "numpy", "grpc", "google.protobuf", "kvtier.errors")),
        ("kvtier; kvtier.connect", ("numpy", "click", "rich", "kvtier.arena")),
        ("kvtier.cli", ("torch", "cuda", "lmdb", "kvtierd", "numpy", "grpc", "google.protobuf", "rich")),
        ("kvtier.cli.status", ("numpy", "kvtier.arena")),
        ("kvtier.cli.simulate", ("torch", "cuda", "lmdb", "kvtierd")),
        ("kvtierd.simulate.fleet", ("torch", "cuda", "lmdb", "grpc", "asyncio", "kvtierd.tiers")),
        ("kvtierd.main", ("torch", "cuda", "grpc", "numpy", "lmdb")),
        ("kvtierd.serve", ("torch", "cuda", "kvtier.client", "kvtierd.fleet")),
    ],
)
def test_an_import_loads_only_what_it_may(module, unwanted):
    script = f"import sys, {module}; print(*(name for name in {unwanted!r} if name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
