"""The driver of ``benchmarks.replay``, with a few requests: through kvtier, and through an engine that errs."""

import numpy as np

from benchmarks.replay import OURS, Row, measure, table
from benchmarks.replay_engines import Engine, Job, replay

PROMPTS = [[0, 1, 2], [0, 1, 3], [0, 1, 2], [4]]


def test_a_replay_loads_what_requests_before_have_stored(tmp_path):
    row = Row(64, 16, 0)
    record = measure({"kvtier": OURS}, row, PROMPTS, tmp_path, 0)["kvtier"]
    assert (record.asked, record.loaded, record.wrong) == (10, 5, 0)
    assert len(record.stores) == 3
    shown = table({(row, "kvtier"): [record]}).splitlines()[-1]
    assert shown.startswith("| 64 KiB, in memory, 4 requests | kvtier | 1 | 0 |")
    assert "| 0.500 |" in shown
    assert len(record.requests) == 4
    assert 0 <= record.faults < 1_000, "its memory was filled before"


def erring(job: Job) -> Engine:
    """Keeps blocks in a dict, and alters the last byte of block 1."""
    rows = np.zeros((job.longest, job.block_bytes), np.uint8)
    kept: dict[int, np.ndarray] = {}

    def lookup(prompt):
        return next((at for at, block in enumerate(prompt) if block not in kept), len(prompt))

    def load(prompt, found):
        for at in range(found):
            rows[at] = kept[prompt[at]]
            rows[at, -1] ^= prompt[at] == 1
        return found

    def store(prompt, first):
        kept.update({block: rows[at].copy() for at, block in enumerate(prompt) if at >= first})

    return Engine(rows, (), lookup, load, store, kept.clear)


def test_a_wrong_byte_is_counted():
    job = Job("", 4096, 0, 0, longest=3, distinct=5, home="", pace=50.0)
    record = replay(erring(job), job, PROMPTS)
    assert (record.loaded, record.wrong) == (5, 2)
