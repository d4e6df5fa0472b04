"""``kvtier top``: from counters to rates, and what the screen says of them."""

from dataclasses import replace

from rich.console import Console

from kvtier.cli.top import ROWS_SHOWN, Look, screen
from kvtier.types import CacheStats, LeaseInfo, Tier, count
from tests.unit.client.test_commands import STATS

CACHE = STATS.caches[0]
LEASE = LeaseInfo(7, "llama", 0, Tier.HOST, 2, 0, True, 90 * 10**9, 4, 4242, 1000, "engine \x1b[31m")


def stored(cache: CacheStats) -> int:
    return cache.stored


def after(seconds: float, stored: int) -> Look:
    later = replace(STATS, uptime_ns=STATS.uptime_ns + int(seconds * 1e9), caches=(replace(CACHE, stored=stored),))
    return Look(later, STATS)


def text(look: Look) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(screen(look, "/run/kvtier"))
    return captured.get()


def test_a_rate_is_a_difference_of_counters_over_the_daemon_s_uptime() -> None:
    assert after(2.0, stored=CACHE.stored + 10).rate(stored) == 5.0
    assert Look(STATS).rate(stored) is None
    assert Look(STATS, STATS).rate(stored) is None


def test_no_rate_is_made_up_over_a_restart_or_for_another_cache() -> None:
    look = after(2.0, stored=CACHE.stored + 10)
    assert replace(look, stats=replace(look.stats, boot=STATS.boot + 1)).rate(stored) is None
    assert replace(look, stats=replace(look.stats, caches=(replace(CACHE, cache_id=2),))).rate(stored) is None


def test_the_screen_says_what_is_wrong() -> None:
    degraded = text(Look(STATS))
    assert "DEGRADED" in degraded
    for problem in STATS.problems:
        assert f"problem: {problem}" in degraded
    assert "AWAY: gone" in text(Look(STATS, away="gone"))
    assert "leases are not told: only for root" in text(Look(STATS, refused="only for root"))


def test_the_oldest_leases_are_shown_and_the_others_counted() -> None:
    shown = text(Look(STATS, leases=(LEASE,) * (ROWS_SHOWN + 2)))
    assert "4242" in shown and "orphaned" in shown
    assert "and 2 more leases" in shown


def test_counts_take_five_columns() -> None:
    numbers = (0, 0.26, 9.94, 12.3, 9999, 10_000, 123_456, 1_234_567, 999_960_000, 5e12)
    assert [count(each) for each in numbers] == [
        *("0", "0.3", "9.9", "12", "9999", "10.0k", "123k", "1.2M", "1.0G", "5T")
    ]
