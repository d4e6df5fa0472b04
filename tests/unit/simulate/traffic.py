"""Requests as several kinds of traffic would send them, small and seeded: each a chain of block ids, in order of time.

Figures: a conversation of LMSYS-Chat-1M has 2 turns on average (Zheng et al., ICLR 2024). In "KVCache Cache in the
Wild" (Wang et al., ATC 2025) most reuses of a chatbot's blocks come within ten minutes and those of programs within ten
seconds. An agent takes 29 to 78 steps for a task of SWE-Bench Pro, by the median of its model (nilenso's analysis of
2,920 trajectories). Lengths are lognormal.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Final

Timed = tuple[float, list[int]]


class Source:
    """``random`` and fresh ids of blocks. ``seconds``: after which no session begins."""

    def __init__(self, seed: str, seconds: float) -> None:
        self.random = random.Random(seed)
        self._seconds = seconds
        self.ids = count()

    def blocks(self, median: float) -> list[int]:
        return [next(self.ids) for _ in range(max(1, round(self.about(median))))]

    def about(self, median: float) -> float:
        return self.random.lognormvariate(math.log(median), 0.8)

    def arrivals(self, rate: float) -> Iterator[float]:
        now = self.random.expovariate(rate)
        while now < self._seconds:
            yield now
            now += self.random.expovariate(rate)


def _sessions(source: Source, rate: float, turns: float, pause_s: float, step: float) -> Iterator[Timed]:
    """Turn after turn on one of five system prompts; how many turns are left does not depend on how many there were."""
    prompts = [source.blocks(4) for _ in range(5)]
    for now in source.arrivals(rate):
        chain = [*source.random.choice(prompts), *source.blocks(2 * step)]
        yield now, chain
        while source.random.random() > 1 / turns:
            now += source.about(pause_s)
            chain = [*chain, *source.blocks(step)][:400]
            yield now, chain


def _documents(source: Source) -> Iterator[Timed]:
    """A question about one of 500 documents, some of which are asked about far more often."""
    prompt = source.blocks(2)
    documents = [source.blocks(8) for _ in range(500)]
    weights = [1 / (place + 1) ** 0.9 for place in range(len(documents))]
    for now in source.arrivals(3):
        (document,) = source.random.choices(documents, weights)
        yield now, [*prompt, *document, *source.blocks(1)]


def _scan(source: Source) -> Iterator[Timed]:
    """The same 200 prompts over and over."""
    prompts = [source.blocks(6) for _ in range(200)]
    for number, now in enumerate(source.arrivals(2)):
        yield now, prompts[number % len(prompts)]


def _coding_agents(source: Source) -> Iterator[Timed]:
    """Blocks of 512 tokens. A session begins with 32,000 tokens that all share, adds 6,000 a turn on average, pauses
    for a tool (70 %) or a person, and ends at 167,000 tokens: the parameters of AIPerf's default."""
    prompt = [next(source.ids) for _ in range(62)]
    for now in source.arrivals(0.1):
        chain = [*prompt, *source.blocks(11)]
        while len(chain) < 326:
            yield now, chain
            now += source.about(2 if source.random.random() < 0.7 else 25)
            kept = prompt if source.random.random() < 0.01 else chain
            chain = [*kept, *source.blocks(8.5)][:326]


KINDS: Final[Mapping[str, Callable[[Source], Iterator[Timed]]]] = {
    "chat": lambda source: _sessions(source, 2, 2, 60, 3),
    "long chat": lambda source: _sessions(source, 0.7, 6, 60, 4),
    "agents": lambda source: _sessions(source, 0.05, 50, 6, 1),
    "coding agents": _coding_agents,
    "single turns": lambda source: _sessions(source, 4, 1, 1, 3),
    "documents": _documents,
    "scan": _scan,
}


def requests(*kinds: str, seconds: float) -> list[Timed]:
    """Of these kinds at once."""
    source = Source(" ".join(kinds), seconds)
    timed = [request for kind in kinds for request in KINDS[kind](source)]
    return sorted(timed, key=lambda request: request[0])
