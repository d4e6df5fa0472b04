"""What the documentation tells a reader to type does what it says.

A fenced block's second word says how it is held to that: ``runnable`` ones are run as they stand, ``check-config`` ones
go through ``kvtierd --check-config``, ``engines`` ones are run in tests/engines, and what takes another machine
(``by-hand``) at least names what there is. README's are all run, in its order, in test_readme.
"""

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch

from kvtier import Client, Tier
from kvtier.cli import main
from kvtier.replay.trace import key_of, read
from kvtierd.main import main as daemon_main
from kvtierd.simulate.fleet import FleetShape, simulate
from tests.connectors import tiny
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.test_cli import DEADLINE_S
from tests.tls import Authority

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/operations.md",
    "docs/containers.md",
    "docs/retention.md",
    "docs/security.md",
    "docs/events.md",
    "docs/gpu.md",
    "docs/engines.md",
    "docs/fleet.md",
    "docs/remote.md",
)
HOW = {"runnable", "check-config", "by-hand", "engines"}

_FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
daemon = own_daemon("--device", "stand-in=64MiB", "--host-bytes", "64MiB", "--disk-bytes", "64MiB")


@dataclass(frozen=True)
class Block:
    """A fenced one. ``how``: empty where the page does not say."""

    page: str
    language: str
    how: str
    text: str

    @property
    def commands(self):
        """Of a shell block: words of every command, those of a pipeline apart."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            words
            for line in lines
            for part in re.split(r"\||&&", line.partition(" #")[0])
            if (words := shlex.split(part, comments=True))
        ]


BLOCKS = [
    Block(page, language, how, text)
    for page in PAGES
    for language, how, text in _FENCE.findall((ROOT / page).read_text())
]


def of(how, language):
    return [block for block in BLOCKS if (block.how, block.language) == (how, language)]


def test_every_block_that_a_reader_could_type_says_how_it_is_checked():
    typed = [block for block in BLOCKS if block.language in ("sh", "python", "toml")]
    assert [block for block in typed if block.how not in HOW] == []
    ran = {(block.page, block.language) for block in typed if block.how != "by-hand"}
    assert ran == {
        ("README.md", "sh"),
        ("README.md", "python"),
        ("docs/operations.md", "sh"),
        ("docs/operations.md", "toml"),
        ("docs/retention.md", "python"),
        ("docs/remote.md", "toml"),
        ("docs/security.md", "sh"),
        ("docs/security.md", "toml"),
        ("docs/events.md", "python"),
        ("docs/gpu.md", "sh"),
        ("docs/engines.md", "python"),
        ("docs/engines.md", "sh"),
    }


def test_the_site_has_every_page():
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())) - {"index.md"}  # README
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_each_promise_of_the_readme_names_a_test_that_is_there():
    promises = re.findall(r"^- \*\*(.+?)\*\*", (ROOT / "README.md").read_text(), re.MULTILINE)
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| promise |")[2]
    rows = dict(re.findall(r"^\| (.+?) \| (`.+`) \|$", table, re.MULTILINE))
    assert [promise.rstrip(".") for promise in promises] == list(rows)
    for named in re.findall(r"`(.+?)`", " ".join(rows.values())):
        file, _, test = named.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/engines.md"])
def test_figures_of_a_page_are_those_of_the_benchmarks(page):
    """Each paragraph that links to a section has no number that the section has not."""
    paragraphs = [part for part in (ROOT / page).read_text().split("\n\n") if "benchmarks.md#" in part]
    assert paragraphs
    for paragraph in paragraphs:
        anchor = re.findall(r"benchmarks\.md#([a-z-]+)", paragraph)
        sections = " ".join(_section(each.replace("-", " ")) for each in anchor)
        quoted = re.findall(r"\d[\d,.]*\d|\d", re.sub(r"\(docs.+?\)", "", paragraph))
        assert quoted and not [figure for figure in quoted if figure not in re.findall(r"\d[\d,.]*\d|\d", sections)]


def _section(title):
    """Of benchmarks.md, whatever the case of its title."""
    parts = re.split(r"^## (.+)$", (ROOT / "docs/benchmarks.md").read_text(), flags=re.MULTILINE)
    return {name.lower(): body for name, body in zip(parts[1::2], parts[2::2], strict=True)}[title.lower()]


def test_links_to_a_section_find_it():
    """As ``make docs`` checks, which is not run by default."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = {
        ((page.parent / file).resolve() if file else page, section)
        for page in pages
        for file, section in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text())
    }
    titles = {page: re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) for page in pages}
    there = {
        (page, re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")) for page in pages for title in titles[page]
    }
    assert len(links) > 3
    assert links - there == set()


@pytest.fixture
def environment(daemon, tmp_path):
    return commands_in(tmp_path, daemon.address)


def commands_in(directory, address):
    """An environment where ``kvtier`` and ``kvtierd`` are of this tree, and find the daemon at the address."""
    for name, module in (("kvtier", "kvtier.cli"), ("kvtierd", "kvtierd.main")):
        script = directory / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "KVTIER_ADDRESS": address}


