"""Exact local copies of what daemons hold, for routers: longest prefixes without a call."""

from kvtier.mirror.follower import Mirror, MirrorState, MirrorView
from kvtier.mirror.index import MirroredBlock
from kvtier.mirror.ranking import Standing, rank_mirrors

__all__ = ["Mirror", "MirrorState", "MirrorView", "MirroredBlock", "Standing", "rank_mirrors"]
