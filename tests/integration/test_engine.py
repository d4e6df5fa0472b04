"""An engine on the daemon: pages come back whole, or are named before anything computes on them."""

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from kvtier import BlockResult, Client, Event, EventType, Tier
from kvtier.engine import STATE, EngineOptions, GroupPages, KeyChain, Layout, Load, Mover, PageGroup, PlaneLayout, Work
from kvtier.engine.request import TokenChain
from kvtier.engine.work import NO_PAGE
from kvtier.errors import DaemonUnavailable, DeadlineExceeded, InvalidArgument
from kvtier.wire import MAX_KEYS
from tests.engine.toy import PLAIN, STAGES, TOKENS, Engine, Run, Worker, assert_right, engine, wait_until
from tests.integration.blocks import sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import PATIENCE_S

PROMPT = list(range(100, 100 + 10 * TOKENS + 1))
OTHER = [7] * (6 * TOKENS + 1)
HYBRID = Layout(
    "hybrid",
    TOKENS,
    (PageGroup((PlaneLayout("full", 4096),)), PageGroup((PlaneLayout("near", 4096),), window=5 * TOKENS)),
)
_PLANES = PlaneLayout("heads", 3000), PlaneLayout("latent", 2000, replicated=True)
RANKS = Layout("ranks", TOKENS, (PageGroup(_PLANES),), ranks=4, replicas=2)
STATES = Layout(
    "states", TOKENS, (PageGroup((PlaneLayout("full", 4096),)), PageGroup((PlaneLayout("state", 900),), window=STATE))
)
LAYOUTS = pytest.mark.parametrize("layout", [PLAIN, HYBRID, RANKS, STAGES], ids=lambda layout: layout.model)
SMALL: dict[str, Any] = {"host_bytes": 64 * 16384, "disk_bytes": 64 * 16384}


@pytest.fixture
def daemon(start_daemon):
    return start_daemon(host=4096, disk=4096)


@contextmanager
def warm(address: Any, layout: Layout = PLAIN, **settings: Any) -> Iterator[Engine]:
    """An engine that has computed and saved the prompt."""
    with engine(address, layout, **settings) as toy:
        toy.run(PROMPT)
        toy.settle()
        yield toy


def held(daemon) -> int:
    with Client(daemon.address) as client:
        return len(client.leases())


@LAYOUTS
@pytest.mark.parametrize("settings", [{}, {"async_blocks": 0}], ids=["sync", "async"])
def test_a_new_engine_goes_on_where_the_last_one_ended(daemon, layout, settings):
    with engine(daemon.address, layout, **settings) as first:
        cold = first.run(PROMPT, chunk=3 * TOKENS)
        first.settle()
    assert (cold.loaded, cold.computed) == (0, 10)
    with engine(daemon.address, layout, **settings) as second:
        warm = second.run(PROMPT)
        longer = second.run([*PROMPT[:-1], *range(20)])
    assert (warm.loaded, warm.computed) == (10, 0)
    assert longer.loaded == 10
    wait_until(lambda: held(daemon) == 0)


@LAYOUTS
def test_what_was_saved_outlives_the_daemon(daemon, layout):
    with warm(daemon.address, layout):
        with Client(daemon.address) as client:
            wait_until(lambda: sum(edge.blocks for edge in client.stats().caches[0].edges) >= 10 * len(layout.groups))
        daemon.crash()
    with engine(daemon.address, layout) as second:
        assert second.run(PROMPT).loaded == 10


