"""The part of a connector that is the same for every engine: layouts, keys, planning, copies and commits.

The scheduler's process has a :class:`Planner`, each worker a :class:`Mover`. With every step of the engine the planner
sends the movers a :class:`Work`; a mover answers each ticket with an :class:`CopyResult`.
"""

from kvtier.abi.spec import STATE
from kvtier.engine.layout import GroupPages, Layout, PageGroup, PlaneLayout
from kvtier.engine.mover import Mover
from kvtier.engine.options import EngineOptions
from kvtier.engine.planner import Planner
from kvtier.engine.request import KeyChain, TokenChain
from kvtier.engine.weights import Adapters, Weights, weights_of
from kvtier.engine.work import Completed, CopyResult, Load, Save, Work

__all__ = [
    "STATE",
    "Adapters",
    "Completed",
    "CopyResult",
    "EngineOptions",
    "GroupPages",
    "KeyChain",
    "Layout",
    "Load",
    "Mover",
    "PageGroup",
    "PlaneLayout",
    "Planner",
    "Save",
    "TokenChain",
    "Weights",
    "Work",
    "weights_of",
]
