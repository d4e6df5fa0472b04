"""What every engine does, whichever it is."""

import asyncio
import random
import uuid
from collections.abc import Sequence

import pytest

from kvtierd.tiers.remote.base import ABSENT, RemoteRefused, RemoteStore

MIB = 1 << 20


def names(count: int) -> list[str]:
    """Nobody else's."""
    return [f"{uuid.uuid4().hex}/{i:02}" for i in range(count)]


def some_bytes(nbytes: int) -> bytes:
    return random.randbytes(nbytes)


def buffers(sizes: Sequence[int], fill: int = 0) -> list[memoryview]:
    return [memoryview(bytearray([fill]) * size) for size in sizes]


@pytest.mark.parametrize("sizes", [[1], [4 * MIB], [1, 100, 4096, MIB, MIB + 1] + 59 * [70_000], 40 * [MIB]])
async def test_objects_come_back(store: RemoteStore, sizes: list[int]) -> None:
    written, put = names(len(sizes)), [some_bytes(size) for size in sizes]
    assert list(await store.exists(written)) == [False] * len(sizes)
    await store.put(written, put)
    assert list(await store.exists(written)) == [True] * len(sizes)
    read = buffers(sizes)
    assert list(await store.get(written, read)) == sizes
    assert read == put


async def test_absent_objects_are_told_from_others(store: RemoteStore) -> None:
    there, gone, never = names(3)
    await store.put([there, gone], [some_bytes(10), some_bytes(10)])
    await store.delete([gone, never])
    assert list(await store.exists([never, there, gone])) == [False, True, False]
    assert list(await store.get([never, there, gone], buffers([10, 10, 10]))) == [ABSENT, 10, ABSENT]


async def test_an_object_longer_than_its_buffer_is_not_read(store: RemoteStore) -> None:
    written, put = names(3), [some_bytes(1000) for _ in range(3)]
    await store.put(written, put)
    small, exact, large = buffers([999, 1000, 1001], fill=7)
    assert list(await store.get(written, [small, exact, large])) == [1000, 1000, 1000]
    assert small == bytes([7]) * 999
    assert exact == put[1]
    assert large == bytes(put[2]) + b"\7"


async def test_an_object_put_again_is_the_old_or_the_new_one(store: RemoteStore) -> None:
    (name,) = names(1)
    versions = [some_bytes(size) for size in (MIB, 1000, 2 * MIB)]
    await store.put([name], [versions[0]])
    (read,) = buffers([2 * MIB])

    async def write() -> None:
        for data in versions[1:] * 3:
            await store.put([name], [data])

    writing = asyncio.create_task(write())
    while not writing.done():
        (nbytes,) = await store.get([name], [read])
        assert read[:nbytes] in versions
    await writing


async def test_calls_run_side_by_side(store: RemoteStore) -> None:
    written, put = names(48), [some_bytes(50_000 + i) for i in range(48)]
    await asyncio.gather(*(store.put(written[i : i + 6], put[i : i + 6]) for i in range(0, 48, 6)))
    read = buffers([60_000] * 48)
    results = await asyncio.gather(
        *(store.get(written[i : i + 4], read[i : i + 4]) for i in range(0, 48, 4)),
        *(store.exists(written) for _ in range(4)),
    )
    assert [nbytes for part in results[:12] for nbytes in part] == [len(data) for data in put]
    assert [view[: len(data)] for view, data in zip(read, put, strict=True)] == put
    assert all(all(found) for found in results[12:])


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 50])
async def test_a_cancelled_get_leaves_its_buffers_alone(store: RemoteStore, turns: int) -> None:
    written = names(16)
    await store.put(written, [some_bytes(MIB) for _ in written])
    read = buffers([MIB] * 16)
    await _cancelled(asyncio.create_task(store.get(written, read)), turns)
    before = [bytes(view) for view in read]
    assert list(await store.get(written, buffers([MIB] * 16))) == [MIB] * 16
    assert read == before


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 50])
async def test_a_cancelled_put_stores_all_of_an_object_or_nothing(store: RemoteStore, turns: int) -> None:
    written, data = names(16), random.randbytes(MIB)
    await _cancelled(asyncio.create_task(store.put(written, [data] * 16)), turns)
    other = names(4)
    await store.put(other, [some_bytes(MIB) for _ in other])
    read = buffers([MIB] * 16)
    for nbytes, view in zip(await store.get(written, read), read, strict=True):
        assert nbytes == ABSENT or view == data


async def _cancelled(task: asyncio.Task[object], turns: int) -> None:
    """Cancels a call some turns of the loop after it began. It may have ended."""
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def test_a_listing_has_what_begins_with_its_prefix(store: RemoteStore, url: str) -> None:
    (root,) = names(1)
    written = {f"{root}/{end}": i + 1 for i, end in enumerate(("a/1", "a/2", "ab/3", "b"))}
    await store.put(list(written), [some_bytes(size) for size in written.values()])

    async def listed(prefix: str) -> dict[str, int]:
        return {found.name: found.nbytes async for found in store.listing(prefix) if found.modified_s > 1.7e9}

    if url.startswith("mooncake:"):
        with pytest.raises(RemoteRefused, match="does not list"):
            await listed(f"{root}/")
        return
    assert await listed(f"{root}/") == written
    assert await listed(f"{root}/a/") == {f"{root}/a/1": 1, f"{root}/a/2": 2}
    assert await listed(f"{root}/a") == {name: size for name, size in written.items() if "/a" in name}
    assert await listed(f"{root}/nothing/") == {}


async def test_a_name_may_have_512_bytes(store: RemoteStore) -> None:
    (root,) = names(1)
    longest = f"{root}/{'a' * 200}/{'b' * 200}/"
    longest += "c" * (512 - len(longest))
    punctuated = f"{root}/a cache's (name)+=,;@$&!~._-"
    await store.put([longest, punctuated], [some_bytes(5), some_bytes(6)])
    assert list(await store.get([longest, punctuated], buffers([9, 9]))) == [5, 6]
