"""Who carries out a batch: the processor, or the copy engines of a GPU where its cache's device tier is one."""

from __future__ import annotations

from kvtierd.mover import diskio, streams
from kvtierd.mover.work import Batch, Faults, Finish


def copy(batch: Batch) -> Faults | Finish:
    """Between memory tiers."""
    cuda = batch[0].runtime.cuda
    return streams.copy(batch) if cuda is None else cuda.copy(batch)


def write(batch: Batch) -> Finish:
    """To disk, with deletions there."""
    cuda = batch[0].runtime.cuda
    return diskio.write(batch) if cuda is None else cuda.write(batch)


def read(batch: Batch) -> Faults | Finish:
    """From disk."""
    cuda = batch[0].runtime.cuda
    return diskio.read(batch) if cuda is None else cuda.read(batch)
