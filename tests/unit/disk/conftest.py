from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.tiers.disk.store import DiskStore
from tests.unit.disk.disk_blocks import new_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = new_store(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    return tmp_path / "store" / "group-0.slab"
