"""The record of what caches have forgotten: daemons that join theirs agree, and it is durable."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.ids import GroupId, Key
from kvtierd.service.forgotten import MOST_DROPPED, Forgotten, Past
from kvtierd.service.remote import telling
from kvtierd.service.remote.telling import MOST_REMOVED, Teller
from kvtierd.tiers.base import TierIOError
from kvtierd.tiers.disk.superblock import SET_ASIDE, SUPERBLOCK
from tests.integration.waiting import eventually

KEYS = [Key(bytes([number]) * 32) for number in range(4)]
CACHE = "c/0123"
_PLACES = st.tuples(st.integers(0, 1).map(GroupId), st.sampled_from(KEYS))
pasts = st.builds(
    lambda generation, dropped: Past(generation).joined(Past(0, dropped)),
    st.integers(0, 6),
    st.dictionaries(_PLACES, st.integers(1, 9)),
)


@given(pasts, pasts, pasts)
def test_daemons_that_join_agree_in_any_order(one: Past, two: Past, three: Past) -> None:
    assert one.joined(two) == two.joined(one)
    assert one.joined(two).joined(three) == one.joined(two.joined(three))
    assert one.joined(one) == one
    for group, key in ((GroupId(0), KEYS[0]), (GroupId(1), KEYS[3])):
        revisions = [past.revision(group, [key]) for past in (one, two, one.joined(two))]
        assert revisions[2] == max(revisions[:2])


@given(pasts)
def test_it_is_read_as_it_was_written(past: Past) -> None:
    assert Past.decoded(json.loads(json.dumps(past.encoded()))) == past


@given(pasts, st.sampled_from(KEYS))
def test_a_drop_and_a_reset_are_later_than_all_before(past: Past, key: Key) -> None:
    dropped = past.after_drop(GroupId(0), [key])
    latest = max([past.generation, *past.dropped.values()])
    assert dropped.revision(GroupId(0), [KEYS[0], key]) > latest
    assert dropped.generation == past.generation
    assert dropped.after_reset().generation > dropped.revision(GroupId(0), [key])
    assert not dropped.after_reset().dropped
    assert past.after_drop(GroupId(0), []) == past


def test_more_drops_than_it_remembers_are_a_reset() -> None:
    keys = [Key(number.to_bytes(32)) for number in range(MOST_DROPPED + 1)]
    past = Past().after_drop(GroupId(0), keys[:-1])
    assert (past.generation, len(past.dropped)) == (0, MOST_DROPPED)
    more = past.after_drop(GroupId(0), keys[-1:])
    assert more.generation >= max(past.dropped.values())
    assert not more.dropped


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"generation": "x", "dropped": {}},
        {"generation": 1 << 64, "dropped": {}},
        {"generation": -1, "dropped": {}},
        {"generation": 1, "dropped": []},
        {"generation": 1, "dropped": {"0": "zz"}},
        {"generation": 1, "dropped": {"0": "ff" * 40}},
        {"generation": 1, "dropped": {"0": "00" * 39}},
        {"generation": float("inf"), "dropped": {}},
    ],
)
def test_garbage_is_no_past(content: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Past.decoded(content)


async def test_it_outlives_the_daemon(tmp_path: Path) -> None:
    forgotten = Forgotten(tmp_path)
    async with forgotten.change(CACHE) as before:
        assert forgotten.is_changing(CACHE) and forgotten.has_old(CACHE)
        forgotten.set(CACHE, before.after_reset())
        forgotten.keep(CACHE, [(GroupId(1), KEYS[2])])
        assert forgotten.generation(CACHE) == 0, "it has not ended"
    assert not forgotten.is_changing(CACHE)
    assert forgotten.has_old(CACHE)
    again = Forgotten(tmp_path)
    assert again.of(CACHE) == forgotten.of(CACHE) != Past()
    assert again.generation(CACHE) == forgotten.of(CACHE).generation
    assert again.kept(CACHE) == {(GroupId(1), KEYS[2])}
    assert (set(again.prefixes), again.of("c/other")) == ({CACHE}, Past())
    async with again.change(CACHE):
        again.keep(CACHE, ())
    assert not Forgotten(tmp_path).has_old(CACHE)


async def test_of_more_kept_blocks_than_a_file_has_the_cache_is_reset_after_a_restart(tmp_path: Path) -> None:
    forgotten, kept = Forgotten(tmp_path), [(GroupId(0), Key(number.to_bytes(32))) for number in range(3_000)]
    async with forgotten.change(CACHE):
        forgotten.keep(CACHE, kept)
    assert (len(forgotten.kept(CACHE)), forgotten.is_due(CACHE)) == (3_000, False)
    again = Forgotten(tmp_path)
    assert again.is_due(CACHE) and again.has_old(CACHE)
    again.begin(CACHE)  # a new cache of the name has nothing to reset
    assert not again.has_old(CACHE)
    async with again.change(CACHE):
        pass
    assert not Forgotten(tmp_path).is_due(CACHE)


async def test_a_change_whose_body_fails_is_none(tmp_path: Path) -> None:
    forgotten = Forgotten(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        async with forgotten.change(CACHE) as before:
            forgotten.set(CACHE, before.after_reset())
            raise asyncio.CancelledError
    assert forgotten.of(CACHE) == Past() == Forgotten(tmp_path).of(CACHE)


async def test_a_change_that_cannot_be_written_counts_and_is_written_later(tmp_path: Path) -> None:
    forgotten = Forgotten(tmp_path / "state")
    (tmp_path / "state").write_text("a file in the way")
    with pytest.raises(TierIOError):
        async with forgotten.change(CACHE) as before:
            forgotten.set(CACHE, before.after_reset())
    assert forgotten.of(CACHE) != Past()
    (tmp_path / "state").unlink()
    async with forgotten.change(CACHE):
        pass
    assert Forgotten(tmp_path / "state").of(CACHE) == forgotten.of(CACHE)


async def test_callers_who_give_up_leave_one_writer_at_a_time(tmp_path: Path) -> None:
    forgotten = Forgotten(tmp_path)

    async def drop(number: int) -> None:
        async with forgotten.change(CACHE) as before:
            forgotten.set(CACHE, before.after_drop(GroupId(0), [Key(number.to_bytes(32))]))

    dropping = [asyncio.create_task(drop(number)) for number in range(20)]
    for number, task in enumerate(dropping):
        await asyncio.sleep(0)
        if number % 3 == 0:
            task.cancel()
    await asyncio.gather(*dropping, return_exceptions=True)
    async with forgotten.change(CACHE):
        pass
    assert Forgotten(tmp_path).of(CACHE) == forgotten.of(CACHE)
    assert {key[-1] for _, key in forgotten.of(CACHE).dropped} >= {n for n in range(20) if n % 3}


@pytest.mark.parametrize("content", ["kvtier forgotten 9 00000000\n{}\n", "garbage"])
async def test_of_a_file_that_cannot_be_read_all_is_forgotten(tmp_path: Path, content: str) -> None:
    forgotten = Forgotten(tmp_path)
    async with forgotten.change(CACHE) as before:
        forgotten.set(CACHE, before.after_drop(GroupId(0), KEYS[:1]))
    (tmp_path / CACHE / SUPERBLOCK).write_text(content)
    again = Forgotten(tmp_path)
    assert again.of(CACHE).generation > max(forgotten.of(CACHE).dropped.values())
    assert again.is_due(CACHE), "blocks on disk may be of before"
    assert (tmp_path / CACHE / SET_ASIDE).exists()
    assert Forgotten(tmp_path).of(CACHE) == again.of(CACHE)


async def test_the_oldest_pasts_of_removed_caches_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_S", 0.01), ("WATCH_S", 0.01)):
        monkeypatch.setattr(telling, name, seconds)

    class Catalog(list[Any]):
        async def loaded(self) -> None:
            """At once."""

        def named(self, name: str) -> None:
            """None is open."""

        def knows(self, name: str) -> bool:
            return name == "cache-0"

    class Store:
        replaces = True
        objects: ClassVar[dict[str, bytes]] = {}

        async def exists(self, names: list[str]) -> list[bool]:
            return [name in self.objects for name in names]

        async def get(self, names: list[str], into: list[memoryview]) -> list[int]:
            (found,) = map(self.objects.__getitem__, names)
            into[0][: len(found)] = found
            return [len(found)]

        async def put(self, names: list[str], objects: list[bytes]) -> list[None]:
            self.objects.update(zip(names, objects, strict=True))
            return [None]

    forgotten = Forgotten(tmp_path / "forgotten")
    names = [f"cache-{number}/print" for number in range(MOST_REMOVED + 3)]
    for age, name in enumerate(names):
        async with forgotten.change(name):
            forgotten.set(name, Past(age + 1))
    here: Any = Catalog([SimpleNamespace(prefix=names[0])])
    teller = Teller(cast("Any", None), here, forgotten, cast("Any", Store()), lambda name: ())
    running = asyncio.create_task(teller.run())
    await eventually(lambda: len(forgotten.prefixes), lambda count: count == MOST_REMOVED + 1)
    running.cancel()
    await asyncio.wait([running])
    assert set(names) - forgotten.prefixes == set(names[1:3])
    assert Forgotten(tmp_path / "forgotten").prefixes == forgotten.prefixes
    assert not (tmp_path / "forgotten" / "cache-1").exists()


async def test_a_past_that_is_wanted_again_stays(tmp_path: Path) -> None:
    forgotten = Forgotten(tmp_path)
    async with forgotten.change(CACHE):
        forgotten.set(CACHE, Past(1))
        removing = asyncio.create_task(forgotten.remove(CACHE, lambda: forgotten.of(CACHE) == Past(1)))
        await asyncio.sleep(0)
        forgotten.set(CACHE, Past(2))
    assert not await removing
    assert Forgotten(tmp_path).of(CACHE) == Past(2)
    assert await forgotten.remove(CACHE, lambda: True)
    assert not Forgotten(tmp_path).prefixes
