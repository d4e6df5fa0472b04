from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.config import Config, ConfigError, load
from kvtierd.config.kinds import show_size
from kvtierd.core.ids import Tier


def toml(directory: Path, text: str) -> Path:
    path = directory / "kvtierd.toml"
    path.write_text(text)
    return path


def test_sizes_are_bytes_or_text() -> None:
    config = load(None, {"device_bytes": "1GiB", "host_bytes": 4096, "disk_bytes": "2 GB"})
    assert config.tier_bytes() == {Tier.DEVICE: 1 << 30, Tier.HOST: 4096, Tier.DISK: 2 * 10**9}


def test_a_tier_of_size_0_does_not_exist() -> None:
    assert load(None, {"host_bytes": "1MiB", "disk_bytes": 0}).tier_bytes() == {Tier.HOST: 1 << 20}


@pytest.mark.parametrize(
    ("said", "past", "unlogged"),
    [
        ({}, "4MiB", "64MiB"),
        ({"event_log_bytes": 0}, "64MiB", "64MiB"),
        ({"event_ring_bytes": "9MiB"}, "9MiB", "9MiB"),
        ({"event_ring_bytes": "9MiB", "event_log_bytes": 0}, "9MiB", "9MiB"),
    ],
)
def test_what_the_log_has_need_not_be_in_memory(said: dict[str, object], past: str, unlogged: str) -> None:
    config = load(None, {"host_bytes": "1MiB", **said})
    assert (show_size(config.past_bytes), show_size(config.unlogged_bytes)) == (past, unlogged)


def test_a_gpus_tier_can_be_a_share_of_what_is_free_there() -> None:
    config = load(None, {"device": "cuda:1", "device_bytes": "62.5%", "host_bytes": 4096})
    assert config.tiers == (Tier.DEVICE, Tier.HOST)
    assert config.tier_bytes(device_free=1 << 30) == {Tier.DEVICE: 5 << 27, Tier.HOST: 4096}
    assert config.cuda_device == "cuda:1"


def test_a_stand_in_cannot_be_a_share_of_anything() -> None:
    with pytest.raises(ConfigError, match="device-bytes = 80%: must be bytes, unless device is a GPU"):
        load(None, {"device_bytes": "80%"})


def test_no_gpu_is_asked_for_without_a_device_tier() -> None:
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    assert load(None, {"device": uuid, "device_bytes": 1}).cuda_device == uuid
    assert load(None, {"device": uuid, "host_bytes": 1}).cuda_device is None
    assert load(None, {"device_bytes": 1}).cuda_device is None


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path, 'device_bytes = "1MiB"\nhost_bytes = "1MiB"\ndisk_bytes = "1MiB"\n')
    monkeypatch.setenv("KVTIERD_HOST_BYTES", "2MiB")
    monkeypatch.setenv("KVTIERD_DISK_BYTES", "2MiB")
    config = load(file, {"disk_bytes": "3MiB"})
    assert [size >> 20 for size in config.tier_bytes().values()] == [1, 2, 3]


def test_lists_in_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERD_ALLOW_UIDS", "[1000, 1001]")
    assert load(None, {"host_bytes": 4096}).allow_uids == (1000, 1001)