@pytest.mark.parametrize("hindrance", ["none", "killed", "paused", "held"])
def test_a_reset_is_carried_out_whatever_hinders_it(daemon, hindrance):
    """By this engine, or by the next one before it offers anything."""
    chain = TokenChain(TOKENS)
    chain.extend(PROMPT)
    with warm(daemon.address) as toy, Client(daemon.address, wait=PATIENCE_S) as client:
        cache, lease = client.open_cache(toy.planner.leader.name), None
        wait_until(lambda: client.stats().caches[0].groups[0].tiers[-1].ready == 10)
        if hindrance == "killed":
            daemon.kill()
        elif hindrance == "paused":
            daemon.pause()
        elif hindrance == "held":
            lease = cache.acquire(chain.packed)
        toy.planner.reset()
        assert toy.planner.offer("x", chain, 0, total_tokens=len(PROMPT)) == 0
        if hindrance == "paused":
            daemon.resume()
            wait_until(lambda: cache.match(chain.packed).blocks == 0)
        elif lease is not None:
            lease.release()
    if hindrance == "killed":
        daemon.start()
    with engine(daemon.address) as later:
        wait_until(lambda: later.planner.leader.answers)
        assert later.run(PROMPT).loaded == 0
        later.settle()
        assert later.run(PROMPT).loaded == 10


def test_a_block_that_leaves_is_named_and_not_offered_again(daemon):
    with warm(daemon.address) as toy, Client(daemon.address) as client:
        run = toy.begin(PROMPT)
        assert run.loaded == 10
        client.open_cache(toy.planner.leader.name).drop([run.chain.key(4)])
        toy.complete(run)
        assert (run.failed, run.loaded) == (1, 4)
        assert toy.planner.offer(run.name, run.chain, 0, total_tokens=run.tokens) == 0
        toy.end(run)
        toy.settle()
        assert toy.run(PROMPT).loaded == 10


def test_the_same_block_is_saved_once(daemon):
    with engine(daemon.address) as toy:
        runs = [toy.begin(PROMPT) for _ in range(3)]
        for run in runs:
            toy.complete(run)
        for run in runs:
            toy.end(run)
        toy.settle()
        assert toy.planner.stats()["blocks being saved"] == 10


def test_a_late_save_loses_only_pages_that_are_used_again(daemon, monkeypatch):
    gate = threading.Event()

    class Late(Mover):
        def _save(self, *rest: Any) -> None:
            assert gate.wait(60)
            super()._save(*rest)

    monkeypatch.setattr("tests.engine.toy.Mover", Late)
    with engine(daemon.address, HYBRID) as toy, Client(daemon.address) as client:
        try:
            run = toy.begin(PROMPT)
            toy.complete(run)
            left = run.table[1][:5]
            toy.workers[0].mover.flush({1: left}, patience=0.01)
            for page in left:
                toy.workers[0].wipe(1, page)
        finally:
            gate.set()
        toy.end(run)
        toy.settle()
        assert toy.planner.stats()["pages not saved: the engine had taken them away"] == 5
        assert toy.run(PROMPT).loaded == 10
        assert_right(client, toy, [run.chain.key(block) for block in range(10)])


def test_a_prompt_longer_than_one_call_may_name_is_loaded_whole(start_daemon):
    tiny, blocks = Layout("tiny", TOKENS, (PageGroup((PlaneLayout("all", 64),)),)), MAX_KEYS + 100
    daemon, budget = start_daemon(host=1 << 14), 6 * blocks * 1024
    with engine(daemon.address, tiny, pages=blocks + 1, host_bytes=budget) as toy:
        prompt = list(range(blocks * TOKENS + 1))
        assert toy.run(prompt).loaded == 0
        toy.settle()
        assert toy.run(prompt).loaded == blocks


def test_a_pinned_hit_stays_until_it_is_loaded(daemon):
    with warm(daemon.address, pin=True, pin_wait=5) as toy, Client(daemon.address) as client:
        run = toy.begin(PROMPT)
        assert run.loaded == 10
        cache = client.open_cache(toy.planner.leader.name)
        assert cache.drop([run.chain.key(4)]).results == [BlockResult.HELD]
        toy.complete(run)
        assert run.failed == 0
        toy.end(run)


def test_a_load_that_costs_more_than_to_compute_is_not_offered(daemon):
    with warm(daemon.address, recompute_seconds_per_block=1e-9) as toy:
        assert toy.run(PROMPT).loaded == 10  # nothing has been measured yet
        assert toy.run(PROMPT).loaded == 0
        assert toy.planner.stats()["not offered: to recompute is cheaper"] == 1


