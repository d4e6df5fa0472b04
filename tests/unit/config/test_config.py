"""The configuration: what its sources say, what is refused, and what the command prints of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtierd.config import Config, ConfigError, read
from kvtierd.config.keys import SECTIONS, Share
from kvtierd.config.load import reference
from kvtierd.core.ids import Tier
from kvtierd.main import main
from tests.tls import Authority

ROOT = Path(__file__).resolve().parents[3]


class Ended(NamedTuple):
    status: int | str | None
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def kvtierd(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command, in this process: none of these starts a daemon."""

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Ended(ended.value.code, *capsys.readouterr())

    return run


def toml(directory: Path, text: str) -> Path:
    path = directory / "kvtierd.toml"
    path.write_text(text)
    return path


def test_the_reference_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == reference(), "run: kvtierd --config-reference > docs/configuration.md"


def test_every_key_says_what_it_is() -> None:
    assert all((field.description or "").endswith(".") for field in Config.model_fields.values())


UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


def test_devices_are_tables_of_the_file_repeated_flags_or_json_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path, f'[[device]]\nname = "cuda:1"\nbytes = "62.5%"\n[[device]]\nname = "{UUID}"\nbytes = 4096\n')
    in_file = read(file, {}).config
    assert in_file.tiers == (Tier.DEVICE,)
    assert [(device.name, str(device.bytes)) for device in in_file.device] == [("cuda:1", "62.5%"), (UUID, "4096")]
    assert isinstance(in_file.device[0].bytes, Share) and in_file.device[0].bytes.of(1 << 30) == 5 << 27
    assert read(None, {"device": ("cuda:1=62.5%", f"{UUID}=4KiB")}).config.device == in_file.device
    monkeypatch.setenv("KVTIERD_DEVICE", '["stand-in=1MiB"]')
    assert read(file, {}).config.device == read(None, {"device": ("stand-in=1MiB",)}).config.device


def test_peers_are_tables_of_the_file_repeated_flags_or_json_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_file = read(
        toml(tmp_path, '[[peers]]\naddress = "localhost:7"\n'), {"host_bytes": 4096, "tcp_insecure": True}
    ).config
    assert [peer.address for peer in in_file.peers] == ["localhost:7"] and in_file.peer_tls is None
    monkeypatch.setenv("KVTIERD_PEERS", '["localhost:7"]')
    assert read(None, {"host_bytes": 4096, "tcp_insecure": True}).config.peers == in_file.peers
    tls = {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}
    other = read(None, {"host_bytes": 4096, "peers": ("far.example:7411",), **tls}).config
    assert other.peer_tls is not None and [peer.address for peer in other.peers] == ["far.example:7411"]


def test_the_disk_is_in_the_state_directory_by_default(tmp_path: Path) -> None:
    assert read(None, {"host_bytes": 4096, "state_dir": tmp_path}).config.disk_path == tmp_path / "disk"
    assert read(None, {"host_bytes": 4096, "disk_dir": tmp_path}).config.disk_path == tmp_path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host_bytes = 4096\nhost_byte = 3", "host_byte: there is no such key; did you mean host_bytes?"),
        ("host_bytes = 5", "host_bytes = 5: must be 0, or 4096 bytes or more"),
        ("disk_bytes = 100", "disk_bytes = 100: must be 0, or 4096 bytes or more"),
        ("host_bytes = -1", "host_bytes = -1: must be bytes, 0 or more, or text such as 8GiB"),
        ('host_bytes = "many"', "host_bytes = 'many': must be bytes"),
        ('host_bytes = "80%"', "host_bytes = '80%': must be bytes"),
        ("host_bytes = true", "host_bytes = True: must be bytes"),
        ('host_bytes = "1EiB"', f"host_bytes = '1EiB': must be less than or equal to {1 << 50}"),
        ('device = ["cuda=0%"]', "device[0][bytes] = '0%': must be above 0% to 100%"),
        ('device = ["cuda=1", "cuda:1=101%"]', "device[1][bytes] = '101%': must be above 0% to 100%"),
        ('device = ["cuda=0"]', "device[0][bytes] = '0': must be greater than 0"),
        ('device = ["cuda"]', "device[0][bytes] = '': must be bytes"),
        ('device = ["gpu=1"]', "device[0][name] = 'gpu': must be stand-in, cuda, cuda:<number> or GPU-<uuid>"),
        ('[[device]]\nname = "cuda"\nsize = 1', "device[0][size]: there is no such key"),
        ('[[device]]\nname = "cuda"', "device[0][bytes]: must be given"),
        ('device = ["stand-in=80%"]', "device[0] = 'stand-in=80%': bytes must be a size, unless name is a GPU"),
        ('device = "cuda"', "device = 'cuda': "),
        ("host_bytes = 4096\nmax_sessions = 0", "max_sessions = 0: must be greater than or equal to 1"),
        ("max_sessions = 'many'", "max_sessions = 'many': must be a valid integer"),
        ("host_bytes = 4096\nwait_seconds = inf", "wait_seconds = inf: must be less than or equal to 3600"),
        ("state_dir = ''", "state_dir = '': must not be empty"),
        ("[[allow]]\nuid = [5]", "allow[0][uid]: there is no such key; did you mean uids?"),
        ("allow = [5]", "allow[0] = 5: must be a valid dictionary or instance of AllowRule"),
        ("[[allow]]\nverbs = ['reed']", "verbs][0] = 'reed': must be 'read', 'write', 'watch', 'tokens' or 'admin'"),
        ('log_level = "loud"', "log_level = 'loud': must be 'debug', 'info', 'warning' or 'error'"),
        ('host_bytes = 4096\neviction = "random"', "eviction = 'random': must be 'learned', 'lru' or 'lfuda'"),
        ('[[peers]]\naddress = "there"', "peers[0][address] = 'there': must be host:port, or [host]:port for IPv6"),
        ('peers = ["there:0"]', "peers[0][address] = 'there:0': must be host:port, or [host]:port for IPv6, with the"),
        ("[[peers]]\nhost = 'there:1'", "peers[0][host]: there is no such key"),
        ('host_bytes = 4096\npeers = ["there:1"]', "peers = there:1: needs tls_cert and tls_key and tls_client_ca"),
        ('host_bytes = 4096\npeers = ["there:1"]\ntcp_insecure = true', "peers = there:1: without TLS only a loopback"),
        (
            'host_bytes = 4096\ntcp_insecure = true\npeers = ["[::1]:7", "[::1]:7"]',
            "peers = [::1]:7: must be named once",
        ),
        (f"peers = {[f'p:{n}' for n in range(1, 66)]}", "should have at most 64 items"),
        ("host_bytes = ", "Invalid value"),
        ("", "no tier is configured: give a device, or set host_bytes or disk_bytes above 0"),
    ],
)
def test_a_fault_in_a_file_is_told_with_file_key_value_and_limit(tmp_path: Path, text: str, says: str) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        read(file, {})
    assert says in str(refused.value)
    assert str(file) in str(refused.value) or "no tier" in says


