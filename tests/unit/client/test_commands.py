"""The ``kvtier`` command's face: options, refusals, and reports without a daemon."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvtier.cli import common, main
from kvtier.cli.replay import table
from kvtier.cli.status import report
from kvtier.errors import Holder, TierFull
from kvtier.replay.runner import ReplayReport
from kvtier.types import CacheStats, DaemonStats, EdgeStats, GroupStats, SessionStats, Tier, TierStats, duration, size

DEVICE = TierStats(Tier.DEVICE, 200, 20, 5, 3, 150, 7, 11, 4, 16)
STATS = DaemonStats(
    version="0.1.0",
    pid=99,
    epoch=2,
    boot=3,
    start_time_ns=1,
    last_event_id=1234,
    watchers=1,
    caches=(
        CacheStats(
            cache_id=1,
            name="llama",
            blocks=250,
            tiers=(DEVICE,),
            edges=(EdgeStats("device>host", 40, 40 << 20, 2, 6, 80_000_000, 40_000_000, degraded=True),),
            hits_device=30,
            hits_host=20,
            hits_disk=10,
            queried=100,
            found=60,
            stored=300,
            removed=50,
            waiting=2,
            groups=(GroupStats(0, 1024, 250, (DEVICE,), 30, 20, 10, 100, 60, 300, 50),),
            index_places=384,
            unindexed=1,
        ),
    ),
    sessions=(SessionStats(7, 4242, 1000, "python [engine].py", attached=False, leases=3, held_slots=16),),
    problems=("the disk tier fails",),
)


def shown(renderable: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
        return console.export_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["watch", "--cause", "boredom"], "capacity"),
        (["watch", "--tier", "l2"], "device"),
        (["watch", "--since", "1", "--snapshot"], "exclude each other"),
        (["watch", "--since", "5 minutes"], "how long ago"),
        (["watch", "--key", "xyz"], "hexadecimal"),
        (["watch", "--key", "abc"], "even"),
        (["watch", "--group", "16"], "0<=x<=15"),
        (["replay", "/nonexistent"], "does not exist"),
        (["replay", "--requests", "0", "README.md"], "x>=1"),
    ],
)
def test_bad_options_are_refused_with_what_is_allowed(arguments: list[str], says: str) -> None:
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 2
    assert says in outcome.output


def test_the_address_comes_from_the_environment(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cli.common.CONNECT_WAIT_S", 0.0)
    outcome = CliRunner(env={"KVTIER_ADDRESS": str(short_dir)}).invoke(main, ["status"])
    assert str(short_dir) in outcome.output


def test_status_shows_all_that_matters() -> None:
    text = shown(report(STATS, "/run/kvtier"))
    for part in (
        *("kvtierd 0.1.0", "/run/kvtier", "pid 99", "epoch 2", "last event 1234", "problem: the disk tier fails"),
        *("device", "200", "75.0%", "5 blank, 3 filling, 7 retiring, 11 orphaned, 4 quarantined"),
        *("device>host DEGRADED", "40.0 MiB", "2.0ms", "1.0ms", "60.0%", "calls waiting 2"),
        *("llama", "1024", "250", "1 by calls"),
        *("4242", "orphaned", "16", "python [engine].py"),
    ):
        assert part in text, part
    assert "python [engine].py" not in shown(report(STATS, "/run/kvtier", own_session=7))


def test_zeros_are_left_out_of_the_status() -> None:
    idle = replace(DEVICE, blank=0, filling=0, retiring=0, orphaned=0, quarantined=0)
    nothing = replace(STATS.caches[0], tiers=(idle,), edges=(), groups=(), hits_device=0, hits_host=0, hits_disk=0)
    text = shown(report(replace(STATS, caches=(replace(nothing, queried=0, found=0, waiting=0),)), "/run/kvtier"))
    for part in ("blank", "quarantined", "move", "read from", "waiting", "window"):
        assert part not in text, part


def test_every_command_has_one_whole_line_in_the_help_of_its_group() -> None:
    for group in ([], ["bench"], ["blocks"], ["cache"], ["remote"], ["simulate"]):
        said = CliRunner().invoke(main, [*group, "--help"], terminal_width=80).output
        assert "..." not in said.partition("Commands:")[2], said


def test_a_command_that_is_nearly_right_is_named() -> None:
    assert "Did you mean 'status'?" in CliRunner().invoke(main, ["statsu"]).output


def test_the_options_of_the_connection_end_the_help() -> None:
    for command in ([], ["status"], ["cache", "ls"], ["watch"]):
        before, _, last = CliRunner().invoke(main, [*command, "--help"]).output.partition("Connection:")
        assert "--address" in last and "--tls-key" in last
        assert "--address" not in before and "--help" not in last


def test_the_replay_s_table_names_its_faults() -> None:
    text = shown(table(ReplayReport(requests=1, block_refs=4, verify_failures=3, seconds=1.0)))
    assert "blocks with wrong bytes" in text
    assert "3" in text


def test_a_full_tier_is_explained_with_its_holders() -> None:
    error = TierFull(
        "full", tier=Tier.DEVICE, wanted=5, free=0, holders=(Holder(1, 4242, "engine", 200),), reason="TIER_FULL"
    )
    assert str(error) == "full; held by pid 4242 engine (200 slots)"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (40 << 20, "40.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_as_people_read_them(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(("ns", "text"), [(0, "0ns"), (1500, "1.5µs"), (2_000_000, "2.0ms"), (3_500_000_000, "3.5s")])
def test_durations_as_people_read_them(ns: int, text: str) -> None:
    assert duration(ns) == text


def test_ctrl_c_has_a_status_of_its_own_at_any_time(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtier.cli.import_module", interrupted)
    done = CliRunner().invoke(main, ["watch"])
    assert (done.exit_code, done.output) == (130, "")


async def test_a_signal_ends_a_task_that_swallows_a_cancellation(monkeypatch):
    monkeypatch.setattr(common, "_CANCEL_AGAIN_S", 0.01)

    async def swallows():
        with common.Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return interrupts.status

    assert await asyncio.create_task(swallows()) == 130


def test_put_refuses_an_empty_block():
    done = CliRunner().invoke(main, ["put", "my-cache", "notes.txt"], input="")
    assert done.exit_code == 2
    assert "kvtier put my-cache KEY FILE" in done.output