def test_a_slow_disk_is_left_until_it_is_fast_again(short_dir, monkeypatch):
    monkeypatch.setattr("kvtier.engine.prices.PAUSE_S", 0.1)
    daemon, speed = DaemonProcess(short_dir, sizes(host=4096, disk=4096)), short_dir / "speed"
    daemon.program = ["tests.integration.faulty_daemon", "reads_slowly"]
    daemon.variables["KVTIER_DISK_SPEED"] = str(speed)
    with (
        daemon,
        warm(daemon.address, recompute_seconds_per_block=0.05, load_timeout=20.0) as toy,
        Client(daemon.address) as client,
    ):
        cache, chain = client.open_cache(toy.planner.leader.name), toy.chain(PROMPT)
        keys, counts = [chain.key(at) for at in range(10)], toy.planner.stats

        def slow() -> int:
            return int(toy.planner.leader.on_disk(chain.packed).sum())

        def loaded_from_disk() -> int:
            wait_until(lambda: cache.move(keys, Tier.DISK) == [BlockResult.OK] * 10 and slow() == 10)
            return toy.run(PROMPT).loaded

        speed.write_text("60e3")  # 0.2 s a block
        assert loaded_from_disk() == 10
        assert loaded_from_disk() == 0
        assert counts()["not offered: to recompute is cheaper"] == 1
        wait_until(lambda: slow() == 2)  # a trial
        assert toy.run(PROMPT).loaded == 8
        assert counts()["offered in part: to recompute is cheaper"] == 1
        speed.write_text("1e12")
        wait_until(lambda: loaded_from_disk() == 10)
        toy.settle()
        assert counts()["blocks being saved"] == 10
        missed = [each.queried - each.found for each in client.stats().caches]
        assert missed == [10], "the first prompt, which was not stored"


@pytest.mark.parametrize("layout", [PLAIN, HYBRID, STAGES, STATES], ids=lambda layout: layout.model)
def test_of_each_prefix_that_is_worth_a_load_the_rest_is_computed_and_not_stored_again(daemon, layout, monkeypatch):
    with warm(daemon.address, layout) as toy:
        for blocks in range(11):
            monkeypatch.setattr("kvtier.engine.prices.Prices.worth", lambda *_, most=blocks: most)
            run = toy.run(PROMPT)
            assert (run.loaded, run.computed, run.failed) == (blocks, 10 - blocks, 0)
        toy.settle()
        assert toy.planner.stats()["blocks being saved"] == 10


@pytest.mark.parametrize(("save_decode", "saved"), [(True, 3), (False, 0)])
def test_blocks_of_the_answer_are_saved_where_that_is_wanted(daemon, save_decode, saved):
    with engine(daemon.address, save_decode=save_decode) as toy:
        chain, table = toy.chain(PROMPT), {0: toy.pages(0, 14)}
        toy.planner.scheduled("x", 0, len(PROMPT), table, chain=chain)
        assert sum(save.blocks for save in toy.planner.step().saves) == 10
        chain.extend(range(3 * TOKENS))
        toy.planner.scheduled("x", len(PROMPT), 3 * TOKENS, table)
        assert sum(save.blocks for save in toy.planner.step().saves) == saved


def test_a_cache_that_keeps_tokens_gets_them_for_routers(start_daemon):
    daemon = start_daemon("--keep-tokens", host=4096, disk=4096)
    with engine(daemon.address) as toy, Client(daemon.address) as client:
        run = toy.begin(PROMPT)
        run.chain.token_ids = lambda first, last: PROMPT[first:last]
        toy.complete(run, chunk=3 * TOKENS)
        toy.end(run)
        toy.settle()
        told: dict[bytes, tuple[int, ...]] = {}
        with client.watch(oldest=True, caches=[toy.planner.leader.name], types=[EventType.STORED]) as watch:
            while len(told) < 10:
                event = next(watch)
                assert isinstance(event, Event)
                told |= {key: each.token_ids for key, each in zip(event.keys, event.tokens, strict=True)}
        assert [token for at in range(10) for token in told[run.chain.key(at)]] == PROMPT[:-1]


