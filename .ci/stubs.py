"""Generates client/kvtier/v1 from proto/ with the pinned tools of .venv-stubs, or checks that it is current.

The tools are old on purpose: stubs run on the grpcio and protobuf they were generated for and on newer ones, never on
older ones, so the oldest tools give the widest range of supported versions.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("kvtier/v1")
COMMITTED = ROOT / "client" / PACKAGE
TOOLS = ROOT / ".venv-stubs" / "bin"


def generate(into: Path) -> dict[str, bytes]:
    """Runs protoc with its output in `into`; returns file name -> content."""
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugins = [f"--plugin={name}={TOOLS / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))
    command = [str(TOOLS / "python"), "-m", "grpc_tools.protoc", f"-I{PROTO}", *plugins, *outputs, *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return _read(into / PACKAGE)


def _read(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*_pb2*.py*") if path.is_file()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the committed stubs are not current"
    )
    check = parser.parse_args(arguments).check

    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
    present = _read(COMMITTED)
    stale = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    for name in stale:
        if check:
            print(
                f"generated stubs: {COMMITTED.relative_to(ROOT) / name} is not current (run `make stubs`)",
                file=sys.stderr,
            )
        elif name in fresh:
            (COMMITTED / name).write_bytes(fresh[name])
        else:
            (COMMITTED / name).unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
