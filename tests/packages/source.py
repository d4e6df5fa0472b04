"""A copy of what packages are built from, so that builds leave nothing in the tree."""

import shutil
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DIRECTORIES: Final = ("client", "daemon", "deploy", "docs", "proto", "systemd")
FILES: Final = (".containerignore", "LICENSE", "README.md", "pyproject.toml")


def copied_to(tree: Path) -> Path:
    for name in DIRECTORIES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    return tree
