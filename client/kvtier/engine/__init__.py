"""What every engine's connector needs: layouts, keys, and who plans, moves and commits.

The scheduler's process has a :class:`Planner`, each worker a :class:`Mover`. :class:`Work` goes from the one to the
others with every step of the engine, and :class:`Outcome` comes back.
"""

from kvtier.engine.keys import KeyChain
from kvtier.engine.layout import Layout, PageGroup, Pages, Plane
from kvtier.engine.mover import Mover
from kvtier.engine.options import EngineOptions
from kvtier.engine.planner import Planner
from kvtier.engine.weights import Adapters, Weights, weights_of
from kvtier.engine.work import Completed, Load, Outcome, Save, Work

__all__ = [
    "Adapters",
    "Completed",
    "EngineOptions",
    "KeyChain",
    "Layout",
    "Load",
    "Mover",
    "Outcome",
    "PageGroup",
    "Pages",
    "Plane",
    "Planner",
    "Save",
    "Weights",
    "Work",
    "weights_of",
]
