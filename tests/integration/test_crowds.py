"""Clients that come in crowds: whoever they are and whatever they may do, the others are served."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from functools import partial

import pytest

from kvtier import connect
from kvtier.abi import attach
from kvtier.errors import RetryableError
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.raw import AttachSocket, attached
from tests.integration.waiting import eventually

# -- descriptors in flight ---------------------------------------------------------------------------------------------


def in_flight(sock):
    """Descriptors that wait to be read from a socket."""
    with open(f"/proc/self/fdinfo/{sock.fileno()}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("scm_fds"))


async def test_a_reader_of_no_answers_has_descriptors_of_one_in_flight(client, raw, daemon, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, host=4))
    cache_id = (await raw.open(name)).cache_id
    question, asked = attach.encode(attach.Map(cache_id, write=False)), 20
    for _ in range(asked):
        raw.socket.send(question)
    await eventually(lambda: in_flight(raw.socket.sock), bool)
    keys = chain(name, 4)
    await cache.put(keys, blocks(keys))
    assert_bytes(keys, await cache.get(keys))
    of_one = in_flight(raw.socket.sock)
    for _ in range(asked):  # whoever reads gets all of them
        _, fds = raw.socket.receive()
        assert len(fds) == of_one
        for fd in fds:
            os.close(fd)


async def test_connections_whose_answers_are_not_read_count(start_daemon):
    """The descriptors stay in flight as long as the client keeps its end, also after the daemon has hung up."""
    daemon = start_daemon("--max-sessions", "8", host=4)  # one user may have 36 connections
    with ExitStack() as stack:
        async with attached(daemon.address) as raw:
            cache_id = (await raw.open("c", budgets=sizes(host=4))).cache_id
            question, held = attach.encode(attach.Map(cache_id, write=False)), []
            for _ in range(100):
                sock = stack.enter_context(AttachSocket(daemon.address))
                held.append(sock.sock)
                with suppress(OSError, attach.AttachProtocolError):  # it was turned away
                    sock.hello(raw.welcome.token)
                    sock.send(question)
                    await eventually(partial(in_flight, sock.sock), bool)
                    sock.send(b"{}")  # on which the daemon hangs up
            assert 0 < sum(in_flight(sock) for sock in held) <= 2 * 36
            stack.close()
            await eventually(partial(welcomed, raw), bool)


async def welcomed(raw):
    raw.detach()
    try:
        return isinstance(raw.attach_again(), attach.Welcome)
    except (OSError, attach.AttachProtocolError):
        return False


async def test_too_many_descriptors_in_flight_are_told_as_such(start_fresh):
    daemon = start_fresh(host=4)
    daemon.stop()
    daemon.within = ["prlimit", "--nofile=256:256"]
    if os.getuid() == 0:  # the kernel spares who may raise limits
        daemon.within += ["setpriv", "--bounding-set", "-sys_resource,-sys_admin"]
    daemon.start()
    async with await connect(daemon.address) as client:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with ours, theirs:
            for _ in range(2):
                socket.send_fds(ours, [b"x"], [ours.fileno()] * 200)
            with pytest.raises(RetryableError, match="descriptors") as failed:
                await client.open_cache("c", SPEC)
            assert failed.value.reason == "TOO_MANY_DESCRIPTORS"
            (problem,) = (await client.stats()).problems
            assert "memory cannot be mapped" in problem
        cache = await client.open_cache("c", SPEC)
        keys = chain("c", 2)
        await cache.put(keys, blocks(keys))
        assert_bytes(keys, await cache.get(keys))
        assert (await client.stats()).problems == ()
