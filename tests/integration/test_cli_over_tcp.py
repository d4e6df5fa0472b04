"""The commands against a daemon behind TLS: the files by option or environment, and what is refused."""

import json
import os

import click
import pytest

from kvtier import Tier
from kvtier.cli import main
from tests.integration.blocks import blocks, chain, opened_cache, sizes
from tests.integration.test_cli import kvtier
from tests.tls import Authority

RULES = """
[[allow]]
subjects = ["operator"]
caches = ["*"]
verbs = ["read", "write", "watch", "admin"]
"""
KEYS = chain("over-tcp", 2)


@pytest.fixture
def operator(authority):
    return authority.issue("operator.example", common_name="operator")


@pytest.fixture
def daemon(start_daemon, authority, short_dir):
    served = authority.issue("127.0.0.1", common_name="daemon")
    (short_dir / "kvtierd.toml").write_text(RULES)
    return start_daemon(
        *("--config", str(short_dir / "kvtierd.toml"), "--listen-tcp", "127.0.0.1:0"),
        *("--tls-cert", str(served.cert), "--tls-key", str(served.key), "--tls-client-ca", str(served.ca)),
        host=8,
        disk=8,
    )


@pytest.fixture
def plain():
    """An environment that names no daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}


async def test_the_verbs_work_over_tls_with_options_and_with_the_environment(daemon, operator, plain):
    async with opened_cache(daemon.address, "far", budgets=sizes(host=4, disk=4)) as (_, cache):
        await cache.put(KEYS, blocks(KEYS), tier=Tier.HOST)
        tls = ("--tls-ca", str(operator.ca), "--tls-cert", str(operator.cert), "--tls-key", str(operator.key))
        at = ("--address", f"tcp://{daemon.tcp_address}", *tls)
        shown = json.loads(kvtier("status", "-o", "json", *at, env=plain).stdout)
        assert shown["pid"] == daemon.pid
        variables = {
            "KVTIER_ADDRESS": daemon.tcp_address,
            "KVTIER_TLS_CA": str(operator.ca),
            "KVTIER_TLS_CERT": str(operator.cert),
            "KVTIER_TLS_KEY": str(operator.key),
        }
        env = {**plain, **variables}
        assert json.loads(kvtier("move", "far", "disk", "--all", "-o", "json", env=env).stdout)["done"] == 2
        assert [place.residency for place in await cache.locate(KEYS)] == [Tier.DISK.bit] * 2
        said = kvtier("watch", "--oldest", "-o", "json", "--limit", "1", env=env).stdout
        assert json.loads(said.splitlines()[0])["cache"] == "far"
        # The environment's files are for its own daemon: another one is named with what it takes.
        assert (
            json.loads(kvtier("status", "-o", "json", "--address", daemon.address, env=env).stdout)["pid"] == daemon.pid
        )


def test_what_is_missing_or_makes_no_sense_is_named(daemon, operator, plain):
    at = ("--address", daemon.tcp_address)
    said = kvtier("status", *at, "--tls-ca", str(operator.ca), env=plain, status=2).stderr
    assert "TLS takes three files: --tls-cert, --tls-key missing" in said
    none = kvtier("leases", *at, env=plain, status=2).stderr
    assert "TLS takes three files: --tls-ca, --tls-cert, --tls-key missing; or --insecure" in none
    both = kvtier("leases", *at, "--insecure", env={**plain, "KVTIER_TLS_KEY": "k"}, status=2).stderr
    assert "--insecure is without TLS: take it away, or --tls-key" in both
    gone = ("--tls-ca", "/nowhere/ca.pem", "--tls-cert", str(operator.cert), "--tls-key", str(operator.key))
    assert "/nowhere/ca.pem" in kvtier("leases", *at, *gone, env=plain, status=1).stderr
    local = kvtier("status", "--address", daemon.address, "--insecure", env=plain, status=2).stderr
    assert f"{daemon.address} is a runtime directory" in local
    kvtier("status", "--address", daemon.address, env={**plain, "KVTIER_TLS_CA": "of another daemon's"})


def test_files_of_no_use_are_named_and_nothing_else_is_said(daemon, authority, operator, plain):
    """Not a word of gRPC's own, here or in the daemon's log, of which each line is a record."""
    another = authority.issue("another.example", common_name="another")
    (strange_directory := authority.ca.parent / "strange").mkdir()
    strange = Authority(strange_directory).issue("operator.example", common_name="operator")

    def said(ca, cert, key):
        tls = ("--tls-ca", str(ca), "--tls-cert", str(cert), "--tls-key", str(key))
        return kvtier("status", "--address", daemon.tcp_address, *tls, env=plain, status=1).stderr

    refused = {
        f": must be a certificate, PEM, with its key in {another.key}: ": said(operator.ca, operator.cert, another.key),
        ": must be certificates of authorities, PEM: ": said(operator.key, operator.cert, operator.key),
        f"; a daemon that does not accept {strange.cert} hangs up in the same way\n": said(
            operator.ca, strange.cert, strange.key
        ),
        "CERTIFICATE_VERIFY_FAILED": said(strange.ca, operator.cert, operator.key),
    }
    for words, line in refused.items():
        assert words in line and line.startswith("Error: ") and line.count("\n") == 1, line
    daemon.stop()
    assert [line for line in daemon.log.splitlines() if not line.startswith("time=")] == []


def commands(group, path=""):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_command_that_asks_a_daemon_takes_the_files():
    """But those about this machine: what they measure or look at is not at the other end of a network."""
    local = {name for name, _ in commands(main) if name.startswith(("bench ", "simulate "))} | {
        "doctor",
        "install-service",
    }
    wanted = {"address", "tls_ca", "tls_cert", "tls_key", "insecure"}
    lacking = {
        name
        for name, command in commands(main)
        if name not in local and not wanted <= {option.name for option in command.params}
    }
    assert lacking == set()