def test_ranks_with_the_same_bytes_store_them_once(daemon):
    with warm(daemon.address, RANKS) as toy:
        assert toy.planner.stats()["save bytes"] == 10 * RANKS.spec.block_bytes(0) == 10 * (2 * 3000 + 2000)


def test_engines_with_other_stages_share_their_blocks(daemon):
    alone = replace(STAGES, ranks=2, stages=1)
    for first, second, prompt in ((STAGES, alone, PROMPT), (alone, STAGES, PROMPT[::-1])):
        with engine(daemon.address, first) as toy:
            assert toy.run(prompt).loaded == 0
            toy.settle()
        with engine(daemon.address, second) as toy:
            assert toy.run(prompt).loaded == 10


def test_two_layouts_share_nothing(daemon):
    other = Layout("toy", TOKENS, PLAIN.groups, identity={"dtype": "bfloat16"})
    with engine(daemon.address, PLAIN, **SMALL) as one, engine(daemon.address, other, **SMALL) as two:
        one.run(PROMPT)
        one.settle()
        assert two.run(PROMPT).loaded == 0


def test_without_a_daemon_the_engine_runs_alone_or_refuses(tmp_path):
    with engine(tmp_path) as toy:
        assert toy.run(PROMPT).computed == 10
    with pytest.raises(DaemonUnavailable, match=str(tmp_path)):
        Engine(tmp_path, on_error="fail")


