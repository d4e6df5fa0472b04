"""Configuration of a real daemon: what is refused, with which words, and what wins over what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier import Tier, TierFull, connect
from tests.integration.blocks import SPEC
from tests.integration.daemon import DaemonProcess
from tests.integration.starting import kvtierd, message, tree

BAD_CONFIG = 2


def directories(home: Path) -> list[str]:
    return ["--runtime-dir", f"{home}/run", "--state-dir", f"{home}/state"]


def written(home: Path, text: str) -> Path:
    path = home / "kvtierd.toml"
    path.write_text(text)
    return path


@contextmanager
def running(home: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[DaemonProcess]:
    """A daemon with nothing on its command line but its directories and ``flags``."""
    daemon = DaemonProcess(home, {}, flags)
    daemon.variables |= env or {}
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


async def tier_sizes(daemon: DaemonProcess) -> dict[Tier, int]:
    """In slots, of a cache that takes everything."""
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("all", SPEC)
        return {tier: cache.slots(tier) for tier in cache.tiers}


BAD_FILES = {
    "unknown keys": """
        device_byte = 4096      # device_byte: there is no such key
        tiers.device = 4096     # tiers: there is no such key
        max_sessions = 0        # max_sessions = 0: must be 1 to 65536
    """,
    "wrong types": """
        device_bytes = [1]      # device_bytes = [1]: must be bytes, 0 or more, or text such as 8GiB
        host_bytes = true       # host_bytes = True: must be bytes
        disk_bytes = 4096.5     # disk_bytes = 4096.5: must be bytes
        max_sessions = "many"   # max_sessions = 'many': must be an integer, 1 to 65536
        wait_seconds = "long"   # wait_seconds = 'long': must be seconds, 0 or more, or text such as 30s
        log_level = "loud"      # log_level = 'loud': must be 'debug'
    """,
    "no sizes": """
        device_bytes = -1            # device_bytes = -1: must be bytes, 0 or more
        host_bytes = "-8GiB"         # host_bytes = '-8GiB': must be bytes
        disk_bytes = "8 parsecs"     # disk_bytes = '8 parsecs': must be bytes
        event_ring_bytes = "eight"   # event_ring_bytes = 'eight': must be bytes
    """,
    "out of range": """
        disk_bytes = "1EiB"          # disk_bytes = '1EiB': must be 0 to 1PiB
        host_bytes = 99999999999999999999999  # host_bytes = 99999999999999999999999: must be 0 to 1PiB
        event_ring_bytes = 1         # event_ring_bytes = 1: must be 64KiB to 64GiB
        heartbeat_seconds = 0        # heartbeat_seconds = 0: must be 10ms to 1h
        wait_seconds = nan           # wait_seconds = nan: must be seconds
        shutdown_seconds = inf       # shutdown_seconds = inf: must be seconds
        max_sessions = 0             # max_sessions = 0: must be 1 to 65536
        allow_uids = [0, -1]         # allow_uids[1] = -1: must be at least 0
    """,
    "keys that do not go together": """
        device_bytes = "80%"         # device_bytes = 80%: must be bytes, unless device is a GPU
        clean_low_fraction = 0.5     # clean_low_fraction = 0.5: must be at most clean_high_fraction = 0
        tls_cert = "/etc/cert.pem"   # tls_cert = /etc/cert.pem: is of no use, since listen_tcp is not set
        tcp_insecure = true          # tcp_insecure = True: is of no use, since listen_tcp is not set
        metrics_listen = "localhost" # metrics_listen = localhost: must be host:port
    """,
    "two listeners that must not be": """
        host_bytes = 4096
        listen_tcp = "0.0.0.0:0"     # listen_tcp = 0.0.0.0:0: needs tls_cert and tls_key and tls_client_ca
        metrics_listen = "0.0.0.0:0" # metrics_listen = 0.0.0.0:0: must be a loopback address
    """,
    "no paths": r"""
        tls_key = ""                 # tls_key = '': must be a path, not empty
        disk_dir = "/var/\u0000"     # disk_dir = '/var/\x00': must be a path, not empty and without NUL
    """,
    "rules": """
        host_bytes = 4096
        [[allow]]
        uid = [1]                    # allow[0][uid]: there is no such key
        caches = []                  # allow[0][caches] = []: must not be empty
        verbs = ["reed"]             # allow[0][verbs][0] = 'reed': must be 'read', 'write'
        [[allow]]                    # allow[1][caches]: must be given
        uids = [1]
        verbs = ["read"]
    """,
    "a key twice": """
        host_bytes = 4096
        host_bytes = 8192            # Cannot overwrite a value (at line 3
    """,
    "no TOML": """
        host_bytes =                 # Invalid value (at line 2
    """,
}
"""Lines of a file, each with what is to be said of it behind the number sign."""


def _names(said: str, path: Path, number: int, words: str) -> bool:
    """A key is told with its line; what is wrong with the file as such, with whatever place its parser tells."""
    return f"kvtierd: {path}:{number}: {words}" in said or (f"kvtierd: {path}: {words}" in said and "at line" in words)


@pytest.mark.parametrize("text", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_refused_before_anything_is_touched(short_dir: Path, text: str) -> None:
    path = written(short_dir, text)
    before = tree(short_dir)
    ended = kvtierd("--config", path, *directories(short_dir))
    assert ended.returncode == BAD_CONFIG, ended
    said = message(ended)
    lines = enumerate(text.splitlines(), 1)
    expected = [(number, line.partition("#")[2].strip()) for number, line in lines if "#" in line]
    missing = [words for number, words in expected if not _names(said, path, number, words)]
    assert not missing, said
    assert len(said.splitlines()) == len(expected), said
    assert tree(short_dir) == before


@pytest.mark.parametrize("text", ["", "device_bytes = 0\nhost_bytes = '0'\ndisk_bytes = '0GiB'"])
def test_a_daemon_without_any_tier_is_refused(short_dir: Path, text: str) -> None:
    ended = kvtierd("--config", written(short_dir, text), *directories(short_dir))
    assert ended.returncode == BAD_CONFIG
    assert "no tier is configured: set device_bytes, host_bytes or disk_bytes above 0" in message(ended)


def test_every_fault_of_every_source_is_named_in_one_go(short_dir: Path) -> None:
    path = written(short_dir, "host_bytes = -1\nmax_sessions = 0\n")
    flags = [*directories(short_dir), "--device-bytes", "0.5", "--wait-seconds", "0"]
    ended = kvtierd("--config", path, *flags, env={"KVTIERD_DISK_BYTES": "plenty", "KVTIERD_MAX_SESSIONS": "none"})
    said = message(ended).splitlines()
    assert ended.returncode == BAD_CONFIG
    assert any(line.startswith(f"kvtierd: {path}:1: host_bytes = -1: ") for line in said)
    assert any(line.startswith("kvtierd: environment: KVTIERD_DISK_BYTES = 'plenty': ") for line in said)
    assert any(line.startswith("kvtierd: environment: KVTIERD_MAX_SESSIONS = 'none': ") for line in said)
    assert any(line.startswith("kvtierd: command line: --wait-seconds = '0': ") for line in said)


def test_keys_that_do_not_go_together_are_named_with_where_they_stand(short_dir: Path) -> None:
    flags = [*directories(short_dir), "--host-bytes", "4096", "--clean-low-fraction", "1"]
    ended = kvtierd(*flags, env={"KVTIERD_METRICS_LISTEN": "[::]:0"})
    assert ended.returncode == BAD_CONFIG
    assert message(ended).splitlines() == [
        "kvtierd: command line: --clean-low-fraction = 1: must be at most clean_high_fraction = 0",
        "kvtierd: environment: KVTIERD_METRICS_LISTEN = [::]:0: must be a loopback address, unless "
        "metrics_public = true",
    ]


def test_a_variable_that_is_no_list_is_named_with_the_reason(short_dir: Path) -> None:
    ended = kvtierd(*directories(short_dir), "--host-bytes", "4096", env={"KVTIERD_ALLOW_UIDS": "[1"})
    assert ended.returncode == BAD_CONFIG
    assert message(ended).startswith("kvtierd: environment: KVTIERD_ALLOW_UIDS = '[1': must be a JSON list: ")


def test_no_directory_is_the_working_directory_by_an_empty_name(short_dir: Path) -> None:
    """The runtime directory was, and got its lock and sockets."""
    ended = kvtierd("--runtime-dir", "", "--state-dir", f"{short_dir}/state", "--host-bytes", "4096")
    assert ended.returncode == BAD_CONFIG
    assert message(ended) == "kvtierd: command line: --runtime-dir = '': must be a path, not empty and without NUL"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "a directory"])
def test_a_file_that_cannot_be_read_is_refused(short_dir: Path, content: bytes | str | None) -> None:
    path = short_dir / "kvtierd.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    ended = kvtierd("--config", path, *directories(short_dir))
    assert ended.returncode == BAD_CONFIG
    assert message(ended).startswith(f"kvtierd: {path}: ")


def test_unknown_variables_are_refused(short_dir: Path) -> None:
    ended = kvtierd(*directories(short_dir), env={"KVTIERD_HOST_BYTE": "4096"})
    assert ended.returncode == BAD_CONFIG
    assert message(ended) == ("kvtierd: environment: KVTIERD_HOST_BYTE: there is no such key; did you mean host_bytes?")


def test_unknown_flags_and_arguments_are_refused(short_dir: Path) -> None:
    for argument in ("--host-byte=4096", "start"):
        ended = kvtierd(*directories(short_dir), argument)
        assert ended.returncode == BAD_CONFIG
        assert argument.partition("=")[0] in ended.stderr
        assert "Traceback" not in ended.stderr


async def test_flags_beat_the_environment_beats_the_file(short_dir: Path) -> None:
    slot = SPEC.record_bytes(0)
    path = written(short_dir, f"device_bytes = {2 * slot}\nhost_bytes = {2 * slot}\ndisk_bytes = {2 * slot}\n")
    env = {"KVTIERD_CONFIG": str(path), "KVTIERD_HOST_BYTES": str(3 * slot), "KVTIERD_DISK_BYTES": str(3 * slot)}
    with running(short_dir, "--disk-bytes", str(4 * slot), env=env) as daemon:
        assert await tier_sizes(daemon) == {Tier.DEVICE: 2, Tier.HOST: 3, Tier.DISK: 4}


async def test_sizes_are_bytes_or_text_and_a_tier_of_0_does_not_exist(short_dir: Path) -> None:
    slot = SPEC.record_bytes(0)
    path = written(short_dir, 'device_bytes = "1MiB"\nhost_bytes = "1MB"\n')
    with running(short_dir, "--config", str(path), "--disk-bytes", "0") as daemon:
        assert await tier_sizes(daemon) == {Tier.DEVICE: (1 << 20) // slot, Tier.HOST: 10**6 // slot}
    assert not daemon.disk_dir.exists(), "no disk tier, no directory"


@pytest.mark.parametrize("tier", list(Tier))
async def test_any_one_tier_is_enough(short_dir: Path, tier: Tier) -> None:
    with running(short_dir, f"--{tier}-bytes", "1MiB") as daemon:
        assert set(await tier_sizes(daemon)) == {tier}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--host-bytes", "900TiB"), "command line: --host-bytes = 900TiB: the tiers in memory take"),
        (("--host-bytes", "4096", "--device-bytes", "900TiB"), "command line: --device-bytes = 900TiB: the tiers in"),
        (("--disk-bytes", "1PiB"), "command line: --disk-bytes = 1PiB: more than the"),
    ],
)
def test_what_this_machine_can_never_have_is_refused_at_the_start(
    short_dir: Path, flags: tuple[str, ...], says: str
) -> None:
    """What is only not free yet is refused to the caches that do not fit."""
    before = tree(short_dir)
    ended = kvtierd(*flags, *directories(short_dir))
    assert ended.returncode == BAD_CONFIG, ended
    assert says in message(ended)
    assert tree(short_dir) == before


async def test_a_tier_too_small_for_a_block_is_refused_when_a_cache_is_opened(short_dir: Path) -> None:
    """What a block takes is the cache's to say, so a start cannot know."""
    with running(short_dir, "--host-bytes", "4096") as daemon:
        async with await connect(daemon.address) as client:
            with pytest.raises(TierFull) as error:
                await client.open_cache("all", SPEC)
    assert (error.value.tier, error.value.wanted, error.value.free) == (Tier.HOST, 1, 0)
