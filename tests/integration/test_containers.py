"""docs/containers.md, row by row: daemons and engines in namespaces of their own, as container runtimes make them.

The engine is the program of the pod in deploy/kubernetes/engine.yaml, as an ordinary user with one supplemental group.
"""

import os
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from kvtier import Client
from tests.integration.blocks import sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "containers.md").read_text()
DAEMON_ID, ENGINE_ID = 6464, 1000
RULES = f"""
[[allow]]
gids = [{DAEMON_ID}]
caches = ["*"]
verbs = ["read", "write"]

[[allow]]
anonymous = true
caches = ["*"]
verbs = ["read", "write"]
"""
NEEDED = [Path(path) for path in sorted({sys.base_prefix, sys.prefix, str(ROOT)})]


def unlocked():
    """A script that runs a command where anybody can read the Python that runs this, even where it lies in root's
    home, or in another directory that is closed to others."""
    closed = {
        path: next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & stat.S_IXOTH), None)
        for path in NEEDED
    }
    lines = ["mount -t tmpfs tmpfs /mnt"]
    for door in sorted({shlex.quote(str(parent)) for parent in closed.values() if parent is not None}):
        lines += [f"mkdir -p /mnt{door}", f"mount --bind {door} /mnt{door}", f"mount -t tmpfs -o mode=755 tmpfs {door}"]
    for place in [shlex.quote(str(path)) for path in NEEDED if closed[path] is not None]:
        lines += [f"mkdir -p {place}", f"mount --bind /mnt{place} {place}"]
    return "\n".join([*lines, 'exec "$@"'])


OTHERS = ("-m", "-n", "-i", "-u")
"""All namespaces but those of pids and users."""
OWN_PIDS = ("-p", "-f", "--mount-proc", "--kill-child")
POD = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "engine.yaml").read_text())
PROGRAM = POD["spec"]["containers"][0]["command"][2]
OVER_TCP = PROGRAM.replace("kvtier.Client()", "kvtier.Client(insecure=True)")
MAPPED, STREAMED = "mapped=True found=1", "mapped=False found=1"
INVISIBLE, NO_SOCKET = "hostPID: true", "the daemon's group"
NO_RIGHT = "no [[allow]] rule of the daemon names uid 65534"

pytestmark = pytest.mark.skipif(
    os.getuid() != 0
    or shutil.which("setpriv") is None
    or subprocess.run(["unshare", "-pf", "-U", "-m", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs root and namespaces",
)


@dataclass(frozen=True)
class Row:
    """``daemon``, ``engine``: as the page puts them; below, what unshare(1) gives each.

    ``says``: the end of what the engine prints.
    """

    daemon: str
    engine: str
    outcome: str
    says: str
    daemon_in: tuple[str, ...] = ()
    engine_in: tuple[str, ...] = ()
    groups: tuple[int, ...] = (DAEMON_ID,)
    tcp: bool = False


ROWS = [
    Row("host", "container", "mapped memory", MAPPED, (), (*OTHERS, *OWN_PIDS)),
    Row("host", "container with a user namespace", "mapped memory", MAPPED, (), ("-U", "-r", *OTHERS, *OWN_PIDS)),
    Row("container, `hostPID`", "host", "mapped memory", MAPPED, OTHERS),
    Row("container, `hostPID`", "container", "mapped memory", MAPPED, OTHERS, (*OTHERS, *OWN_PIDS)),
    Row("container, `hostPID`", "container without the group", "refused at the socket", NO_SOCKET, OTHERS, OTHERS, ()),
    Row("container", "host or another container", "refused", INVISIBLE, (*OTHERS, *OWN_PIDS), OTHERS),
    Row("container", "anywhere, over TCP", "streams", STREAMED, (*OWN_PIDS, "-m"), OTHERS[:1], (), tcp=True),
    Row("container with a user namespace", "host", "refused", NO_RIGHT, ("-U", "-r", *OTHERS)),
]


def as_user(number, groups, namespaces, command):
    """The command, and all before it that the kernel is asked for."""
    listed = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    user = ["setpriv", "--pdeathsig=keep", f"--reuid={number}", f"--regid={number}", listed]
    unshare = ["unshare", *namespaces] if namespaces else []
    # Only a user namespace can be entered by an ordinary user: the others come before the change of user.
    inside = [*user, *unshare, *command] if "-U" in namespaces else [*unshare, *user, *command]
    return ["unshare", "-m", "sh", "-ec", unlocked(), "sh", *inside]


def engine(row, address):
    program = OVER_TCP if row.tcp else PROGRAM
    return subprocess.run(
        as_user(ENGINE_ID, row.groups, row.engine_in, [sys.executable, "-c", program]),
        env=os.environ | {"KVTIER_ADDRESS": address, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture
def started(short_dir):
    """Starts a daemon as its own user in the row's namespaces."""
    daemon = DaemonProcess(short_dir, sizes(host=1024, disk=64))

    def start(row):
        short_dir.chmod(0o755)
        (short_dir / "rules.toml").write_text(RULES)
        for name in ("run", "state", "disk"):
            (short_dir / name).mkdir(mode=0o750)
            os.chown(short_dir / name, DAEMON_ID, DAEMON_ID)
        daemon.flags = ["--config", str(short_dir / "rules.toml")]
        daemon.flags += ["--listen-tcp", "127.0.0.1:0", "--tcp-insecure"] if row.tcp else []
        daemon.within = as_user(DAEMON_ID, (), row.daemon_in, [])
        daemon.number = 1 if "-p" in row.daemon_in else None
        daemon.variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        daemon.start()
        return daemon

    yield start
    if daemon.running:
        daemon.kill()


def params():
    """Two rows are tried in every run: mapped memory beside ``hostPID``, and what happens without."""
    for row in ROWS:
        quick = row.daemon.startswith("container") and row.engine in ("container", "host or another container")
        yield pytest.param(row, id=f"{row.daemon}-{row.engine}", marks=[] if quick else pytest.mark.long)


@pytest.mark.parametrize("row", list(params()))
def test_a_row_of_the_table(started, row):
    daemon = started(row)
    ended = engine(row, f"tcp://{daemon.tcp_address}" if row.tcp else daemon.address)
    assert row.says in (ended.stdout + ended.stderr).splitlines()[-1], ended
    assert f"| {row.daemon} | {row.engine} | {row.outcome} |" in PAGE


def test_the_page_has_no_row_that_was_not_tried():
    table = PAGE.partition("| daemon | engine |")[2].partition("\n\n")[0]
    assert len(table.splitlines()) - 2 == len(ROWS)


@pytest.mark.long
def test_an_engine_may_have_the_sockets_read_only(started):
    daemon = started(ROWS[0])
    read_only = f"mount --bind {daemon.address} {daemon.address} && mount -o remount,ro,bind {daemon.address}"
    command = ["unshare", "-m", "sh", "-ec", f'{read_only}; ! touch {daemon.address}/x 2>/dev/null; exec "$@"', "sh"]
    ended = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM],
        env=os.environ | {"KVTIER_ADDRESS": daemon.address, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.stdout == f"{MAPPED}\n", ended.stderr


@pytest.mark.long
def test_a_directory_that_was_mounted_before_a_restart_leads_to_the_new_daemon(started):
    daemon = started(ROWS[0])
    here = os.open(daemon.address, os.O_PATH)
    daemon.restart()
    with Client(f"/proc/{os.getpid()}/fd/{here}") as client:
        assert client.stats().epoch == 1
    os.close(here)
