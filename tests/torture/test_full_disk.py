"""A full file system: the daemon serves, is killed, starts on it, and heals once there is room.

The test needs root, to mount a file system of its own.
"""

import asyncio
import os
import random
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier import BlockResult, KvtierError, Tier
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.load import Load
from tests.integration.test_crash import SEED
from tests.integration.waiting import eventually, heard, patient
from tests.torture.runs import scaled

BYTES = 48 << 20
SLOTS = {"device": 24, "host": 32, "disk": 512}
KILLS = scaled(20, 2)
OPERATIONS = 60
"""Operations of the load before each kill."""
LOGGED = ("--event-log-bytes", "16MiB", "--event-ring-bytes", "64KiB")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="no file system can be made"),
]


@contextmanager
def mounted(home):
    """Mounts a small file system for the state and the disk tier of a daemon of ``home``."""
    image, root = home / "image", home / "mount"
    with image.open("wb") as file:
        file.truncate(BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    root.mkdir()
    if subprocess.run(["mount", "-o", "loop", image, root], check=False).returncode:
        pytest.skip("nothing can be mounted")
    try:
        for part in ("state", "disk"):
            (root / part).mkdir(mode=0o700)
            (home / part).symlink_to(root / part)
        yield root
    finally:
        subprocess.run(["umount", root], check=True)


def fill(ballast: Path) -> None:
    """Fills the file system until no byte is left."""
    with ballast.open("ab", buffering=0) as file:
        for piece in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(piece)):
                    pass
            except OSError:
                continue


async def test_a_full_disk_costs_no_byte(short_dir, found):
    kept = chain("kept", 24)
    with mounted(short_dir) as root:
        daemon = DaemonProcess(short_dir, sizes(**SLOTS), LOGGED)
        daemon.start()
        try:
            async with await patient(daemon.address, timeout=20) as client:
                cache = await client.open_cache("kept", SPEC, budgets=sizes(host=8, disk=128))
                busy = await client.open_cache("c", SPEC, budgets=sizes(device=24, host=24, disk=64))
                await cache.put(kept, blocks(kept))
                assert set(await cache.move(kept, Tier.DISK)) == {BlockResult.OK}
                fill(root / "ballast")
                refused, read = 0, 0
                for number in range(KILLS):
                    read += await work(daemon.address, SEED + number)
                    try:
                        await client.open_cache(f"more-{number}", SPEC, budgets=sizes(host=1, disk=256))
                    except KvtierError:
                        refused += 1
                    await asyncio.to_thread(daemon.kill)
                    fill(root / "ballast")
                    await asyncio.to_thread(daemon.start)
                    await heard(client)
                    assert_bytes(kept, await cache.get(kept))
                problems = (await client.stats()).problems
                (root / "ballast").unlink()
                after = chain("after", 12)
                await busy.put(after, blocks(after))
                await eventually(lambda: busy.move(after, Tier.DISK), lambda so: set(so) == {BlockResult.OK})
                await eventually(client.stats, lambda stats: not stats.problems)
                assert_bytes(kept, await cache.get(kept))
        finally:
            daemon.kill()
    found(
        f"full disk, killed {KILLS} times on it: 0 wrong of {read:,} blocks read, 0 of {len(kept)} on disk lost, "
        f"{refused} caches refused; while full: {', '.join(problems) or 'no problem told'}; healed"
    )


async def work(address, seed):
    """Runs the load. Returns the number of blocks read and compared."""
    async with Load(address, "c", chains=12, workers=3, seed=random.Random(seed).getrandbits(32)) as load:
        await eventually(load.done.total, lambda done: done > OPERATIONS)
        load.check()
    return load.done["blocks"]
