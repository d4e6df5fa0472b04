"""What pyproject.toml cannot say: with ``KVTIER_COMPILE=1`` the modules below become machine code, by mypyc.

They are the same files that run interpreted everywhere else: the core, and what the daemon does for each block around
it. Without the variable kvtier is pure Python. ``make wheel`` sets it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

DAEMON = Path("daemon/kvtierd")
INTERPRETED = frozenset({"__init__.py", "errors.py"})
"""Of the core: exceptions, which stay classes of the interpreter's own."""
AROUND_THE_CORE = (
    "build",
    "event_ids",
    "mover/carrying",
    "mover/diskio",
    "mover/edges",
    "mover/engine",
    "mover/indexing",
    "mover/lanes",
    "mover/mailbox",
    "mover/queues",
    "mover/requests",
    "mover/runtime",
    "mover/tickets",
    "mover/uses",
    "mover/work",
    "service/event_filter",
    "service/history",
    "service/hub",
    "service/labels",
    "service/validate",
    "service/wire",
    "tiers/arena",
    "tiers/disk/batch",
    "tiers/disk/changes",
    "tiers/disk/checks",
    "tiers/disk/checksum",
    "tiers/disk/journal",
    "tiers/disk/records",
    "tiers/disk/runs",
    "tiers/disk/slot_index",
    "tiers/disk/table",
    "tiers/disk/values",
    "tiers/index_columns",
    "tiers/key_index",
    "tiers/parts",
)


def sources() -> list[str]:
    core = [path for path in sorted((DAEMON / "core").glob("*.py")) if path.name not in INTERPRETED]
    return [str(path) for path in (*core, *(DAEMON / f"{name}.py" for name in AROUND_THE_CORE))]


def compiled() -> list[Extension]:
    """Needs a C compiler, Python's headers, and all that the daemon imports, for mypy to read."""
    from mypyc.build import mypycify

    return mypycify(sources(), group_name="kvtierd", opt_level="2", debug_level="0")


# An installer runs this file several times for a wheel, and only one of them builds.
wanted = os.environ.get("KVTIER_COMPILE") == "1" and "bdist_wheel" in sys.argv
setup(ext_modules=compiled() if wanted else [])
