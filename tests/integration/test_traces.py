"""OpenTelemetry traces of a real daemon, as a collector gets them."""

import os
import socket

import pytest
from opentelemetry.sdk.trace import TracerProvider

from kvtier import Client, InvalidArgument, Tier, connect
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain, opened_cache
from tests.integration.collector import collecting
from tests.integration.starting import refused, tree
from tests.integration.waiting import eventually

KEYS = chain("traces", 4)
ANYBODY = '{"anonymous": true, "caches": ["*"], "verbs": ["read", "write"]}'
TCP = ("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", ANYBODY)
TRACER = TracerProvider().get_tracer("test")


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collecting() as collector:
        yield collector


async def test_calls_and_moves_become_spans(collector, start_fresh):
    daemon = start_fresh("--traces", collector.endpoint, host=8, disk=8)
    async with opened_cache(daemon.address, "c") as (_, cache):
        await cache.put(KEYS, blocks(KEYS))
        await cache.move(KEYS, Tier.DISK)
        async with cache.acquire([*KEYS, *chain("absent", 2)]) as lease:
            assert lease.blocks == 4
    about = {"kvtier.client.pid": os.getpid(), "kvtier.cache": "c"}
    (opened,) = collector.call("Caches.Open")
    assert opened.attributes["kvtier.cache"] == "c"
    for verb, count in (("Reserve", 4), ("Commit", 4), ("Move", 4), ("Acquire", 6)):
        (span,) = collector.call(f"Blocks.{verb}")
        wanted = about | {"kvtier.blocks": count, "rpc.response.status_code": "OK", "rpc.method": span.name}
        assert span.attributes.items() >= wanted.items()
        assert span.attributes["kvtier.client.identity"].startswith(f"uid {os.getuid()} ")
        assert not span.failed and not span.parent
        assert span.seconds > 0
    for edge, call, cause in (("host to disk", "Move", "explicit"), ("disk to host", "Acquire", "demand")):
        moves = collector.wait_for(lambda span, edge=edge: span.name == f"move {edge}")
        assert sum(move.attributes["kvtier.blocks"] for move in moves) == 4
        assert sum(move.attributes["kvtier.bytes"] for move in moves) == 4 * SLOT_BYTES
        (planned_by,) = collector.call(f"Blocks.{call}")
        for move in moves:
            assert (move.trace, move.parent) == (planned_by.trace, planned_by.id)
            assert move.attributes["kvtier.cause"] == cause
            assert move.attributes["kvtier.failed_blocks"] == 0
            assert 0 <= move.attributes["kvtier.queue_seconds"] <= move.seconds
            assert not move.failed
    assert collector.services == {"kvtierd"}
    told = repr(collector.spans)
    assert not any(repr(key)[2:-1] in told or key.hex() in told for key in KEYS)


async def test_streams_become_spans(collector, start_fresh):
    daemon = start_fresh(*TCP, "--traces", collector.endpoint, host=8)
    async with await connect(daemon.tcp_address, insecure=True) as client:
        cache = await client.open_cache("c", SPEC)
        await cache.put(KEYS, blocks(KEYS))
        assert_bytes(KEYS, await cache.get(KEYS))
    for verb in ("Put", "Get"):
        (span,) = collector.call(f"Transfer.{verb}")
        assert span.attributes.items() >= {"kvtier.cache": "c", "kvtier.blocks": 4, "kvtier.client.pid": 0}.items()
        assert "anonymous" in span.attributes["kvtier.client.identity"]


async def test_a_refused_call_says_why(collector, start_fresh):
    daemon = start_fresh("--traces", collector.endpoint, host=8)
    async with opened_cache(daemon.address, "c") as (_, cache):
        with pytest.raises(InvalidArgument):
            await cache.reserve(9).__aenter__()
    (span,) = collector.call("Blocks.Reserve")
    told = {"rpc.response.status_code": "INVALID_ARGUMENT", "kvtier.cache": "c", "kvtier.blocks": 9}
    assert span.attributes.items() >= told.items()
    assert span.attributes["kvtier.reason"] and not span.failed


@pytest.mark.parametrize("way", ["local", "sync", "tcp"])
async def test_a_call_is_a_child_of_its_callers_span(collector, start_fresh, way):
    daemon = start_fresh(*TCP, "--traces", collector.endpoint, host=8)
    if way == "sync":
        with Client(daemon.address) as client:
            blocking = client.open_cache("c", SPEC)
            with TRACER.start_as_current_span("prefill") as span:
                blocking.drop(KEYS)
    else:
        address = daemon.tcp_address if way == "tcp" else daemon.address
        async with await connect(address, insecure=way == "tcp") as client:
            cache = await client.open_cache("c", SPEC)
            with TRACER.start_as_current_span("prefill") as span:
                await cache.drop(KEYS)
    (drop,) = collector.call("Blocks.Drop")
    ours = span.get_span_context()
    assert (drop.trace, drop.parent) == (f"{ours.trace_id:032x}", f"{ours.span_id:016x}")
    assert not collector.call("Caches.Open")[0].parent


async def test_a_collector_that_is_away_costs_one_warning_and_the_spans(monkeypatch, start_fresh):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with collecting() as collector:  # its port is free afterwards
        port = int(collector.endpoint.rpartition(":")[2])
    daemon = start_fresh("--traces", collector.endpoint, host=8)
    async with opened_cache(daemon.address, "c") as (_, cache):
        for _ in range(100):  # more than the queue has room for
            await cache.drop(KEYS)
        await eventually(lambda: daemon.log, lambda log: "traces are lost" in log)
        assert daemon.log.count("level=warning") == 1
        with collecting(port) as back:

            async def taken():
                await cache.drop(KEYS)
                return back.spans

            await eventually(taken, len)
    assert daemon.log.count("level=warning") == 1, daemon.log


async def test_a_stop_does_not_wait_for_a_collector_that_hangs(monkeypatch, start_fresh):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        daemon = start_fresh("--traces", f"http://127.0.0.1:{silent.getsockname()[1]}", host=8)
        async with await connect(daemon.address) as client:
            await client.open_cache("c", SPEC)
        daemon.stop()


def test_without_the_extra_the_start_names_it(start_fresh, tmp_path):
    daemon = start_fresh(host=8)
    daemon.stop()
    (tmp_path / "opentelemetry.py").write_text("raise ModuleNotFoundError('opentelemetry is not here')")
    daemon.variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    before = tree(daemon.state_dir)
    said = refused(daemon, "--traces", "http://127.0.0.1:4317", status=2)
    assert said.startswith("kvtierd: ")
    assert "traces = http://127.0.0.1:4317: needs pip install '.[otel]' in a clone of kvtier" in said
    assert tree(daemon.state_dir) == before
