"""The screen of ``kvtier top``. Needs textual.

Colours are the terminal's own sixteen, so it looks right on dark and on light ones, over ssh and in tmux; without any
under ``NO_COLOR``. The mouse is left to the terminal.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.reactive import reactive
from textual.screen import Screen
from textual.widget import Widget

from kvtier.cli.top import panes, tables
from kvtier.cli.top.feed import Answer, Feed, Silence
from kvtier.cli.top.frame import Frame
from kvtier.cli.top.history import History
from kvtier.cli.top.panes import FAINT, Pane
from kvtier.cli.top.screens import CacheChoice, Help
from kvtier.cli.top.tables import TABLES, Table

WIDE: Final = 140
"""Columns from which on moves stand beside tiers and hits."""
TALL: Final = 40
"""Lines from which on there is room for all tables at once."""

STOPPED_BY_SIGNAL: Final = 128 + signal.SIGTERM


class Lines(Widget):
    """Lines made of a frame, for the width there is."""

    def __init__(self, pane: Pane, frame: Frame, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._pane = pane
        self._frame = frame

    def show(self, frame: Frame) -> None:
        self._frame = frame
        self.refresh(layout=True)

    def render(self) -> Text:
        return self._pane(self._frame, self.size.width)


class Rows(VerticalScroll, inherit_bindings=False):
    """Scrolls up and down only: left and right are for the columns."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll_up"),
        Binding("down", "scroll_down"),
        Binding("pageup", "page_up"),
        Binding("pagedown", "page_down"),
        Binding("home", "scroll_home"),
        Binding("end", "scroll_end"),
    ]


class TablePane(Vertical):
    """A table, its titles above, its rows to scroll through."""

    def __init__(self, table: Table[Any], frame: Frame) -> None:
        super().__init__(id=table.name)
        self._table = table
        self._first = frame
        self._sort = table.sort

    def compose(self) -> ComposeResult:
        yield Lines(self._name_line, self._first, classes="name")
        yield Lines(lambda frame, columns: self._table.heading(self._sort, columns), self._first)
        with Rows():
            yield Lines(lambda frame, columns: self._table.lines(frame, self._sort, columns), self._first)

    def _name_line(self, frame: Frame, columns: int) -> Text:
        return Text(tables.summary(self._table, frame), style="bold")

    def sort_by_next(self, step: int) -> None:
        self._sort = (self._sort + step) % len(self._table.columns)
        for lines in self.query(Lines):
            lines.refresh()


