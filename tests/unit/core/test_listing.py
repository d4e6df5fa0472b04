"""Pages of what is stored, parents first, sound while the cache changes under them."""

from tests.unit.core.bench import GROUP, Bench, name_of


def pages(bench: Bench, limit: int) -> list[str]:
    found = []
    page = 0
    while True:
        listing = bench.core.listing(GROUP, page, limit)
        found.append("".join(name_of(row.key) for row in listing.rows))
        page = listing.next_page
        if page == 0:
            return found


def test_a_walk_meets_every_block_that_stays_though_others_come_and_go() -> None:
    bench = Bench(device=5)
    bench.put("ab")
    bench.put("c")
    first = bench.core.listing(GROUP, 0, 2)
    bench.drop("b")
    bench.put("d")
    second = bench.core.listing(GROUP, first.next_page, 2)
    assert "".join(name_of(row.key) for row in (*first.rows, *second.rows)) == "abcd"
    assert second.next_page == 0


def test_many_departed_leave_pages_full() -> None:
    bench = Bench(device=3)
    for number in range(200):
        bench.put(chr(1000 + number))
    bench.put("abc")
    assert pages(bench, 2) == ["ab", "c"]
