"""Configuration of a real daemon: what is refused, with which words, and what wins over what."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from kvtier import Tier, TierFull, connect
from tests.integration.blocks import SPEC
from tests.integration.daemon import DaemonProcess
from tests.integration.starting import kvtierd, message, tree

BAD_CONFIG = 2


def directories(home):
    return ["--runtime-dir", f"{home}/run", "--state-dir", f"{home}/state"]


def written(home, text):
    path = home / "kvtierd.toml"
    path.write_text(text)
    return path


@contextmanager
def running(home, *flags, env=None):
    """A daemon with nothing on its command line but its directories and ``flags``."""
    daemon = DaemonProcess(home, {}, flags)
    daemon.variables |= env or {}
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


async def tier_sizes(daemon):
    """In slots, of a cache that takes everything."""
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("all", SPEC)
        return {tier: cache.slots(tier) for tier in cache.tiers}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("device_byte = 4096", "device_byte: there is no such key"),
        ('disk_bytes = "8 parsecs"', "disk_bytes = '8 parsecs': could not interpret byte unit: parsecs"),
        ("event_ring_bytes = 1", "event_ring_bytes = 1: must be greater than or equal to 1024"),
        ("host_bytes = 4096\nhost_bytes = 8192", "Cannot overwrite a value"),
        (
            'host_bytes = 4096\nmetrics_listen = "localhost"',
            "metrics_listen = localhost: must be host:port, or [host]:port for IPv6",
        ),
        (
            'host_bytes = 4096\nlisten_tcp = "0.0.0.0:0"',
            "listen_tcp = 0.0.0.0:0: needs tls_cert and tls_key and tls_client_ca",
        ),
        (
            "host_bytes = 4096\n[[allow]]\nuids = [1]\nverbs = ['read']",
            "allow[0][caches]: must be given",
        ),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_touched(short_dir, text, says):
    path = written(short_dir, text)
    before = tree(short_dir)
    ended = kvtierd("--config", path, *directories(short_dir))
    assert ended.returncode == BAD_CONFIG, ended
    (said,) = message(ended).splitlines()
    assert said.startswith(f"kvtierd: {path}: {says}")
    assert tree(short_dir) == before


@pytest.mark.parametrize("text", ["", "device_bytes = 0\nhost_bytes = '0'\ndisk_bytes = '0GiB'"])
def test_a_daemon_without_any_tier_is_refused(short_dir, text):
    ended = kvtierd("--config", written(short_dir, text), *directories(short_dir))
    assert ended.returncode == BAD_CONFIG
    assert "no tier is configured: set device_bytes, host_bytes or disk_bytes above 0" in message(ended)


def test_every_fault_of_every_source_is_told_in_one_go(short_dir):
    path = written(short_dir, "host_bytes = -1\nmax_sessions = 0\n")
    flags = [*directories(short_dir), "--device-bytes", "many", "--wait-seconds", "0"]
    ended = kvtierd("--config", path, *flags, env={"KVTIERD_DISK_BYTES": "plenty", "KVTIERD_HOST_BYTE": "4096"})
    assert ended.returncode == BAD_CONFIG
    assert {line.split(" = ")[0] for line in message(ended).splitlines()} == {
        f"kvtierd: {path}: host_bytes",
        f"kvtierd: {path}: max_sessions",
        "kvtierd: environment: KVTIERD_DISK_BYTES",
        "kvtierd: environment: KVTIERD_HOST_BYTE: there is no such key",
        "kvtierd: command line: --device-bytes",
        "kvtierd: command line: --wait-seconds",
    }


def test_no_directory_is_the_working_directory_by_an_empty_name(short_dir):
    """The runtime directory was, and got its lock and sockets."""
    ended = kvtierd("--runtime-dir", "", "--state-dir", f"{short_dir}/state", "--host-bytes", "4096")
    assert ended.returncode == BAD_CONFIG
    assert message(ended) == "kvtierd: command line: --runtime-dir = '': must not be empty"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "a directory"])
def test_a_file_that_cannot_be_read_is_refused(short_dir, content):
    path = short_dir / "kvtierd.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    ended = kvtierd("--config", path, *directories(short_dir))
    assert ended.returncode == BAD_CONFIG
    assert message(ended).startswith(f"kvtierd: {path}: ")


def test_unknown_flags_and_arguments_are_refused(short_dir):
    for argument in ("--host-byte=4096", "start"):
        ended = kvtierd(*directories(short_dir), argument)
        assert ended.returncode == BAD_CONFIG
        assert argument.partition("=")[0] in ended.stderr
        assert "Traceback" not in ended.stderr


async def test_flags_beat_the_environment_beats_the_file(short_dir):
    slot = SPEC.record_bytes(0)
    path = written(short_dir, f"device_bytes = {2 * slot}\nhost_bytes = {2 * slot}\ndisk_bytes = {2 * slot}\n")
    env = {"KVTIERD_CONFIG": str(path), "KVTIERD_HOST_BYTES": str(3 * slot), "KVTIERD_DISK_BYTES": str(3 * slot)}
    with running(short_dir, "--disk-bytes", str(4 * slot), env=env) as daemon:
        assert await tier_sizes(daemon) == {Tier.DEVICE: 2, Tier.HOST: 3, Tier.DISK: 4}


async def test_sizes_are_bytes_or_text_and_a_tier_of_0_does_not_exist(short_dir):
    slot = SPEC.record_bytes(0)
    path = written(short_dir, 'device_bytes = "1MiB"\nhost_bytes = "1MB"\n')
    with running(short_dir, "--config", str(path), "--disk-bytes", "0") as daemon:
        assert await tier_sizes(daemon) == {Tier.DEVICE: (1 << 20) // slot, Tier.HOST: 10**6 // slot}
    assert not daemon.disk_dir.exists(), "no disk tier, no directory"


@pytest.mark.parametrize("tier", list(Tier))
async def test_any_one_tier_is_enough(short_dir, tier):
    with running(short_dir, f"--{tier}-bytes", "1MiB") as daemon:
        assert set(await tier_sizes(daemon)) == {tier}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--host-bytes", "900TiB"), "command line: --host-bytes = 989560464998400: the tiers"),
        (
            ("--host-bytes", "4096", "--device-bytes", "900TiB"),
            "command line: --device-bytes = 989560464998400: the",
        ),
        (("--disk-bytes", "1PiB"), "command line: --disk-bytes = 1125899906842624: more than the"),
    ],
)
def test_what_this_machine_can_never_have_is_refused_at_the_start(short_dir, flags, says):
    """What is only not free yet is refused to the caches that do not fit."""
    before = tree(short_dir)
    ended = kvtierd(*flags, *directories(short_dir))
    assert ended.returncode == BAD_CONFIG, ended
    assert says in message(ended)
    assert tree(short_dir) == before


async def test_a_tier_too_small_for_a_block_is_refused_when_a_cache_is_opened(short_dir):
    """What a block takes is the cache's to say, so a start cannot know."""
    with running(short_dir, "--host-bytes", "4096") as daemon:
        async with await connect(daemon.address) as client:
            with pytest.raises(TierFull) as error:
                await client.open_cache("all", SPEC)
    assert (error.value.tier, error.value.wanted, error.value.free) == (Tier.HOST, 1, 0)