def test_the_disk_is_in_the_state_directory_unless_said_otherwise(tmp_path: Path) -> None:
    assert load(None, {"host_bytes": 1, "state_dir": tmp_path}).disk_path == tmp_path / "disk"
    assert load(None, {"host_bytes": 1, "disk_dir": tmp_path}).disk_path == tmp_path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('host_bytes = "1GiB"\nhost_byte = 3', "host_byte: there is no such key"),
        ("host_bytes = -1", "host_bytes = -1: "),
        ('host_bytes = "many"', "host_bytes = 'many': must be bytes, 0 or more, or text such as 8GiB"),
        ("host_bytes = 1152921504606846976", "host_bytes = 1152921504606846976: must be 0 to 1PiB"),
        ('device_bytes = "0%"', "device_bytes = '0%': must be bytes, 0 or more, or text such as 8GiB; or a share"),
        ('device_bytes = "101%"', "device_bytes = '101%': must be bytes"),
        ('device_bytes = "-5%"', "device_bytes = '-5%': must be bytes"),
        ('host_bytes = "80%"', "host_bytes = '80%': must be bytes, 0 or more, or text such as 8GiB"),
        ('device = "cuda"\ndevice_bytes = "1PB 80%"', "device_bytes = '1PB 80%': must be bytes"),
        ("device_bytes = 1152921504606846976", "device_bytes = 1152921504606846976: must be 0 to 1PiB"),
        ('device = "gpu"\nhost_bytes = 1', "device = 'gpu': must be stand-in, cuda, cuda:<number> or GPU-<uuid>"),
        ('device = "cuda:-1"\nhost_bytes = 1', "device = 'cuda:-1': must be stand-in"),
        ('device = "GPU-12345678"\nhost_bytes = 1', "device = 'GPU-12345678': must be stand-in"),
        ('host_bytes = "1GiB"\nmax_sessions = 0', "max_sessions = 0: must be 1 to 65536"),
        ("max_sessions = 'many'", "max_sessions = 'many': must be an integer, 1 to 65536"),
        ("max_sessions = 1.5", "max_sessions = 1.5: must be an integer, 1 to 65536"),
        ("max_sessions = true", "max_sessions = True: must be an integer, 1 to 65536"),
        ("chaos_seed = true", "chaos_seed = True: must be an integer, 0 or more"),
        ("max_pinned_fraction = true", "max_pinned_fraction = True: must be a number, 0 to 1"),
        ("max_pinned_fraction = 'half'", "max_pinned_fraction = 'half': must be a number, 0 to 1"),
        ("tcp_insecure = 'perhaps'", "tcp_insecure = 'perhaps': must be true or false"),
        ("state_dir = 5", "state_dir = 5: must be a path"),
        ("listen_tcp = 7443", "listen_tcp = 7443: must be text"),
        ("allow_uids = 5", "allow_uids = 5: must be a list of integer"),
        ('host_bytes = "1GiB"\nallow_uids = [-1]', "allow_uids[0] = -1: must be at least 0"),
        ("allow_uids = [4294967295]", "allow_uids[0] = 4294967295: must be below 4294967295"),
        ("allow_uids = [true]", "allow_uids[0] = True: must be an integer"),
        ("allow = [5]", "allow[0] = 5: must be a table"),
        ("[allow]\nuids = [5]", "allow = {'uids': [5]}: must be a list of tables"),
        ("[[allow]]\nuids = ['root']", "allow[0][uids][0] = 'root': must be an integer"),
        ("[[allow]]\nuids = 5", "allow[0][uids] = 5: must be a list"),
        ("[[allow]]\nverbs = ['reed']", "verbs][0] = 'reed': must be 'read', 'write', 'watch', 'tokens' or 'admin'"),
        (
            'host_bytes = "1GiB"\nlog_level = "loud"',
            "log_level = 'loud': must be 'debug', 'info', 'warning' or 'error'",
        ),
        ("host_bytes = ", "Invalid value"),
        ("", "no tier is configured"),
    ],
)
def test_what_a_file_must_not_say_is_refused_with_file_key_and_reason(tmp_path: Path, text: str, says: str) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load(file, {})
    assert says in str(refused.value)
    assert str(file) in str(refused.value) or "no tier" in says


def test_every_fault_is_named_with_its_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERD_WAIT_SECONDS", "-1")
    file = toml(tmp_path, "max_sessions = 0")
    with pytest.raises(ConfigError) as refused:
        load(file, {"host_bytes": "x"})
    lines = str(refused.value).splitlines()
    assert sorted(line.split(" = ")[0] for line in lines) == [
        f"{file}:1: max_sessions",
        "command line: --host-bytes",
        "environment: KVTIERD_WAIT_SECONDS",
    ]


def test_unknown_variables_of_our_prefix_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERD_HOST_BYTE", "1GiB")
    with pytest.raises(ConfigError, match="environment: KVTIERD_HOST_BYTE: there is no such key"):
        load(None, {"host_bytes": "1GiB"})


def test_a_list_that_is_not_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERD_ALLOW_UIDS", "x")
    with pytest.raises(ConfigError, match=r"KVTIERD_ALLOW_UIDS = .x.: must be a JSON list"):
        load(None, {"host_bytes": "1GiB"})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvtierd\.toml: No such file"):
        load(tmp_path / "kvtierd.toml", {"host_bytes": 1})


def test_every_key_says_what_it_is() -> None:
    assert all(field.description for field in Config.model_fields.values())