class Live(Screen[None]):
    """The view itself."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit"),
        Binding("p", "app.pause"),
        Binding("tab", "table(1)"),
        Binding("shift+tab", "table(-1)"),
        Binding("left", "sort(-1)"),
        Binding("right", "sort(1)"),
        Binding("c", "app.choose"),
        Binding("question_mark", "app.help"),
    ]
    active = reactive(0)

    def __init__(self, frame: Frame) -> None:
        """``frame``: the first that it shows."""
        super().__init__()
        self._first = frame

    def compose(self) -> ComposeResult:
        yield Lines(panes.head, self._first, id="head")
        with Container(id="always"):
            yield Lines(panes.tiers, self._first, id="tiers")
            yield Lines(panes.moves, self._first, id="moves")
            yield Lines(panes.hits, self._first, id="hits")
        yield Lines(self._names, self._first, id="names")
        with Vertical(id="tables"):
            for table in TABLES:
                yield TablePane(table, self._first)
        yield Lines(panes.keys, self._first, id="keys")

    def on_mount(self) -> None:
        self.watch_active(self.active)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= WIDE, "-wide")
        self.set_class(event.size.height < TALL, "-short")
        self.set_class(event.size.height >= TALL, "-tall")

    def show(self, frame: Frame) -> None:
        for lines in self.query(Lines):
            lines.show(frame)

    def action_table(self, step: int) -> None:
        self.active = (self.active + step) % len(TABLES)

    def action_sort(self, step: int) -> None:
        self._pane.sort_by_next(step)

    def watch_active(self, active: int) -> None:
        for number, pane in enumerate(self.query(TablePane)):
            pane.set_class(number == active, "-active")
        self._pane.query_one(Rows).focus()
        self.query_one("#names", Lines).refresh()

    @property
    def _pane(self) -> TablePane:
        return self.query_one(f"#{TABLES[self.active].name}", TablePane)

    def _names(self, frame: Frame, columns: int) -> Text:
        """The tables, of which there is room for one."""
        names = Text()
        for number, table in enumerate(TABLES):
            chosen = number == self.active
            names.append(f" {tables.summary(table, frame)} ", style="bold reverse" if chosen else FAINT).append(" ")
        names.truncate(columns)
        return names


class TopApp(App[None]):
    """``first``: the answer with which it begins. ``cache``: the only one that it shows, None = all."""

    TITLE = "kvtier top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", priority=True),
        Binding("ctrl+z", "suspend_process", priority=True),
    ]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Lines { height: auto; }
    #always { height: auto; margin: 1 0; layout: vertical; }
    #tiers, #moves { margin-bottom: 1; }
    .-short #always, .-short #tiers, .-short #moves { margin: 0; }
    .-wide #always { layout: grid; grid-size: 2; grid-columns: 1fr 1fr; grid-rows: auto; grid-gutter: 0 3; }
    .-wide #moves { row-span: 2; }
    TablePane { height: 1fr; }
    .-tall #names { display: none; }
    .-tall TablePane { margin-bottom: 1; }
    .-short .name { display: none; }
    .-short TablePane { display: none; }
    .-short TablePane.-active { display: block; }
    .-active .name { text-style: reverse; }
    #keys { dock: bottom; }
    Rows { height: 1fr; scrollbar-size-vertical: 1; scrollbar-background: ansi_default; scrollbar-color: ansi_cyan; }
    ModalScreen { align: center middle; background: transparent; }
    .box { width: auto; max-width: 90%; height: auto; max-height: 90%; padding: 0 1; border: round ansi_cyan;
           background: ansi_default; color: ansi_default; }
    OptionList > .option-list--option { color: ansi_default; background: ansi_default; }
    OptionList > .option-list--option-highlighted, OptionList:focus > .option-list--option-highlighted {
        color: ansi_default; background: ansi_default; text-style: bold reverse; }
    """

    def __init__(self, feed: Feed, interval: float, first: Answer, cache: str | None = None) -> None:
        super().__init__(ansi_color=True)
        self._feed = feed
        self._history = History()
        self._silent_since = first.received
        self._history.add(first.stats, first.received)
        self.frame: Frame = Frame(feed.address, interval, first.stats, self._history.minute, first.leases, cache)
        """What is on the screen."""
        self.newest = self.frame
        """What would be there if it were not paused."""
        self._live = Live(self.frame)

    def on_mount(self) -> None:
        self.push_screen(self._live, wait_for_dismiss=False)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit, None, STOPPED_BY_SIGNAL)
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        async with aclosing(self._feed.follow()) as answers:
            async for answer in answers:
                self.newest = self._after(answer)
                if not self.frame.paused:
                    self._show(replace(self.newest, cache=self.frame.cache))

    def _after(self, answer: Answer | Silence) -> Frame:
        before = self.newest
        if isinstance(answer, Silence):
            return replace(before, trouble=(answer.why, monotonic() - self._silent_since))
        self._silent_since = answer.received
        self._history.add(answer.stats, answer.received)
        return replace(
            before, stats=answer.stats, leases=answer.leases, minute=self._history.minute, trouble=None, paused=False
        )

    def _show(self, frame: Frame) -> None:
        self.frame = frame
        self._live.show(frame)

    def action_pause(self) -> None:
        """Counting goes on behind a screen that stands still."""
        if self.frame.paused:
            self._show(replace(self.newest, cache=self.frame.cache))
        else:
            self._show(replace(self.frame, paused=True))

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_choose(self) -> None:
        def chosen(name: str | None) -> None:
            if name is not None:
                self._show(replace(self.frame, cache=name or None))

        names = sorted(cache.name for cache in self.frame.stats.caches)
        self.push_screen(CacheChoice(names, self.frame.cache), chosen)
