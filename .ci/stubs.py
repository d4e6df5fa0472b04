"""Generates client/kvtier/v1 from proto/ with the pinned tools of .venv-stubs; ``--check``: fails if it is not current.

The tools are old on purpose: stubs run on the grpcio and protobuf they were generated for and on newer ones, never on
older ones, so the oldest tools give the widest range of supported versions.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("kvtier/v1")
COMMITTED = ROOT / "client" / PACKAGE
TOOLS = ROOT / ".venv-stubs" / "bin"


def generated() -> dict[str, bytes]:
    """Runs protoc. Returns the content by file name."""
    plugins = [f"--plugin={name}={TOOLS / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        command = [str(TOOLS / "python"), "-m", "grpc_tools.protoc", f"-I{PROTO}", *plugins, *outputs, *sources]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return read(Path(scratch) / PACKAGE)


def read(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*_pb2*.py*") if path.is_file()}


def main(*, check: bool) -> int:
    fresh, present = generated(), read(COMMITTED)
    stale = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    for name in stale:
        path = COMMITTED / name
        if check:
            print(f"generated stubs: {path.relative_to(ROOT)} is not current (run `make stubs`)", file=sys.stderr)
        elif name in fresh:
            path.write_bytes(fresh[name])
        else:
            path.unlink()
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