def run(command, environment, directory):
    """In a group of its own, so that nothing of a block that hangs goes on after it."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=directory,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=2 * DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, f"{command[-1]}\nexit status {process.returncode}\n{said}\n{errors}"
    return said


def run_page(page, environment, directory):
    """Its Python, block after block as a reader goes on, then its commands."""
    python = "\n".join(block.text for block in of("runnable", "python") if block.page == page)
    said = run([sys.executable, "-c", python], environment, directory) if python else ""
    for block in of("runnable", "sh"):
        if block.page == page:
            said += run(["sh", "-euxc", block.text], environment, directory)
    return said


def test_an_operator_s_look_around(daemon, environment, tmp_path):
    keys = chain("docs", 3)
    with Client(daemon.address) as client:
        cache = client.open_cache("llama", SPEC, budgets=sizes(device=4, host=4, disk=4))
        cache.put(keys, blocks(keys), tier=Tier.HOST)
        cache.close()
        run_page("docs/operations.md", environment, tmp_path)
        assert client.open_cache("llama").match(keys).blocks == 3, "a dry run changed something"


def test_what_a_request_says_of_its_blocks(environment, tmp_path):
    """The page asserts what comes of it."""
    run_page("docs/retention.md", environment, tmp_path)


def test_a_router_s_first_steps(environment, tmp_path):
    said = run_page("docs/events.md", environment, tmp_path)
    assert "0 blocks are stored" in said
    assert "exact at" in said


def test_transformers_computes_a_prompt_once(environment, tmp_path):
    tiny.save(tmp_path / "my-model")
    said = run_page("docs/engines.md", environment, tmp_path)
    assert said == "0 tokens loaded, 32 stored\n32 tokens loaded, 48 stored\n"


async def test_the_example_for_a_gpu(daemon, monkeypatch, capsys):
    """It says so where there is none; what it would do there, it does on the stand-in."""
    if not torch.cuda.is_available():
        runpy.run_path(str(ROOT / "examples/gpu_slots.py"), run_name="__main__")
        assert "no GPU" in capsys.readouterr().out
        monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    await runpy.run_path(str(ROOT / "examples/gpu_slots.py"))["main"](daemon.address)
    assert capsys.readouterr().out == "[0.0, 1.0, 2.0, 3.0]\n"


async def test_the_example_of_a_router(capsys):
    """It finds more than round-robin, which finds what the simulation says."""
    example = runpy.run_path(str(ROOT / "examples/router.py"))
    await example["main"]()
    hits = [int(count) for count in re.findall(r"(\d+) of \d+ blocks", capsys.readouterr().out)]
    chains = [[key_of(block) for block in request.ids] for request in await read(example["TRACE"], example["REQUESTS"])]
    fleet = FleetShape(3, {Tier.HOST: example["HOST_BLOCKS"]}, "round-robin")
    assert hits[0] == pytest.approx(simulate(fleet, chains).local, rel=0.05)
    assert hits[1] > 1.4 * hits[0]


@pytest.mark.parametrize(
    "block", [*of("check-config", "sh"), *of("check-config", "toml")], ids=lambda block: block.page
)
def test_configurations_are_accepted(block, environment, tmp_path):
    Authority(tmp_path).issue("host.example", common_name="host")
    (tmp_path / "kvtierd.toml").write_text(block.text.replace("/etc/kvtier/", f"{tmp_path}/"))
    told = [words[1:] for words in block.commands if words[0] == "kvtierd"] if block.language == "sh" else []
    flags = told or [["--config", str(tmp_path / "kvtierd.toml"), "--host-bytes", "1MiB"]]
    for each in flags:
        assert "right" in run(["kvtierd", *each, "--check-config"], environment, tmp_path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_serve_a_daemon_and_its_client(start_fresh, environment, tmp_path):
    (block,) = (block for block in of("runnable", "sh") if block.page == "docs/security.md")
    run(["sh", "-euc", block.text.replace("kv-1.example", "localhost")], environment, tmp_path)
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "host.pem", "host.key"))
    tls = ("--tls-cert", cert, "--tls-key", key)
    rule = '{"subjects": ["localhost"], "caches": ["*"], "verbs": ["admin"]}'
    served = start_fresh("--listen-tcp", "localhost:0", *tls, "--tls-client-ca", ca, "--allow", rule, host=1)
    at = f"tcp://localhost:{served.tcp_address.rpartition(':')[2]}"
    assert "healthy" in run(["kvtier", "status", "--address", at, "--tls-ca", ca, *tls], environment, tmp_path)


def spoken(words):
    """What of a command line there is not: verbs and options."""
    command: click.Command = {"kvtier": main, "kvtierd": daemon_main}[words[0]]
    options = set()
    for word in words[1:]:
        if isinstance(command, click.Group):
            options |= {option for parameter in command.params for option in parameter.opts}
            found = command.get_command(click.Context(command), word)
            if found is None and not word.startswith("-"):
                yield word
                return
            command = found or command
        elif word.startswith("--"):
            known = options | {option for parameter in command.params for option in parameter.opts}
            if word.partition("=")[0] not in known:
                yield word


def test_what_takes_another_machine_names_what_there_is():
    commands = [words for block in of("by-hand", "sh") for words in block.commands if words[0] in ("kvtier", "kvtierd")]
    assert len(commands) >= 3
    assert {tuple(words): missing for words in commands if (missing := list(spoken(words)))} == {}
    assert list(spoken(["kvtier", "mvoe", "llama"])) == ["mvoe"]
    assert list(spoken(["kvtier", "move", "llama", "disk", "--al"])) == ["--al"]
