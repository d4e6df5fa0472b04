"""What a probe of the metrics port is told, as kubelet would ask: of a daemon that is well, that stops, that hangs."""

import asyncio
import os
import signal

import pytest

from kvtier import Tier
from tests.integration.blocks import blocks, chain, opened_cache, sizes
from tests.integration.conftest import own_daemon
from tests.integration.daemon import DaemonProcess
from tests.integration.scraping import LISTEN, asked
from tests.integration.stuck import stuck_disk
from tests.integration.test_shutdown import log_says, moving_down
from tests.integration.waiting import PATIENCE_S

KEYS = chain("probed", 4)
daemon = own_daemon(*LISTEN, fresh=True, host=8, disk=16)


def test_a_daemon_that_is_well_is_alive_and_ready(daemon):
    assert asked(daemon, "/healthz") == asked(daemon, "/readyz") == (200, "ok\n")


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_head_has_the_status_and_no_body(daemon, path):
    assert asked(daemon, path, "HEAD") == (200, "")


def test_other_paths_and_methods_are_refused(daemon):
    assert [asked(daemon, path)[0] for path in ("/health", "/metrics/", "/readyz2")] == [404] * 3
    assert asked(daemon, "/metrics", "POST")[0] == 405


async def test_a_daemon_that_stops_is_alive_but_not_ready(daemon):
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        await cache.put(KEYS, blocks(KEYS))
        with stuck_disk(daemon, "c") as disk:
            moving = asyncio.create_task(cache.move(KEYS, Tier.DISK))
            await moving_down(client)
            stopping = asyncio.create_task(asyncio.to_thread(daemon.stop))
            await log_says(daemon, "kvtierd.serve stopping")
            assert await asyncio.to_thread(asked, daemon, "/readyz") == (503, "stopping\n")
            assert await asyncio.to_thread(asked, daemon, "/healthz") == (200, "ok\n")
            disk.release()
            await stopping
        await asyncio.to_thread(daemon.start)
        await moving


def test_a_daemon_whose_loop_hangs_is_neither(short_dir):
    daemon = DaemonProcess(short_dir, sizes(host=4), LISTEN)
    daemon.program = ["tests.integration.faulty_daemon", "hangs_when_told"]
    daemon.start()
    try:
        os.kill(daemon.pid, signal.SIGUSR2)
        status, says = asked(daemon, "/healthz")
        assert (status, "event loop has not answered" in says) == (503, True)
        assert asked(daemon, "/readyz")[0] == 503
    finally:
        daemon.kill()