def test_what_is_in_effect_is_printed_with_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtierd: Run
) -> None:
    file = toml(tmp_path, "wait_seconds = 5\nmax_sessions = 7\n")
    for key, value in (("CONFIG", str(file)), ("MAX_SESSIONS", "8"), ("HOST_BYTES", "4096")):
        monkeypatch.setenv(f"KVTIERD_{key}", value)
    flags = ["--host-bytes", "8GiB", "--device", "cuda=80%", "--device", "cuda:1=16GiB"]
    values = json.loads(kvtierd("--print-config", *flags).out)
    assert values["wait_seconds"] == {"value": 5.0, "source": f"{file}:1: wait_seconds"}
    assert values["max_sessions"] == {"value": 8, "source": "environment: KVTIERD_MAX_SESSIONS"}
    assert values["host_bytes"] == {"value": 8 << 30, "source": "command line: --host-bytes"}
    assert values["device"] == {
        "value": [{"name": "cuda", "bytes": "80%"}, {"name": "cuda:1", "bytes": 16 << 30}],
        "source": "command line: --device",
    }
    assert values["log_level"] == {"value": "info", "source": "default"}


def test_a_check_touches_nothing(short_dir: Path, kvtierd: Run) -> None:
    flags = ["--runtime-dir", f"{short_dir}/run", "--state-dir", f"{short_dir}/state", "--host-bytes", "8GiB"]
    right = kvtierd("--check-config", *flags)
    assert (right.status, right.out) == (0, "kvtierd: the configuration is right\n")
    wrong = kvtierd("--check-config", *flags, "--max-sessions", "0")
    assert wrong.status == 2
    assert "command line: --max-sessions = '0': must be greater than or equal to 1" in wrong.err
    assert not list(short_dir.iterdir())


def test_a_check_reads_the_tls_files(tmp_path: Path, kvtierd: Run) -> None:
    served = Authority(tmp_path).issue("127.0.0.1")
    (tmp_path / "other").mkdir()
    foreign = Authority(tmp_path / "other").issue("127.0.0.1")
    named = {"tls_cert": served.cert, "tls_key": served.key, "tls_client_ca": served.ca}
    file, empty, missing = tmp_path / "kvtierd.toml", tmp_path / "empty", tmp_path / "missing"
    empty.touch()

    def check(**others: Path) -> Ended:
        keys = "".join(f'{key} = "{path}"\n' for key, path in {**named, **others}.items())
        toml(tmp_path, f'host_bytes = "1GiB"\nlisten_tcp = "0.0.0.0:7000"\n{keys}')
        return kvtierd("--config", str(file), "--check-config")

    assert check().status == 0
    wrong = check(tls_key=missing, tls_client_ca=empty)
    assert wrong.status == 2
    key, authority = wrong.err.splitlines()
    assert key == f"kvtierd: {file}:4: tls_key = {missing}: cannot be read: No such file or directory"
    assert authority.startswith(f"kvtierd: {file}:5: tls_client_ca = {empty}: holds no certificate")
    assert f"{file}:3: tls_cert = {missing}: cannot be read" in check(tls_cert=missing).err
    for paths in ({"tls_cert": empty}, {"tls_key": foreign.key}):
        wanted = f"{file}:3: tls_cert = {paths.get('tls_cert', served.cert)}: is no certificate that fits tls_key"
        assert wanted in check(**paths).err


def test_flags_are_explained(kvtierd: Run) -> None:
    out = kvtierd("--help").out
    assert out == kvtierd("-h").out
    titles = [out.index(f"\n{title}:\n") for title in ("Options", *SECTIONS.values())]
    assert titles == sorted(titles)
    assert titles[0] < out.index("--check-config") < titles[1] < out.index("--runtime-dir PATH") < titles[2]
    assert out.index("\nTiers:\n") < out.index("--host-bytes SIZE") < out.index("\nClients:\n")
    assert "--no-debug-checks" in out


def test_the_version_is_told(kvtierd: Run) -> None:
    assert kvtierd("--version").out.startswith("kvtierd, version ")


def test_every_title_of_the_help_stands_over_a_key() -> None:
    assert set(SECTIONS) <= set(Config.model_fields)
