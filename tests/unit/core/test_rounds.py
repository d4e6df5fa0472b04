"""What one call of the core does at most: a round of making room and starting requests, and who comes first in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from string import ascii_letters

from kvtierd.core.outcome import Outcome
from kvtierd.core.policy import Policy
from kvtierd.core.room import PLACED_A_ROUND
from tests.unit.core.bench import ALICE, DEVICE, GROUP, HOST, Bench, keys

OUTCOME = [field.name for field in fields(Outcome)]
VICTIMS = Policy().victims_a_call
WANTED = ascii_letters[: VICTIMS + 4]
"""More than a round vacates."""


class Rounds(Bench):
    """``planned``: how many copies each call of the core planned. Rounds follow when told, not by themselves."""

    def __init__(self, *, device: int, host: int, disk: int, recovered: str) -> None:
        self.planned: list[int] = []
        self.again = False
        super().__init__(device=device, host=host, disk=disk, recovered=[(name, None, 35) for name in recovered])

    def apply(self, outcome: Outcome) -> Outcome:
        again, self.again = outcome.again, False
        super().apply(Outcome(**{name: getattr(outcome, name) for name in OUTCOME} | {"again": False}))
        self.planned.append(sum(len(move.items) for move in outcome.moves if move.dst is not None))
        self.again = again
        return outcome

    def rounds(self) -> list[int]:
        """Until nothing is left to do; of each what it planned."""
        self.planned.clear()
        while self.again:
            self.apply(self.core.tick(self.now))
        return list(self.planned)


def test_a_round_that_has_made_room_leaves_a_long_request_to_the_next_one() -> None:
    bench = Rounds(device=10, host=64, disk=64, recovered=WANTED)
    bench.put("0123456789")
    reserved = bench.reserve(DEVICE, 10)
    (acquired,) = bench.acquire(WANTED, tier=HOST)
    assert bench.rounds()[:2] == [10, len(WANTED)]
    bench.land()
    bench.rounds()
    assert reserved in bench.grants
    assert bench.grants[acquired].blocks == len(WANTED)


def test_who_was_put_off_comes_first_however_much_room_is_wanted_above() -> None:
    bench = Rounds(device=4 * VICTIMS, host=8 * VICTIMS, disk=64, recovered=WANTED)
    bench.put(numbered(4 * VICTIMS))
    bench.reserve(DEVICE, 4 * VICTIMS)
    bench.acquire(WANTED, tier=HOST)
    assert bench.rounds()[:5] == [VICTIMS, len(WANTED), VICTIMS, VICTIMS, VICTIMS]


def test_a_round_that_places_many_blocks_makes_less_room() -> None:
    stored = PLACED_A_ROUND
    bench = Rounds(device=stored, host=2 * stored, disk=8, recovered="")
    bench.put(numbered(stored))
    bench.core.touch(GROUP, keys(numbered(stored)[-1]), 0, bench.now)  # and with it all others; nobody has looked since
    ticket, _ = bench.core.reserve(ALICE, GROUP, DEVICE, VICTIMS, bench.now)
    bench.apply(bench.core.tick(bench.now))
    assert 0 < bench.planned[-1] < VICTIMS
    assert bench.planned[-1] + sum(bench.rounds()) == VICTIMS
    bench.land()
    bench.rounds()
    assert ticket in bench.grants


def test_ancestors_that_go_to_disk_with_a_victim_count_as_well() -> None:
    bench = Rounds(device=4 * VICTIMS, host=0, disk=8 * VICTIMS, recovered="")
    for tail, chain in zip("wxyz", batched(numbered(4 * (VICTIMS - 1)), VICTIMS - 1), strict=True):
        bench.put(chain, priority=60)
        bench.put(tail, under=chain[-1])
    bench.reserve(DEVICE, 4)
    assert bench.rounds()[:4] == [VICTIMS] * 4, "a tail, and all that it stands on"


def batched(names: str, count: int) -> Iterator[str]:
    for first in range(0, len(names), count):
        yield names[first : first + count]


def numbered(count: int) -> str:
    """The names of so many blocks."""
    return "".join(chr(0x100 + number) for number in range(count))
