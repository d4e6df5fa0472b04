"""Many blocks at once stand as they would one by one: parents first, recency kept, no parent under its child."""

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.ids import Key
from kvtierd.core.recovery import reachable


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def one_after_the_other(keys: list[Key], parents: list[Key | None]) -> list[int]:
    """The same by its definition: always the first that can go."""
    order: list[int] = []
    done: set[Key] = set()
    while True:
        ready = (
            place
            for place in range(len(keys))
            if place not in order and ((parent := parents[place]) is None or parent in done)
        )
        place = next(ready, None)
        if place is None:
            return order
        order.append(place)
        done.add(keys[place])


@given(st.lists(st.none() | st.integers(0, 24), max_size=24))
def test_parents_come_first_and_else_the_order_is_kept(above: list[int | None]) -> None:
    """Forests of all shapes, with parents that are not there, and rings."""
    keys = [key(number) for number in range(len(above))]
    parents = [None if number is None else key(number) for number in above]
    assert reachable(keys, parents) == one_after_the_other(keys, parents)
