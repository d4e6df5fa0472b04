"""The size and the seed of the runs in this folder."""

from __future__ import annotations

import os
from typing import Final

SHARE: Final = float(os.environ.get("KVTIER_TORTURE") or 1)
"""Of each run's full size, which together take a quarter of an hour. 0.03 = a check of the tests themselves."""


def scaled(whole: int, least: int = 1) -> int:
    """So many of ``whole`` rounds, but ``least`` of them in any case."""
    return max(least, round(whole * SHARE))
