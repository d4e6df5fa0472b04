"""A store of several machines that loses one, all, or its network under load: no wrong byte, and local calls as quick
as before."""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from contextlib import AsyncExitStack

import numpy as np
import pytest

from kvtier import Retention, TokenRange, connect
from tests.integration.blocks import SPEC, assert_bytes, chain, sizes
from tests.integration.waiting import eventually
from tests.remote.network import network
from tests.remote.servers import VOLUME_SERVERS, SeaweedCluster
from tests.remote.shared import SharedStore, put

SAMPLES = 500
"""Local calls of each kind in each phase."""
KINDS = ("acquire", "get", "put")
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
LEAST_S = 4.0
"""Of a phase: until circuits have opened."""
NOISE_S = {"p50": 0.005, "p99": 0.02}
"""What a busy machine may add to a call at any time."""
KEPT = Retention((TokenRange(0, None, 90),))
LOCAL = Retention((TokenRange(0, None, 1),))
"""Of blocks that are not worth the store."""


class Traffic:
    """Clients of one host that put, get and acquire. ``names``: of chains that any host has put."""

    def __init__(self, host, cache, names, rng):
        self._host, self._cache, self._names, self._rng = host, cache, names, rng
        self._own = chain(f"own of {host}", 8)
        self.done: Counter[str] = Counter()
        self.taken = defaultdict(list)
        """Seconds of local calls, by kind, of the present phase."""

    async def prepare(self):
        await put(self._cache, self._own, KEPT)

    async def run(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(self._local())
            for number in range(2):
                group.create_task(self._store(number))
                group.create_task(self._read())

    async def _local(self):
        """Calls for blocks that are on the host."""
        for number in range(10**9):
            started = time.monotonic()
            async with self._cache.acquire(self._own):
                self._note("acquire", started)
            started = time.monotonic()
            rows = await self._cache.get(self._own)
            self._note("get", started)
            assert_bytes(self._own, rows)
            keys = chain(f"local {self._host} {number}", 2)
            started = time.monotonic()
            await put(self._cache, keys, LOCAL)
            self._note("put", started)
            await asyncio.sleep(0.005)

    def _note(self, kind, started):
        self.taken[kind].append(time.monotonic() - started)

    async def _store(self, number):
        for turn in range(10**9):
            name = f"{self._host} {number} {turn}"
            await put(self._cache, chain(name, 3))
            self._names.append(name)
            await asyncio.sleep(0.3)

    async def _read(self):
        """Mostly blocks that only the store has."""
        while True:
            if self._names:
                keys = chain(self._rng.choice(self._names[-200:]), 3)
                rows = await self._cache.get(keys)
                assert_bytes(keys[: len(rows)], rows)
                self.done["whole" if len(rows) == len(keys) else "missed"] += 1
            await asyncio.sleep(0.03)


class Trial:
    """Two hosts with traffic, and what each phase measured."""

    def __init__(self, clients, caches, store):
        names: list[str] = []
        self.clients, self.caches, self._store = clients, caches, store
        self._traffic = [Traffic(name, cache, names, random.Random(name)) for name, cache in caches.items()]

    async def __aenter__(self):
        for one in self._traffic:
            await one.prepare()
        self._running = [asyncio.create_task(one.run()) for one in self._traffic]
        return self

    async def __aexit__(self, *error):
        ended = [task for task in self._running if task.done()]
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for task in ended:
            task.result()  # a wrong byte, or a call that failed
        for client in self.clients.values():
            await eventually(client.leases, lambda leases: not leases)

    async def calm(self):
        """Measures what the other phases are compared with."""
        self._before = await self._measured("well")

    async def phase(self, name):
        """Local calls are as quick as before; other load of the machine may spoil one measurement."""
        slower = self._slower(await self._measured(name))
        assert not slower or not self._slower(await self._measured(f"{name}, again")), slower

    async def _measured(self, name):
        """Quantiles of local calls, in seconds, by kind."""
        for one in self._traffic:
            one.taken.clear()
            one.done.clear()
        began = time.monotonic()

        def enough():
            assert not any(task.done() for task in self._running)
            return all(len(one.taken["put"]) >= SAMPLES for one in self._traffic)

        await eventually(enough, lambda there: there and time.monotonic() - began > LEAST_S, within=120)
        print(f"{name}:", *(dict(one.done) for one in self._traffic))
        found = {}
        for kind in KINDS:
            taken = np.concatenate([one.taken[kind] for one in self._traffic])
            found[kind] = {of: float(np.quantile(taken, share)) for of, share in QUANTILES.items()}
            print(f"  {kind}", *(f"{of} {1e3 * seconds:.2f} ms" for of, seconds in found[kind].items()))
        return found

    def _slower(self, found):
        """What took more than twice its time of before."""
        limits = {(kind, of): max(2 * self._before[kind][of], NOISE_S[of]) for kind in KINDS for of in NOISE_S}
        return {
            each: (found[each[0]][each[1]], limit) for each, limit in limits.items() if found[each[0]][each[1]] > limit
        }

    async def problems(self):
        return [(await client.stats()).remote.problem for client in self.clients.values()]

    async def proven(self, name):
        """Until a chain that A stores is in the store, B has read it from there, and health says that all is well."""
        await put(self.caches["A"], chain(name, 4))
        await self.reaches_b(name)
        await eventually(self.problems, lambda found: not any(found))

    async def reaches_b(self, name):
        keys = chain(name, 4)
        await self._store.has(keys, within=60)

        async def got():
            rows = await self.caches["B"].get(keys)
            assert_bytes(keys[: len(rows)], rows)
            return len(rows)

        await eventually(got, lambda found: found == len(keys), within=60)


@pytest.fixture
def net():
    with network() as made:
        yield made


@pytest.fixture
def cluster(net, monkeypatch):
    cluster = SeaweedCluster(net)
    try:
        cluster.start()
        cluster.make_bucket()
        for variable, value in cluster.env.items():
            monkeypatch.setenv(variable, value)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def trial(cluster, start_fresh):
    store = SharedStore(cluster.url, "c")
    async with AsyncExitStack() as stack:
        clients, caches = {}, {}
        for name in ("A", "B"):
            flag = json.dumps({"url": cluster.url, "write": "through", "timeout_seconds": 2, "min_priority": 2})
            daemon = start_fresh("--remote", flag, host=2048)
            clients[name] = await stack.enter_async_context(await connect(daemon.address))
            caches[name] = await clients[name].open_cache("c", SPEC, budgets=sizes(host=2048))
        yield await stack.enter_async_context(Trial(clients, caches, store))
    await store.close()


@pytest.mark.long
async def test_a_store_fails_in_parts_and_whole_under_load(trial, cluster, net):
    await trial.proven("well")
    await trial.calm()

    cluster.kill_volume_server(0)
    await trial.phase("a volume server is dead")
    await trial.proven("a replica serves")

    for number in range(1, VOLUME_SERVERS):
        cluster.kill_volume_server(number)
    await trial.phase("objects are known and cannot be read")
    assert all(await trial.problems())

    cluster.kill()
    await trial.phase("the store is dead")
    assert all(await trial.problems())
    await put(trial.caches["A"], chain("meanwhile", 4))
    cluster.start()
    await trial.reaches_b("meanwhile")
    await trial.proven("the store is back")

    net.cut()
    await trial.phase("the network is cut")
    assert all(await trial.problems())
    net.mend()
    await trial.proven("the network is back")
