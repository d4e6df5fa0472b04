"""Copy streams between memory tiers: what a batch's copies are, in few large pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvtierd.core.ids import GroupId, SlotId
from kvtierd.mover.work import Batch, Faults, destination, items_of


@dataclass(slots=True, frozen=True)
class Run:
    """``count`` consecutive slots of a group, copied to as many consecutive slots."""

    group: GroupId
    src: SlotId
    dst: SlotId
    count: int


def runs(copies: Iterable[tuple[GroupId, SlotId, SlotId]]) -> Iterator[Run]:
    """Joins (group, source, destination) copies where both sides are adjacent.

    The copies of a batch touch no slot twice, so their order is free to choose.
    """
    run: Run | None = None
    for group, src, dst in sorted(copies):
        if run is not None and (group, src, dst) == (run.group, run.src + run.count, run.dst + run.count):
            run = Run(group, run.src, run.dst, run.count + 1)
            continue
        if run is not None:
            yield run
        run = Run(group, src, dst, 1)
    if run is not None:
        yield run


def copy(batch: Batch) -> Faults:
    """Copies every item's bytes from the source tier's slot to the destination's.

    One ``np.copyto`` a run and pool: it releases the GIL, and many small ones beside a busy thread are 7 to 80 times
    slower.
    """
    runtime = batch[0].runtime
    edge = batch[0].move
    if edge.dst is None:
        raise ValueError("a copy stream cannot retire slots")
    source, target = runtime.memory(edge.src), runtime.memory(edge.dst)
    for run in runs((move.group, item.src, destination(item)) for move, item in items_of(batch)):
        for pool in range(runtime.pools(run.group)):
            np.copyto(
                target.pool_array(run.group, pool)[run.dst : run.dst + run.count],
                source.pool_array(run.group, pool)[run.src : run.src + run.count],
            )
    return Faults()
