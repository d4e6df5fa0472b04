"""``kvtier top`` against real daemons: one frame, the whole screen, its keys, and a daemon that goes away."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from kvtier import AsyncClient, Cache, Tier
from kvtier.cli.common import DaemonAt
from kvtier.cli.top.app import TopApp
from kvtier.cli.top.feed import Feed
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.screens import lines_on
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually

INTERVAL_S = 0.1


@pytest.fixture
async def cache(client: AsyncClient, name: str) -> Cache:
    return await client.open_cache(name, SPEC, budgets=sizes(device=8, host=8, disk=16))


@asynccontextmanager
async def top(
    address: str, cache: Cache | None = None, *, columns: int = 80, lines: int = 24
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    async with Feed(DaemonAt(address), INTERVAL_S) as feed:
        app = TopApp(feed, INTERVAL_S, await feed.ask(), cache.name if cache is not None else None)
        async with app.run_test(size=(columns, lines)) as pilot:
            yield app, pilot


def screen(app: TopApp) -> Callable[[], Awaitable[str]]:
    async def look() -> str:
        return "\n".join(lines_on(app.export_screenshot()))

    return look


async def sees(app: TopApp, *parts: str) -> str:
    """Waits until all of them are on the screen; the screen."""
    return await eventually(screen(app), lambda text: all(part in text for part in parts))


async def test_one_frame_in_plain_text(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    keys = chain(cache.name, 3)
    await cache.put(keys, blocks(keys))
    await cache.move(keys[2:], Tier.HOST)
    async with cache.acquire(keys[:2]), client.watch(oldest=True) as watch:
        await anext(watch)
        said = kvtier("top", "--once", "--cache", cache.name, "--interval", "0.1", "--address", daemon.address)
    text = said.stdout
    assert (said.stderr, "\x1b" in text, max(map(len, text.splitlines())) <= 100) == ("", False, True)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    # ready, slots, held, free, clean
    assert rows["device"][2:7] == ["25.0%", "8", "2", "6", "75.0%"]
    assert rows["host"][2:7] == ["12.5%", "8", "0", "7", "87.5%"]
    assert "device>host" in rows
    assert f"pid {daemon.pid}" in text
    assert f"cache {cache.name}" in text
    assert "leases 1" in text
    assert "watchers 1" in text


def test_without_a_terminal_it_is_one_frame(daemon: DaemonProcess) -> None:
    assert "kvtierd" in kvtier("top", "--interval", "0.1", "--address", daemon.address).stdout


def test_what_it_refuses(daemon: DaemonProcess, short_dir: Path) -> None:
    assert "no daemon answers" in kvtier("top", "--once", "--address", str(short_dir), status=1).stderr
    assert "no such cache is open" in kvtier("top", "--cache", "gone", "--address", daemon.address, status=1).stderr
    for seconds in ("0", "nan", "inf"):
        assert "interval" in kvtier("top", "--interval", seconds, "--address", daemon.address, status=2).stderr


def test_textual_is_imported_by_nobody_who_does_not_need_it() -> None:
    script = "import sys, kvtier.cli, kvtier.cli.top.once; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


async def test_the_screen_follows_what_happens(daemon: DaemonProcess, cache: Cache) -> None:
    keys = chain(cache.name, 4)
    await cache.put(keys, blocks(keys))
    async with top(daemon.address, cache) as (app, _):
        await sees(app, "healthy", f"cache {cache.name}", f"pid {daemon.pid}", "50.0%")
        async with cache.acquire(keys):
            await sees(app, "device  ███████████████░░░░░░░░░░░░░░░  50.0%       8      4")
        await cache.move(keys, Tier.HOST)
        await sees(app, "device  ░", "host    ███", "device>host")
        moved = [line for line in lines_on(app.export_screenshot()) if line.startswith("device>host")]
        assert any(step in moved[0] for step in "▂▃▄▅▆▇█"), moved


async def test_keys_choose_tables_columns_and_caches(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    other = await client.open_cache(f"{cache.name}-2", SPEC, budgets=sizes(host=4))
    async with top(daemon.address, columns=120) as (app, pilot):
        await sees(app, "BLOCKS▼", cache.name, other.name)
        await pilot.press("left")
        await sees(app, "CACHE▲")
        await pilot.press("tab")
        await sees(app, "AGE▼", "leases")
        await pilot.press("tab")
        await sees(app, "BEHIND▼")
        await pilot.press("shift+tab", "shift+tab")
        await sees(app, "CACHE▲")
        await pilot.press("question_mark")
        await sees(app, "Any key closes this")
        await pilot.press("x")
        await eventually(screen(app), lambda text: "Any key" not in text)
        await pilot.press("c")
        await pilot.press("end", "enter")
        await sees(app, f"cache {app.frame.cache}")
        await pilot.press("c", "escape", "c", "home", "enter")
        await sees(app, "all caches   ")
        await pilot.press("q")
    assert app.return_code == 0


async def test_a_pause_stands_still_and_loses_nothing(daemon: DaemonProcess, cache: Cache) -> None:
    async with top(daemon.address, cache) as (app, pilot):
        await sees(app, "nothing has moved yet")
        await pilot.press("p")
        stands = await sees(app, "PAUSED")
        looks = len(app.newest.minute.spans)
        keys = chain(cache.name, 4)
        await cache.put(keys, blocks(keys))

        async def counted() -> bool:
            stored = next(one.stored for one in app.newest.stats.caches if one.name == cache.name)
            return stored == 4 and len(app.newest.minute.spans) > looks

        await eventually(counted, bool)
        assert await screen(app)() == stands
        await pilot.press("p")
        await eventually(screen(app), lambda text: text != stands and "PAUSED" not in text)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 60), (120, 40), (40, 10)])
async def test_any_size_of_screen(daemon: DaemonProcess, cache: Cache, columns: int, lines: int) -> None:
    """And from any to the usual one: the moves stand beside the tiers where there is room, tables under one another."""
    async with top(daemon.address, cache, columns=columns, lines=lines) as (app, pilot):
        text = await sees(app, "TIER")
        assert any("TIER" in line and "MOVES" in line for line in text.splitlines()) == (columns >= 140)
        assert ("BEHIND" in text) == (lines >= 40)
        await pilot.resize_terminal(80, 24)
        text = await sees(app, "TIER", "MOVES", "FOUND IN", "CACHE", " q ")
        assert "BEHIND" not in text
        assert len(text.splitlines()) <= 24


async def test_a_daemon_that_goes_away_and_comes_back(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host=8)
    async with top(daemon.address) as (app, _):
        first = await sees(app, "healthy", "boot 1")
        daemon.stop()
        gone = await sees(app, "AWAY")
        assert gone.splitlines()[0].split("up")[0] == first.splitlines()[0].split("up")[0], "the last that is known"
        assert app.newest.minute.latest() is not None
        daemon.start()
        await sees(app, "healthy", "boot 2")
        daemon.pause()
        try:
            await sees(app, "AWAY")
        finally:
            daemon.resume()
        await sees(app, "healthy", "boot 2")
