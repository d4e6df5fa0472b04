"""The stand-in sees every fault that a connector is known to have had: each is planted into kvtier's own."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtier.abi.keys import KEY_BYTES, Scope
from kvtier.connectors import trtllm
from kvtier.connectors.trtllm import _Scheduler, _Worker
from kvtier.engine import Load, Mover, Work
from tests.trtllm.executor import Answer, WrongBytes
from tests.trtllm.test_connector import ASYNC, SYNC, V1, V2, engine
from tests.trtllm.traffic import ask

LATE_S = 30.0


def loads_late(patch: pytest.MonkeyPatch) -> None:
    """Loads while the forward pass runs."""
    load, save = _Worker.start_load_kv, _Worker.wait_for_save
    patch.setattr(_Worker, "start_load_kv", lambda self, stream: None)
    patch.setattr(_Worker, "wait_for_save", lambda self, stream: (load(self, stream), save(self, stream)))


def changed_loads(patch: pytest.MonkeyPatch, change: Callable[[Load], Load]) -> None:
    start = Mover.start

    def changed(self: Any, work: Work, **more: Any) -> None:
        start(self, replace(work, loads=tuple(map(change, work.loads))), **more)

    patch.setattr(Mover, "start", changed)


def loads_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Loads each block to the page of the next."""
    changed_loads(patch, lambda load: replace(load, pages={g: p[1:] + p[:1] for g, p in load.pages.items()}))


def loads_too_few(patch: pytest.MonkeyPatch) -> None:
    """Leaves the last block out."""

    def shorter(load: Load) -> Load:
        keys = {group: packed[:-KEY_BYTES] for group, packed in load.keys.items()}
        return replace(load, keys=keys, pages={group: pages[:-1] for group, pages in load.pages.items()})

    changed_loads(patch, shorter)


def held_up(patch: pytest.MonkeyPatch, copy: str) -> threading.Event:
    """Copies wait for the event, at the latest until the end of the worker."""
    go, carry_out, close = threading.Event(), getattr(Mover, copy), Mover.close
    patch.setattr(Mover, copy, lambda *rest: go.wait(LATE_S) and carry_out(*rest))

    def closed(self: Mover) -> None:
        go.set()
        close(self)

    patch.setattr(Mover, "close", closed)
    return go


def says_loaded_too_soon(patch: pytest.MonkeyPatch) -> None:
    """Reports a load when it starts."""
    held_up(patch, "_load")
    finished = _Worker.get_finished
    patch.setattr(_Worker, "get_finished", lambda self, done, loading: (finished(self, done, [])[0], loading))


def goes_on_after(patch: pytest.MonkeyPatch, go: threading.Event, gone: list[Any]) -> None:
    """Saves go on when the engine has taken back pages: ``gone`` has something from their end on."""
    finished = _Worker.get_finished

    def look(self: Any, *told: Any) -> Any:
        if gone:
            go.set()
        return finished(self, *told)

    patch.setattr(_Worker, "get_finished", look)


def frees_what_it_saves(patch: pytest.MonkeyPatch) -> None:
    """Lets pages go that are still to be saved."""
    gone: list[Any] = []
    goes_on_after(patch, held_up(patch, "_save"), gone)
    end = _Scheduler.request_finished_by_layer_group

    def ended(self: Any, request: Any, ids: Any) -> bool:
        end(self, request, ids)
        gone.append(request)
        return False

    patch.setattr(_Scheduler, "request_finished_by_layer_group", ended)


def loses_window(patch: pytest.MonkeyPatch) -> None:
    """Saves pages of a sliding window later, as if they stayed."""
    gone: list[Any] = []
    goes_on_after(patch, held_up(patch, "_save"), gone)
    save = _Worker.wait_for_save

    def later(self: Any, stream: Any) -> None:
        gone.extend(page for pages in self._leaving.values() for page in pages)
        self._leaving = {}
        save(self, stream)

    patch.setattr(_Worker, "wait_for_save", later)


def saves_too_soon(patch: pytest.MonkeyPatch) -> None:
    """Saves before the forward pass has written."""
    start = _Worker.start_load_kv

    def started(self: Any, stream: Any) -> None:
        start(self, stream)
        self._mover.save()
        self._mover._saving.submit(int).result()  # after the saves, which one thread makes in turn

    patch.setattr(_Worker, "start_load_kv", started)


def leaves_salt_out(patch: pytest.MonkeyPatch) -> None:
    """Names blocks by their tokens alone."""
    patch.setattr(trtllm, "_scope", lambda request: Scope())


def leaves_replicated_out(patch: pytest.MonkeyPatch) -> None:
    """Takes the regions of its own rank for all there is."""
    register = _Worker.register_kv_cache_layout

    def own(self: Any, layout: Any) -> None:
        register(self, replace(layout, groups=tuple(replace(each, replicated_regions=()) for each in layout.groups)))

    patch.setattr(_Worker, "register_kv_cache_layout", own)


def forgets_reset(patch: pytest.MonkeyPatch) -> None:
    """Adds the pages of a request that begins anew to those that it had."""
    kept: dict[int, Any] = {}
    reset, match = _Scheduler.request_reset, _Scheduler.get_num_new_matched_tokens

    def keep(self: Any, request: Any) -> None:
        kept[request.request_id] = self._requests[request.request_id].pages
        reset(self, request)

    def matched(self: Any, request: Any, computed: int) -> Any:
        answer = match(self, request, computed)
        self._requests[request.request_id].pages = kept.pop(request.request_id, {})
        return answer

    patch.setattr(_Scheduler, "request_reset", keep)
    patch.setattr(_Scheduler, "get_num_new_matched_tokens", matched)


@pytest.mark.parametrize(
    ("plant", "way", "model"),
    [
        (loads_late, SYNC, V1),
        (loads_elsewhere, SYNC, V1),
        (loads_elsewhere, ASYNC, V2),
        (loads_too_few, SYNC, V1),
        (loads_too_few, ASYNC, V2),
        (says_loaded_too_soon, ASYNC, V1),
        (frees_what_it_saves, ASYNC, V1),
        (saves_too_soon, SYNC, V1),
        (leaves_salt_out, SYNC, V1),
        (leaves_salt_out, ASYNC, V2),
        (loses_window, ASYNC, V2),
        (leaves_replicated_out, SYNC, V2),
        (forgets_reset, SYNC, V2),
    ],
)
def test_a_planted_fault_is_caught(daemon, monkeypatch, plant, way, model):
    plant(monkeypatch)
    with pytest.raises(WrongBytes):
        for seed in (1, 2):
            with engine(daemon, model, way, reuse=False, seed=seed) as executor:
                asked = ask(executor)
                if plant is forgets_reset:
                    executor.answers = {each.request_id: Answer(reset=True) for each in asked[:2]}
                executor.run()
