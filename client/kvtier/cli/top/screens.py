"""What comes up over the live view: the keys, and the choice of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

ALL_CACHES: Final = "all caches"

KEYS: Final = """\
tab, shift+tab    the next, the previous table
left, right       sort by another column
up, down, pgup, pgdn, home, end
                  scroll the table
c                 show one cache, or all again
p                 pause: the screen stands still, what happens is
                  still counted
?                 this
q, ctrl+c         quit
ctrl+z            to the shell; fg comes back

Rates are those of the last interval, unless they say otherwise.
Clean slots are free, or their block is in a lower tier as well:
reclaiming them takes no copy. Out are slots in nobody's hands:
orphaned by a broken connection, or quarantined. A cache's hits
and its new blocks, and those gone for good, are of the last minute.
A blank in a line of moves: nothing is known of that moment.

Any key closes this."""


class Help(ModalScreen[None]):
    def compose(self) -> ComposeResult:
        yield Static(KEYS, classes="box", markup=False)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        self.dismiss()


class CacheChoice(ModalScreen[str]):
    """Ends with a cache's name, or an empty one for all; with None where nobody chose."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,c,q", "leave", "back")]

    def __init__(self, names: Sequence[str], chosen: str | None) -> None:
        super().__init__()
        self._names = ["", *names]
        self._chosen = chosen or ""

    def compose(self) -> ComposeResult:
        yield OptionList(*(Option(name or ALL_CACHES) for name in self._names), classes="box", markup=False)

    def on_mount(self) -> None:
        if self._chosen in self._names:
            self.query_one(OptionList).highlighted = self._names.index(self._chosen)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._names[event.option_index])

    def action_leave(self) -> None:
        self.dismiss(None)
