"""Exact local indexes of daemons' blocks, for routers: longest prefixes without a call."""

from kvtier.mirror.daemons import Mirrors
from kvtier.mirror.follower import Mirror, MirrorState, MirrorView, Standing, rank_mirrors
from kvtier.mirror.index import MirroredBlock

__all__ = ["Mirror", "MirrorState", "MirrorView", "MirroredBlock", "Mirrors", "Standing", "rank_mirrors"]