def test_the_last_page_is_never_offered_whole_but_is_loaded_whole(daemon):
    with warm(daemon.address) as toy:
        chain = toy.chain(PROMPT)
        assert toy.planner.offer("x", chain, 0, total_tokens=8 * TOKENS) == 7 * TOKENS
        assert toy.planner.offer("x", chain, 4 * TOKENS, total_tokens=8 * TOKENS) == 3 * TOKENS
        assert toy.planner.offer("x", chain, 0, total_tokens=1) == 0
        assert toy.planner.offer("x", chain, 0, total_tokens=len(PROMPT)) == 10 * TOKENS
        toy.planner.allocated("x", {0: toy.pages(0, 11)}, 10 * TOKENS - 1)
        (load,) = toy.planner.step().loads
        assert load.blocks == 10


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"adress": "x"}, "adress"),
        ({"on_error": "ignore"}, "on_error"),
        ({"load_timeout": 0}, "load_timeout"),
        ({"host_bytes": "1G"}, "host_bytes"),
        ({"host_bytes": 1e9}, "host_bytes"),
        ({"threads": 1.5}, "threads"),
        ({"address": 5}, "address"),
        ({"write_policy": "never"}, "write_policy"),
        ({"pin": 1}, "pin"),
        ({"remote_wait": -1}, "remote_wait"),
        ({"explain_misses": -0.1}, "explain_misses"),
        ({"explain_misses": 1.5}, "explain_misses"),
        ({"explain_misses": "all"}, "explain_misses"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(settings, named):
    with pytest.raises(InvalidArgument, match=f"kvtier setting {named}"):
        EngineOptions.of(settings)


def test_the_least_budget_serves_a_prompt(daemon):
    least = 2 * PLAIN.spec.record_bytes(0)
    with engine(daemon.address, PLAIN, host_bytes=least, disk_bytes=16 * least) as toy:
        toy.run(PROMPT)
        toy.settle()
        assert toy.run(PROMPT).loaded == 10
        with pytest.raises(InvalidArgument, match=f"host_bytes = {least - 1}: must be at least {least}: 2 blocks of"):
            Worker(PLAIN, replace(toy.planner.options, host_bytes=least - 1), 0, 1, Mover)


def test_pages_that_are_not_the_layout_s_are_refused():
    with pytest.raises(InvalidArgument, match=r"l0\.v"):
        GroupPages(0, {"l0.k": np.zeros((2, 5000), np.uint8)}).of(PLAIN, 0)


def test_a_chain_grows_as_the_keys_of_the_whole():
    import kvtier

    grown = TokenChain(TOKENS)
    for start in range(0, len(PROMPT), 3):
        grown.extend(PROMPT[start : start + 3])
    assert grown.packed == kvtier.chain_keys(PROMPT, TOKENS)
    assert KeyChain().extend([b"\1" * 32, b"short"]) == 2


def test_a_hold_that_comes_too_late_is_given_back(daemon):
    with warm(daemon.address, pin=True, pin_wait=0) as toy, Client(daemon.address) as client:
        for number in range(20):
            toy.planner.offer(f"x{number}", toy.chain(PROMPT), 0, total_tokens=len(PROMPT))
            toy.planner.aborted(f"x{number}")
        wait_until(lambda: not any(lease.held_blocks for lease in client.leases()))


def compute_wrongly(toy: Engine, run: Run, first: int, last: int) -> None:
    """The forward pass of a step, over pages that did not arrive."""
    toy.planner.scheduled(run.name, first * TOKENS, (last - first) * TOKENS, run.table)
    toy.begin_step()
    for group, table in run.table.items():
        for plane in toy.workers[0].memory[group].values():
            plane[table[first:last]] = 99
    toy.workers[0].mover.save()


@pytest.mark.parametrize(
    ("layout", "reserved", "steps"),
    [(PLAIN, 1, [(10, 16)]), (HYBRID, 64, [(10, 12), (12, 16)])],
    ids=["a save waits for slots", "a step is planned before"],
)
def test_what_was_computed_on_a_failed_load_is_not_saved(daemon, layout, reserved, steps):
    with warm(daemon.address, layout, reserve_blocks=reserved) as toy, Client(daemon.address) as client:
        run = toy.begin([*PROMPT, *range(6 * TOKENS)])
        assert (run.loaded, toy.planner.is_async(run.name)) == (10, False)
        client.open_cache(toy.planner.leader.name).drop([run.chain.key(4)])
        for first, last in steps:
            compute_wrongly(toy, run, first, last)
        toy.end_step()
        toy.end(run)
        toy.settle()
        assert_right(client, toy, [run.chain.key(block) for block in range(16)])


def test_a_failed_load_is_not_laid_to_the_next_owner_of_its_pages(daemon):
    with warm(daemon.address, async_blocks=1) as toy, Client(daemon.address) as client:
        run = toy.begin(PROMPT)
        client.open_cache(toy.planner.leader.name).drop([run.chain.key(4)])
        toy.begin_step()
        toy.planner.preempted(run.name)
        toy.begin_step()
        assert not any(toy.workers[0].mover.failed_pages().values())


def test_of_a_hybrid_all_pages_fail_together(daemon):
    with warm(daemon.address, HYBRID) as toy, Client(daemon.address) as client:
        run = toy.begin(PROMPT)
        client.open_cache(toy.planner.leader.name).in_group(1).drop([run.chain.key(8)])
        toy.begin_step()
        failed = toy.workers[0].mover.failed_pages()
        assert failed == {0: set(run.table[0][:10]), 1: set(run.table[1][5:10])}


def test_a_closed_mover_touches_no_file_of_others(daemon):
    gate = threading.Event()

    class Slow(Mover):
        def _arrived(self, group: int, keys: bytes, rows: Any) -> int:
            gate.wait()
            return 0

    with engine(daemon.address) as toy:
        worker = mover(toy, Slow)
        worker.open()
        number = worker.fileno()
        worker.start(load_of(toy, 1, sync=False))
        spare = os.eventfd(0, os.EFD_NONBLOCK)
        worker.close(timeout=0)
        other = fcntl.fcntl(spare, fcntl.F_DUPFD_CLOEXEC, number)
        try:
            assert other == number
            gate.set()
            wait_until(lambda: not worker._under_way)
            with pytest.raises(BlockingIOError):
                os.eventfd_read(other)
        finally:
            gate.set()
            os.close(other)
            os.close(spare)


def test_what_one_group_has_lost_is_saved_again(daemon):
    with warm(daemon.address, HYBRID) as toy, Client(daemon.address) as client:
        window = client.open_cache(toy.planner.leader.name).in_group(1)
        window.drop([toy.chain(PROMPT).key(9)])
        assert toy.run(PROMPT).loaded == 9
        toy.settle()
        assert toy.run(PROMPT).loaded == 10
        assert "not saved: stored by another request" not in toy.planner.stats()


def answer(toy: Engine, run: Run) -> None:
    """Computes one more block of a request, and saves it once there are slots."""
    wait_until(lambda: all(toy.planner.leader.free_slots(group) > 0 for group in run.table))
    run.loaded = len(run.chain)
    run.chain.extend(range(TOKENS))
    run.tokens += TOKENS
    for group, table in run.table.items():
        table += toy.pages(group, 1)
    toy.complete(run)
    toy.settle()


@pytest.mark.parametrize("layout", [HYBRID, STATES], ids=lambda layout: layout.model)
def test_blocks_whose_commit_failed_are_saved_with_the_next(daemon, monkeypatch, layout):
    """Until then no state is forgotten for them."""
    with engine(daemon.address, layout, host_bytes=48 << 20) as toy, Client(daemon.address) as client:
        leader, run = toy.planner.leader, toy.begin(PROMPT)
        for group in layout.states:
            run.table[group][:9] = [NO_PAGE] * 9
        toy.complete(run)
        answer(toy, run)
        with monkeypatch.context() as broken:
            broken.setattr(leader, "_commit_group", AsyncMock(side_effect=DeadlineExceeded("slow", reason="DEADLINE")))
            answer(toy, run)
        assert leader.complaints.counts["not saved: the commit failed"] == len(layout.groups)
        assert client.open_cache(leader.name).across.match(run.chain.packed).blocks == 11
        answer(toy, run)
        assert client.open_cache(leader.name).across.match(run.chain.packed).blocks == 13
        toy.end(run)


@pytest.mark.parametrize("written", [False, True], ids=["before it is written", "before its commit"])
def test_a_save_waits_for_a_silent_daemon(daemon, written):
    with engine(daemon.address, **PATIENT) as toy:
        leader, rank, run = toy.planner.leader, toy.workers[0].mover, toy.begin(PROMPT)
        toy.planner.scheduled(run.name, 0, run.tokens, run.table)
        toy.begin_step()
        if written:
            rank.save()
            wait_until(lambda: bool(rank._ended))
        with daemon.paused():
            rank.save()
            leader.doubt()
            wait_until(lambda: not leader.answers and rank._client is not None and rank._client.connected is written)
            toy.end_step()
            client = leader._connection.client
            assert client is not None
            client.submit(lambda: asyncio.sleep(0.1)).result()
        toy.end(run)
        toy.settle()
        assert toy.planner.stats()["blocks saved"] == 10


def test_saves_leave_slots_for_loads(daemon):
    with engine(daemon.address, pages=256, host_bytes=64 * 12288) as toy, Client(daemon.address) as client:
        runs = [toy.begin([number] * (8 * TOKENS + 1)) for number in range(12)]
        for run in runs:
            toy.complete(run)
        for run in runs:
            toy.planner.aborted(run.name)
        toy.settle()
        slots = client.stats().caches[0].tiers[0].capacity
        assert 0 < sum(lease.blank_slots for lease in client.leases()) <= slots // 4


def measured(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


HICCUP_S = 5.0
"""A busy machine may take so long for what an engine loses. An engine that waited for the daemon would lose
`PATIENT["load_timeout"]`."""
PATIENT: dict[str, Any] = {"load_timeout": 60.0}


def only_on_disk(client: Client, toy: Engine, *prompts: list[int]) -> None:
    """These prompts, which the toy has computed and saved."""
    cache = client.open_cache(toy.planner.leader.name)
    for tokens in prompts:
        keys = toy.chain(tokens).packed

        def moved(keys: bytes = keys) -> bool:
            cache.move(keys, Tier.DISK)
            return set(cache.probe(keys)) == {Tier.DISK.bit}

        wait_until(moved)


def generate(toy: Engine, tokens: list[int]) -> Run:
    """A request to its last token, whose pages are all checked."""
    run = toy.begin(tokens)
    toy.complete(run)
    return run


@pytest.mark.parametrize("go", [DaemonProcess.pause, DaemonProcess.kill], ids=["stopped", "killed"])
@pytest.mark.parametrize("begun", [False, True], ids=["before", "during"])
def test_a_daemon_that_goes_costs_a_load_from_disk_one_hiccup(daemon, go, begun):
    with engine(daemon.address, **PATIENT) as toy, Client(daemon.address) as client:
        for tokens in (PROMPT, OTHER):
            toy.run(tokens)
        toy.settle()
        only_on_disk(client, toy, PROMPT, OTHER)
        run = toy.begin(PROMPT)
        assert (run.loaded, toy.planner.is_async(run.name)) == (10, True)
        if begun:
            toy.begin_step()
        go(daemon)
        try:
            took = [measured(lambda: toy.complete(run)), *(measured(lambda: generate(toy, OTHER)) for _ in range(3))]
        finally:
            if go is DaemonProcess.pause:
                daemon.resume()
        assert took[0] < HICCUP_S
        assert sum(took[1:]) < HICCUP_S


def test_an_engine_loads_from_disk_again_once_the_daemon_goes_on(daemon):
    with warm(daemon.address) as toy, Client(daemon.address) as client:
        only_on_disk(client, toy, PROMPT)
        with daemon.paused():
            assert generate(toy, PROMPT).computed == 10
        wait_until(lambda: toy.run(PROMPT).loaded == 10)


def load_of(toy: Engine, number: int, *, sync: bool = True) -> Work:
    """Of the first block of the prompt, into page 0."""
    keys, pages = {0: toy.chain(PROMPT).key(0)}, {0: (0,)}
    return Work(loads=(Load(number, f"r{number}", keys, pages, 1, sync),))


def mover(toy: Engine, kind: type[Mover] = Mover) -> Mover:
    """A worker that begins while the engine's scheduler runs."""
    memory = {plane.name: np.zeros((1, plane.nbytes), np.uint8) for plane in PLAIN.groups[0].planes}
    return kind(PLAIN, toy.planner.options, [GroupPages(0, memory)])


def test_a_worker_that_cannot_open_its_cache_stalls_nobody(daemon):
    """Only its first save waits, beside the engine's steps."""
    with warm(daemon.address, **PATIENT) as toy:
        toy.planner.scheduled("x", 0, TOKENS, {0: [0]}, chain=toy.chain(OTHER))
        save = toy.planner.step()
        daemon.pause()
        worker = mover(toy)
        try:

            def load(number: int) -> None:
                worker.start(load_of(toy, number))
                worker.wait_loads()

            took = [measured(lambda number=number: load(number)) for number in range(4)]  # type: ignore[misc]
            assert worker.failed_pages() == {0: {0}}
            assert took[0] < HICCUP_S
            assert sum(took[1:]) < HICCUP_S
            worker.start(save)
            worker.save()
            daemon.resume()
            worker.open()
            load(4)
            assert worker.failed_pages() == {}
            wait_until(lambda: not worker._under_way)
            assert [each.failed for each in worker.poll() if each.kind == "save"] == [{}]
        finally:
            daemon.resume()
            worker.close()


def test_a_load_that_the_engine_waits_for_overtakes_the_others(daemon):
    gate = threading.Event()

    class Slow(Mover):
        def _load(self, load: Load, *rest: Any) -> None:
            assert load.sync or gate.wait(60)
            super()._load(load, *rest)

    with warm(daemon.address) as toy:
        worker = mover(toy, Slow)
        try:
            worker.open()
            worker.start(load_of(toy, 1, sync=False))
            worker.start(load_of(toy, 2))
            worker.wait_loads(timeout=20)
            assert [outcome.ticket for outcome in worker.poll()] == [2]
            gate.set()
            wait_until(lambda: [outcome.ticket for outcome in worker.poll()] == [1])
        finally:
            gate.set()
            worker.close()


def test_nothing_more_is_saved_of_a_request_that_is_forsaken(daemon):
    with engine(daemon.address) as toy:
        run = toy.begin(PROMPT)
        toy.planner.forsake(run.name)
        toy.complete(run)
        toy.end(run)
        toy.settle()
        assert "blocks being saved" not in toy.planner.stats()
