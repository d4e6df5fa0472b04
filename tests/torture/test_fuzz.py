"""Calls every RPC with senseless messages: the daemon answers each call, or refuses it as the caller's fault, and keeps
serving other clients."""

import asyncio
import random
import time
from collections import Counter

import grpc
import pytest

from kvtier import CallerError, connect
from kvtier.abi.attach import RPC_SOCKET, SESSION_METADATA_KEY, socket_path
from kvtier.errors import RetryableError, fault_of
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.raw import attached, channel_to
from tests.integration.test_crash import SEED
from tests.torture.fuzz import Fuzzer, reflected
from tests.torture.runs import scaled

CALLS = scaled(20_000, 800)
A_SESSION = 400
AT_ONCE = 40
CALL_S = 0.2
OURS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
"""Status codes that only a bug of the daemon returns."""
KEYS = chain("bystander", 6)

pytestmark = [pytest.mark.long, pytest.mark.limit(1800)]


async def test_every_rpc(start_fresh, found):
    rng, codes, slowest, read = random.Random(SEED), Counter[grpc.StatusCode](), 0.0, 0
    daemon = start_fresh("--debug-checks", device=16, host=32, disk=64)
    rpcs = await asyncio.to_thread(reflected, f"unix:{socket_path(daemon.address, RPC_SOCKET)}")
    assert {"/kvtier.v1.Blocks/Commit", "/grpc.health.v1.Health/Check"} <= {rpc.path for rpc in rpcs}
    fuzzer = Fuzzer(rng)
    while codes.total() < CALLS:
        await fuzz_session(daemon, rpcs, fuzzer, rng, codes)
        began = time.monotonic()
        read += await stand_by(daemon.address)
        slowest = max(slowest, time.monotonic() - began)
    assert "Traceback" not in daemon.log, daemon.log
    most = ", ".join(f"{code.name} {count:,}" for code, count in codes.most_common(6))
    found(
        f"fuzzed {len(rpcs)} RPCs with {codes.total():,} calls: {most}; 0 told as a bug; 0 wrong of {read:,} blocks "
        f"that another client read meanwhile, its slowest session {slowest * 1000:.0f} ms"
    )
    daemon.disturbed = True  # calls may have kicked sessions of other clients


async def fuzz_session(daemon, rpcs, fuzzer, rng, codes):
    async with attached(daemon.address) as raw, channel_to(daemon.address) as channel:
        tokens = [*[raw.welcome.token] * 8, "", "x" * 32]
        try:
            for _ in range(A_SESSION // AT_ONCE):
                await raw.open("fuzz", SPEC, sizes(device=8, host=16, disk=32))  # some call may have removed it
                some = rng.choices(rpcs, k=AT_ONCE)
                ends = await asyncio.gather(*(call(channel, rpc, rng.choice(tokens), fuzzer) for rpc in some))
                codes.update(ends)
                bugs = [(rpc.path, code) for rpc, code in zip(some, ends, strict=True) if code in OURS]
                assert not bugs, f"{bugs}\n{daemon.log}"
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, error  # one of its calls kicked it
        finally:
            raw.detach()


async def call(channel, rpc, token, fuzzer):
    """Makes a call. Returns its status code."""
    messages = fuzzer.messages(rpc)
    metadata = ((SESSION_METADATA_KEY, token),) if token else ()
    kind = f"{'stream' if rpc.sends_many else 'unary'}_{'stream' if rpc.gets_many else 'unary'}"
    method = getattr(channel, kind)(rpc.path)  # sends bytes, since some are no valid message
    running = method(iter(messages) if rpc.sends_many else messages[0], metadata=metadata, timeout=CALL_S)
    try:
        if rpc.gets_many:
            async for data in running:
                fuzzer.learn(rpc.reply.FromString(data))
        else:
            fuzzer.learn(rpc.reply.FromString(await running))
    except grpc.aio.AioRpcError as error:
        return fault_of(error).code
    except asyncio.CancelledError:  # gRPC raises this in a client's stream that the server cancels
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.OK


async def stand_by(address):
    """Another client reads its blocks. It may be refused after a call has changed its cache, but never finds a wrong
    byte. Returns the number of blocks read."""
    async with await connect(address, timeout=20) as client:
        try:
            cache = await client.open_cache("bystander", SPEC, budgets=sizes(device=4, host=8, disk=16))
            await cache.put(KEYS, blocks(KEYS))
            got = await cache.get(KEYS)
        except (CallerError, RetryableError):
            return 0
    assert_bytes(KEYS[: len(got)], got)
    return len(got)
