"""Exact local copies of what daemons hold, for routers: longest prefixes without a call."""

from kvtier.mirror.follower import Mirror
from kvtier.mirror.index import MirroredBlock
from kvtier.mirror.ranking import Standing
from kvtier.mirror.reading import MirrorState, MirrorView
from kvtier.mirror.several import Mirrors

__all__ = ["Mirror", "MirrorState", "MirrorView", "MirroredBlock", "Mirrors", "Standing"]
