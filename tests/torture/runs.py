"""The size and the seed of the runs in this folder."""

import os
from typing import Final

SHARE: Final = float(os.environ.get("KVTIER_TORTURE") or 1)
"""Share of each run's full size. 1 takes a quarter of an hour for all runs; 0.03 checks the tests themselves."""


def scaled(whole: int, least: int = 1) -> int:
    """Returns the share of ``whole`` rounds, but at least ``least``."""
    return max(least, round(whole * SHARE))
