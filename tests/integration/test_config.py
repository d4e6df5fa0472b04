"""Configuration of a real daemon: what is refused, with which words, and what wins over what."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from kvtier import Tier, TierFull, connect
from tests.integration.blocks import SPEC, opened_cache, put_chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.raw import attached
from tests.integration.starting import kvtierd, message, tree
from tests.integration.waiting import eventually

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
    with daemon:
        yield daemon


async def tier_sizes(daemon):
    """In slots, of a cache that takes everything."""
    async with opened_cache(daemon.address, "all") as (_, cache):
        return {tier: cache.slots(tier) for tier in cache.tiers}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('disk_bytes = "8 parsecs"', "1: disk_bytes = '8 parsecs': could not interpret byte unit: parsecs"),
        ("event_ring_bytes = 1", "1: event_ring_bytes = 1: must be greater than or equal to 1024"),
        ("host_bytes = 4096\nhost_bytes = 8192", " Cannot overwrite a value"),
        (
            'host_bytes = 4096\nmetrics_listen = "localhost"',
            "2: metrics_listen = localhost: must be host:port, or [host]:port for IPv6",
        ),
        (
            'host_bytes = 4096\ntraces = "http://127.0.0.1:4318/v1/traces"',
            "2: traces = 'http://127.0.0.1:4318/v1/traces': must be http://host:port or, with TLS, https://host:port",
        ),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_touched(short_dir, text, says):
    path = written(short_dir, text)
    before = tree(short_dir)
    ended = kvtierd("--config", path, *directories(short_dir))
    assert ended.returncode == BAD_CONFIG, ended
    (said,) = message(ended).splitlines()
    assert said.startswith(f"kvtierd: {path}:{says}")
    assert tree(short_dir) == before


def test_every_fault_of_every_source_is_told_in_one_go(short_dir):
    path = written(short_dir, "host_bytes = -1\nmax_sessions = 0\n")
    flags = [*directories(short_dir), "--device", "cuda=many", "--wait-seconds", "0"]
    ended = kvtierd("--config", path, *flags, env={"KVTIERD_DISK_BYTES": "plenty", "KVTIERD_HOST_BYTE": "4096"})
    assert ended.returncode == BAD_CONFIG
    assert {line.split(" = ")[0] for line in message(ended).splitlines()} == {
        f"kvtierd: {path}:1: host_bytes",
        f"kvtierd: {path}:2: max_sessions",
        "kvtierd: environment: KVTIERD_DISK_BYTES",
        "kvtierd: environment: KVTIERD_HOST_BYTE: there is no such key; did you mean host_bytes?",
        "kvtierd: command line: --device[0][bytes]",
        "kvtierd: command line: --wait-seconds",
    }


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


DEEP, LONG = '{"a":' * 20_000, "9" * 5_000


@pytest.mark.parametrize(
    ("text", "env", "begins"),
    [
        ("allow = " + "[" * 50_000, {}, "{path}: "),
        (f"host_bytes = {LONG}", {}, "{path}: "),
        ("host_bytes = 4096", {"KVTIERD_REMOTE": DEEP}, "environment: KVTIERD_REMOTE = "),
        ("host_bytes = 4096", {"KVTIERD_PEERS": f"[{DEEP}"}, "environment: KVTIERD_PEERS = "),
        ("host_bytes = 4096", {"KVTIERD_ALLOW": f'[{{"uids": [{LONG}]}}]'}, "environment: KVTIERD_ALLOW"),
    ],
    ids=["brackets", "digits", "a table", "a list", "digits in a list"],
)
def test_values_that_no_parser_takes_are_refused(short_dir, text, env, begins):
    path = written(short_dir, text)
    ended = kvtierd("--config", path, "--check-config", env=env)
    assert ended.returncode == BAD_CONFIG, ended
    assert message(ended).startswith(f"kvtierd: {begins.format(path=path)}")


def test_unknown_flags_and_arguments_are_refused(short_dir):
    for argument in ("--host-byte=4096", "start"):
        ended = kvtierd(*directories(short_dir), argument)
        assert ended.returncode == BAD_CONFIG
        assert argument.partition("=")[0] in ended.stderr
        assert "Traceback" not in ended.stderr


async def test_sizes_are_bytes_or_text_and_a_tier_of_0_does_not_exist(short_dir):
    slot = SPEC.record_bytes(0)
    path = written(short_dir, 'device = ["stand-in=1MiB"]\nhost_bytes = "2MB"\ndisk_bytes = "2MB"\n')
    env = {"KVTIERD_CONFIG": str(path), "KVTIERD_HOST_BYTES": "1MB", "KVTIERD_DISK_BYTES": "1MB"}
    with running(short_dir, "--disk-bytes", "0", env=env) as daemon:  # a flag beats the environment beats the file
        assert await tier_sizes(daemon) == {Tier.DEVICE: (1 << 20) // slot, Tier.HOST: 10**6 // slot}
    assert not daemon.disk_dir.exists(), "no disk tier, no directory"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--host-bytes", "0"), "no tier is configured: give a device, or set host_bytes or disk_bytes above 0"),
        (("--host-bytes", "900TiB"), "command line: --host-bytes = 989560464998400: the memory tiers"),
        (("--host-bytes", "4096", "--device", "stand-in=900TiB"), "command line: --device = 989560464998400: the"),
        (("--disk-bytes", "1PiB"), "command line: --disk-bytes = 1125899906842624: the file system of"),
        (("--host-bytes", "4096", "--runtime-dir", ""), "command line: --runtime-dir = '': must not be empty"),
        (("--host-bytes", "4096", "--runtime-dir", f"/tmp/{'d' * 100}"), "command line: --runtime-dir = '/tmp/ddd"),
    ],
)
def test_a_bad_flag_is_refused_before_anything_is_touched(short_dir, flags, says):
    """Also what this machine can never have. What is only not free yet is refused to the caches that do not fit."""
    before = tree(short_dir)
    ended = kvtierd(*directories(short_dir), *flags)
    assert ended.returncode == BAD_CONFIG, ended
    assert f"kvtierd: {says}" in message(ended)
    assert tree(short_dir) == before


async def test_a_tier_too_small_for_a_block_is_refused_when_a_cache_is_opened(short_dir):
    """What a block takes is the cache's to say, so a start cannot know."""
    with running(short_dir, "--host-bytes", "4096") as daemon:
        async with await connect(daemon.address) as client:
            with pytest.raises(TierFull) as error:
                await client.open_cache("all", SPEC)
    assert (error.value.tier, error.value.wanted, error.value.free) == (Tier.HOST, 1, 0)


