"""The meters of .ci/house.py count what they name."""

import ast

import house
import pytest


def trees(**modules):
    return {name.replace("_", "."): list(ast.walk(ast.parse(code))) for name, code in modules.items()}


def test_a_circle_of_any_size_is_named():
    pair = trees(a_x="from a import y", a_y="if TYPE_CHECKING:\n    from a.x import X")
    three = trees(b="def f():\n    import c", c="from d import D", d="import b")
    assert house.circle(pair | trees(e="import a.x, os")) == ["a.x", "a.y"]
    assert house.circle(three | trees(e="import b, os")) == ["b", "c", "d"]
    assert house.circle(trees(e="import f, os", f="import g", g="")) == []


def test_a_page_has_sentences_in_paragraphs_items_and_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A title\n\nOne fact. Of two\nlines: word.\n```sh\ncode here\n```\n- an item\n\n| a cell | 7 |\n")
    assert list(house.in_page(page)) == [
        ("page.md:1", "A title"),
        ("page.md:3", "One fact"),
        ("page.md:3", "Of two lines"),
        ("page.md:8", "an item"),
        ("page.md:10", "a cell"),
    ]


@pytest.mark.parametrize("limit", [0, 10**9])
def test_a_meter_above_its_limit_fails(monkeypatch, capsys, limit):
    monkeypatch.setattr(house, "LIMITS", dict.fromkeys(house.LIMITS, limit))
    assert house.main([]) == (limit == 0)
    assert (", ABOVE" in capsys.readouterr().out) == (limit == 0)
