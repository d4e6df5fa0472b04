"""The driver of ``benchmarks.replay``, with a few requests: through kvtier, and through an engine that errs."""

from __future__ import annotations

import numpy as np

from benchmarks.replay import OURS, Row, measure, table
from benchmarks.replay_engines import Job, replay

PROMPTS = [[0, 1, 2], [0, 1, 3], [0, 1, 2], [4]]


def test_a_replay_loads_what_requests_before_have_stored(tmp_path):
    row = Row(64, 16, 0)
    results = measure({"kvtier": OURS}, row, PROMPTS, tmp_path, 0, cold=True)
    record = results["kvtier"].record
    assert (record.asked, record.loaded, record.wrong) == (10, 5, 0)
    assert [blocks for _, blocks in record.stores] == [3, 1, 1]
    shown = table({(row, "kvtier"): list(results.values())}).splitlines()[-1]
    assert shown.startswith("| 64 KiB, in memory, 4 requests | kvtier | 1 |")
    assert "| 0.500 | 0 |" in shown


class Erring:
    """Keeps blocks in a dict, and alters the last byte of block 1."""

    servers = ()

    def __init__(self, job: Job) -> None:
        self.rows = np.zeros((job.longest, job.block_bytes), np.uint8)
        self._kept: dict[int, np.ndarray] = {}

    def lookup(self, prompt: list[int]) -> int:
        return next((at for at, block in enumerate(prompt) if block not in self._kept), len(prompt))

    def load(self, prompt: list[int], found: int) -> int:
        for row, block in zip(self.rows, prompt[:found], strict=False):
            row[:] = self._kept[block]
            row[-1] ^= block == 1
        return found

    def store(self, prompt: list[int], first: int) -> None:
        self._kept |= {block: row.copy() for block, row in zip(prompt[first:], self.rows[first:], strict=False)}


def test_a_wrong_byte_is_counted():
    job = Job("", 4096, 0, 0, longest=3, distinct=5, home="", cold=True)
    record = replay(Erring(job), job, PROMPTS)
    assert (record.loaded, record.wrong) == (5, 2)