async def test_a_reload_takes_live_keys_names_the_others_and_survives_a_broken_file(short_dir):
    path = written(short_dir, 'host_bytes = "1MiB"\n')
    with running(short_dir, "--config", str(path)) as daemon:
        async with await connect(daemon.address) as client:

            async def problems():
                return (await client.stats()).problems

            def reload(text):
                written(short_dir, text)
                os.kill(daemon.pid, signal.SIGHUP)

            reload('host_bytes = "2MiB"\nlog_level = "debug"\n')
            said = await eventually(problems, bool)
            assert said == ("configuration: host_bytes has changed; that takes a restart",)
            assert "configuration reloaded changed=log_level refused=host_bytes" in daemon.log
            reload('host_bytes = "1MiB"\n')
            await eventually(problems, lambda said: not said)
            daemon.forget_log()
            reload('host_bytes = "1MiB"\nlog_level = "debug"\nwait_seconds = "soon"\n')
            (said,) = await eventually(problems, bool)
            assert f"{path}:3: wait_seconds = 'soon': must be a valid number" in said
            assert "changed=" not in daemon.log
            await client.open_cache("still-serving", SPEC)


async def test_no_token_and_no_key_is_ever_logged(start_daemon):
    daemon = start_daemon("--log-level", "debug", device=4, host=4, disk=8)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = await client.open_cache("c", SPEC, budgets=sizes(device=4, host=4, disk=8))
        keys = await put_chain(cache, "secret", 12)
        await cache.get(keys)
        await cache.move(keys[:2], Tier.DISK)
        await cache.drop(keys[:1])
        await raw.open("c")
        raw.detach()
    daemon.stop()
    assert "cache opened" in daemon.log and "session begins" in daemon.log
    for secret in (raw.welcome.token, *(key.hex() for key in keys), *(repr(key)[2:-1] for key in keys)):
        assert secret not in daemon.log
        assert secret.upper() not in daemon.log


def test_the_journal_has_what_stops_a_start_among_the_errors(tmp_path):
    """Where `journalctl -p err` finds it, as it does what is logged later."""
    file = tmp_path / "kvtierd.toml"
    file.write_text('hots_bytes = "1GiB"\n')
    with (tmp_path / "journal").open("w+") as journal:
        status = os.fstat(journal.fileno())
        variables = os.environ | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        command = [sys.executable, "-m", "kvtierd.main", "--config", str(file)]
        ended = subprocess.run(command, stderr=journal, env=variables, check=False, timeout=60)
        journal.seek(0)
        lines = journal.read().splitlines()
    assert ended.returncode == 2
    assert len(lines) == 1 and lines[0].startswith(f"<3>kvtierd: {file}:1: hots_bytes: "), lines
