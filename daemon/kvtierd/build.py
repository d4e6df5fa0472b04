"""What this kvtierd is."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

COMPILED: Final = not __file__.endswith(".py")
"""The core and what is next to it run as machine code, not as bytecode: see setup.py."""

VERSION: Final = version("kvtier") + ("+compiled" if COMPILED else "")
"""PEP 440's form for a build of one's own."""
