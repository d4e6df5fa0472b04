"""The Debian package, built and installed in a clean Debian 12."""

import gzip
import os
import shutil
import subprocess

import debian
import pytest

from tests.integration.waiting import PATIENCE_S
from tests.packages.source import copied_to

TOOLS = {"mmdebstrap": "mmdebstrap", "dpkg-deb": "dpkg"}
BUILD_S = 1200.0

pytestmark = [pytest.mark.long, pytest.mark.limit(2 * BUILD_S)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The root file system with the package in it."""
    if why := debian.reason_to_skip(TOOLS):
        pytest.skip(why)
    work = tmp_path_factory.mktemp("deb")
    tree = copied_to(work / "tree")
    subprocess.run(["deploy/deb.sh"], cwd=tree, check=True, timeout=BUILD_S)
    (package,) = (tree / "dist").glob("kvtier_*.deb")
    root = work / "root"
    debian.make_root(root, "python3", "systemd")
    shutil.copy(package, root / "kvtier.deb")
    within(root, "dpkg", "-i", "/kvtier.deb")
    yield root
    shutil.rmtree(work)


def within(root, *command):
    """What it prints, as root there, in a pid namespace that ends with it."""
    unshare = ["unshare", "-m", "-p", "-f", "--kill-child", f"--mount-proc={root}/proc"]
    ended = subprocess.run(
        [*unshare, "chroot", str(root), "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 4,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_installation_made_the_user_and_kept_the_configuration_to_it(installed):
    (entry,) = [line for line in (installed / "etc/passwd").read_text().splitlines() if line.startswith("kvtier:")]
    gid = int(entry.split(":")[3])
    for path, mode in (("etc/kvtier", 0o750), ("etc/kvtier/kvtierd.toml", 0o640)):
        status = (installed / path).stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (0, gid, mode)


def test_the_unit_starts_what_is_there(installed):
    within(installed, "systemctl", "enable", "kvtierd")
    assert os.path.lexists(installed / "etc/systemd/system/multi-user.target.wants/kvtierd.service")
    within(installed, "kvtierd", "--config", "/etc/kvtier/kvtierd.toml", "--check-config")
    unit = (installed / "usr/lib/systemd/system/kvtierd.service").read_text()
    assert "ExecStart=/usr/bin/kvtierd --config /etc/kvtier/kvtierd.toml" in unit
    assert (installed / "usr/share/doc/kvtier/operations.md").is_file()


def test_a_daemon_serves_as_the_user(installed):
    """Its own user asks it, so that no rule is needed."""
    script = """
    install -d -o kvtier -g kvtier /run/kvtier /var/lib/kvtier
    as="setpriv --reuid=kvtier --regid=kvtier --clear-groups"
    mkfifo -m 666 /run/said
    $as kvtierd --host-bytes 64MiB --disk-bytes 64MiB > /run/said &
    daemon=$!
    read -r line < /run/said
    echo "$line"
    $as kvtier status
    kill $daemon
    wait $daemon
    """
    (installed / "dev/shm").mkdir(exist_ok=True)
    said = within(installed, "sh", "-euc", script)
    assert said.startswith("kvtierd ready pid=") and "healthy" in said


def test_every_command_has_a_manual_page_and_completions(installed):
    pages = {path.name: gzip.decompress(path.read_bytes()).decode() for path in installed.glob("usr/share/man/man?/*")}
    assert {"kvtier.1.gz", "kvtierd.8.gz", "kvtier-status.1.gz", "kvtier-cache-ls.1.gz"} <= pages.keys()
    for text in pages.values():
        name = text.split(".SH NAME\n")[1].splitlines()[0]
        assert not name.endswith("..."), name
    assert pages["kvtierd.8.gz"].startswith('.TH "KVTIERD" "8"')
    for name in ("bash-completion/completions/kvtier", "zsh/vendor-completions/_kvtier"):
        assert "_KVTIER_COMPLETE" in (installed / "usr/share" / name).read_text()


def test_install_service_makes_a_unit_of_the_environment(installed):
    """As after `pip install` into /opt/kvtier: it takes the files that the wheel has brought there."""
    said = within(installed, "/opt/kvtier/bin/kvtier", "install-service", "--yes")
    assert "unchanged /etc/kvtier/kvtierd.toml" in said
    unit = installed / "etc/systemd/system/kvtierd.service"
    assert "ExecStart=/opt/kvtier/bin/kvtierd --config /etc/kvtier/kvtierd.toml" in unit.read_text()
    assert "Documentation=file:///opt/kvtier/share/doc/kvtier/operations.md" in unit.read_text()


def test_a_removal_leaves_only_the_configuration(installed):
    within(installed, "dpkg", "-r", "kvtier")
    assert not os.path.lexists(installed / "usr/bin/kvtierd")
    assert not (installed / "opt/kvtier/bin").exists()
    assert (installed / "etc/kvtier/kvtierd.toml").exists()
