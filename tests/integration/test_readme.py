"""README from top to bottom, as a reader types it: its own line starts the daemon, and each command shows something."""

import re
import subprocess
import sys
from contextlib import ExitStack
from typing import Final

import pytest

from tests.integration.terminal import terminal
from tests.integration.test_cli import DEADLINE_S
from tests.integration.test_docs import BLOCKS, ROOT, commands_in, of, run
from tests.packages.source import copied_to

FOLLOWERS: Final = {"top": ("--once", "healthy", 0), "watch": ("--limit 2", "stored", 130)}
"""By verb: the option that ends it, what it draws without that, and its exit status after Ctrl-C."""
ENGINES: Final = [block.text for block in of("engines", "sh") if block.page == "docs/engines.md"]


class Reader:
    """Types commands. ``shown``: by command, what it wrote."""

    def __init__(self, directory, short_dir, ending):
        self.address = str(short_dir / "run")
        self.shown = {}
        self._state, self._tree = str(short_dir / "state"), directory / "tree"
        self._environment = commands_in(directory, self.address)
        self._ending = ending

    def type(self, words):
        special = {"make": self._make, "pip": self._pip, "kvtierd": self._kvtierd, "python": self._engine}
        self.shown[" ".join(words)] = special.get(words[0], self._run)(words)

    def python(self, *scripts):
        self.shown[scripts[-1]] = self._run([sys.executable, "-c", "\n".join(scripts)])

    def _run(self, words):
        return run(words, self._environment, ROOT)

    def _make(self, words):
        """What it would do; the demonstration is short enough to be run."""
        planned = self._run(["make", "--dry-run", *words[1:]])
        if words == ["make", "demo"]:
            (script,) = re.findall(r"python (examples/\w+\.py)$", planned, re.MULTILINE)
            return self._run([sys.executable, script])
        return planned

    def _engine(self, words):
        """Runs in tests/engines, as the page of the engines has it."""
        assert f"{' '.join(words)}\n" in "".join(ENGINES)
        return "as in docs/engines.md"

    def _pip(self, words):
        """All but the copying: packages are there already."""
        flags = ("--dry-run", "--no-index", "--no-build-isolation")
        return run([sys.executable, "-m", *words, *flags], self._environment, copied_to(self._tree))

    def _kvtierd(self, words):
        """In directories of the test's, and small; it runs until the end."""
        line = re.sub(r"\d+GiB", "128MiB", " ".join(words))
        command = [*line.split(), "--runtime-dir", self.address, "--state-dir", self._state]
        daemon = self._ending.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, env=self._environment, text=True)
        )
        self._ending.callback(self._stop, daemon)
        return daemon.stdout.readline()

    def _stop(self, daemon):
        daemon.terminate()
        try:
            assert daemon.wait(DEADLINE_S) == 0
        finally:
            daemon.kill()


@pytest.fixture
def reader(tmp_path, short_dir):
    with ExitStack() as stack:
        yield Reader(tmp_path, short_dir, stack)


@pytest.mark.limit(180)
def test_every_command_of_the_readme_in_its_order(reader):
    scripts, verbs = [], set()
    for block in (block for block in BLOCKS if block.page == "README.md"):
        if block.how == "engines":
            assert block.text in ENGINES
            continue
        if block.language == "python":
            scripts.append(block.text)
            reader.python(*scripts)
        for words in block.commands if block.language == "sh" else ():
            reader.type(words)
            verbs.add(words[1])
    assert [command for command, said in reader.shown.items() if not said.strip()] == []
    assert verbs >= {"demo", "test", "install", "replay", "status", "top", "watch", "leases", "cache", "move", "doctor"}
    said = "".join(reader.shown.values())
    for each in ("kept  ", "kvtierd ready", "4 blocks are stored", "4 blocks are still stored", "move 4 blocks: 4 ok"):
        assert each in said, said
    for verb, (option, drawn, status) in FOLLOWERS.items():
        (command,) = [command for command in reader.shown if command.startswith(f"kvtier {verb} ")]
        assert option in command
        with terminal(*command.replace(option, "").split()[1:], "--address", reader.address) as screen:
            screen.until(drawn)
            screen.type(b"\x03")
            assert screen.ended() == status
