"""Fills .whl/ with the wheels that a host with a GPU lacks to run `make gpu-test` without a network, and checks them.

Such a host has Python 3.12 and a torch for its driver, which brings numpy and cuda-bindings: those stay the host's.
Everything else is carried, also where a host may have it, in the versions of constraints-dev.txt: what runs there is
what runs here.
"""

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parent.parent
WHEELS: Final = ROOT / ".whl"
PYTHON: Final = (3, 12)
PLATFORMS: Final = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 16, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)
"""Of glibc 2.28 and older."""
HOSTS: Final = frozenset({"torch", "numpy"})
"""What is the host's own."""
TOOLS: Final = ("hypothesis", "pytest", "pytest-asyncio")
LIMIT_BYTES: Final = 64 << 20
"""Of the wheels and the tracked files together: what travels to a host that is lent for minutes."""


def wanted() -> list[str]:
    """Requirements of the client, the daemon and the tests, without what is the host's own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tools = [each for each in extras["dev"] if canonicalize_name(Requirement(each).name) in TOOLS]
    every = [*project["dependencies"], *extras["daemon"], *tools]
    return [each for each in every if canonicalize_name(Requirement(each).name) not in HOSTS]


def download(into: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={PYTHON[0]}.{PYTHON[1]}", *(f"--platform={each}" for each in PLATFORMS)]
    command += ["-c", str(ROOT / "constraints-dev.txt"), "-d", str(into), *wanted()]
    if subprocess.run(command, check=False).returncode:
        sys.exit("gpu-wheels: pip could not download them; .whl is as it was")


def faults(wheels: Sequence[Path], roots: Iterable[str]) -> Iterator[str]:
    """What would fail at an installation of all of them: a wheel for another Python or platform, two of one package, a
    requirement that nothing meets."""
    supported = frozenset([*cpython_tags(PYTHON, platforms=PLATFORMS), *_pure()])
    versions: dict[str, Version] = {}
    for wheel in wheels:
        name, version, _, tags = parse_wheel_filename(wheel.name)
        if not tags & supported:
            yield f"{wheel.name}: not for Python {PYTHON[0]}.{PYTHON[1]} on {PLATFORMS[0]}"
        if name in versions:
            yield f"{name}: two versions, {versions[name]} and {version}"
        versions[name] = version
    for source, line in [("kvtier", root) for root in roots] + list(_requirements(wheels)):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name in HOSTS or not _applies(requirement):
            continue
        if name not in versions:
            yield f"{source} wants {line}, which nothing here is"
        elif not requirement.specifier.contains(versions[name], prereleases=True):
            yield f"{source} wants {line}, and {versions[name]} is here"


def _pure() -> Iterator[Tag]:
    return compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", PLATFORMS)


def _requirements(wheels: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for wheel in wheels:
        for line in _metadata(wheel).get_all("Requires-Dist", []):
            yield wheel.name, line


def _metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA") and each.count("/") == 1]
        return HeaderParser().parsestr(archive.read(name).decode())


def _applies(requirement: Requirement) -> bool:
    version = f"{PYTHON[0]}.{PYTHON[1]}"
    environment = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
    environment |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    environment |= {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux"}
    environment |= {"platform_machine": "x86_64"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def tracked_bytes() -> int:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sum(path.stat().st_size for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def main() -> int:
    with tempfile.TemporaryDirectory(prefix=".whl-", dir=ROOT) as directory:
        download(Path(directory))
        wheels = sorted(Path(directory).glob("*.whl"))
        wrong = list(faults(wheels, wanted()))
        carried = sum(wheel.stat().st_size for wheel in wheels)
        if carried + (tracked := tracked_bytes()) > LIMIT_BYTES:
            wrong.append(f"{carried} bytes of wheels and {tracked} of files: more than {LIMIT_BYTES}")
        if wrong:
            print("\n".join(f"gpu-wheels: {fault}" for fault in wrong), file=sys.stderr)
            return 1
        WHEELS.mkdir(exist_ok=True)
        for old in WHEELS.glob("*.whl"):
            old.unlink()
        for wheel in wheels:
            wheel.rename(WHEELS / wheel.name)
    mib = f"{carried / (1 << 20):.1f} MiB in {WHEELS.name}/, beside {tracked / (1 << 20):.1f} MiB of tracked files"
    print(f"gpu-wheels: {len(wheels)} wheels, {mib}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
