"""The heaps of due times: order, turns of namespaces, and removed tickets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duetime.engine import due_heaps
from duetime.engine.due_heaps import DueHeaps

EVER = 1 << 60


def popped(heaps: DueHeaps[str], due_before: int = EVER, count: int = 10_000) -> list[str]:
    return list(heaps.pop_due(due_before, count))


class TestOrder:
    def test_tickets_of_a_namespace_are_popped_in_order(self) -> None:
        heaps: DueHeaps[str] = DueHeaps()
        for ticket in (5, 3, 9, 1, 7):
            heaps.add(ticket, "n", str(ticket))
        assert popped(heaps, 7) == ["1", "3", "5"]
        assert heaps.next_ticket() == heaps.first() == 7
        assert popped(heaps) == ["7", "9"]
        assert (heaps.next_ticket(), heaps.first(), heaps.tickets()) == (None, None, [])

    def test_namespaces_with_due_timers_take_turns(self) -> None:
        heaps: DueHeaps[str] = DueHeaps()
        for number in range(100_000):
            heaps.add(number, "loud", "loud")
        for number in range(10):
            heaps.add(200_000 + number, "quiet", "quiet")
        first = popped(heaps, count=256)
        assert first.count("quiet") == 10, "it does not wait until the others are popped"
        assert first[: due_heaps._POPPED_PER_TURN] == ["loud"] * due_heaps._POPPED_PER_TURN
        assert len(first) == 256
        assert heaps.next_ticket() == 0, "there are more"

    def test_a_namespace_keeps_its_turn_over_several_calls(self) -> None:
        heaps: DueHeaps[str] = DueHeaps()
        for number in range(30):
            heaps.add(number, "abc"[number % 3], "abc"[number % 3])
        assert "".join(popped(heaps, count=1)[0] for _ in range(6)) == "abcabc"

    def test_only_a_new_first_ticket_of_a_namespace_asks_for_a_wake_up(self) -> None:
        heaps: DueHeaps[str] = DueHeaps()
        assert [heaps.add(ticket, "n", "") for ticket in (5, 6, 4, 5 + 2)] == [True, False, True, False]


class TestRemoving:
    def test_a_removed_ticket_is_not_popped_and_not_the_first(self) -> None:
        heaps: DueHeaps[str] = DueHeaps()
        for ticket in (1, 2, 3):
            heaps.add(ticket, "n", str(ticket))
        assert heaps.remove(1, "n")
        assert not heaps.remove(1, "n")
        assert heaps.first() == heaps.next_ticket() == 2
        assert popped(heaps) == ["2", "3"]

    def test_removed_tickets_do_not_stay_in_memory(self) -> None:
        heaps: DueHeaps[str] = DueHeaps()
        heaps.add(0, "n", "")
        lengths = []
        for number in range(1, 3_000):
            heaps.add(number, "n", "")
            lengths.append(len(heaps._heaps["n"].tickets))
            heaps.remove(number, "n")
        assert max(lengths) <= 2 * 2 + due_heaps._REMOVED_MAX
        heaps.remove(0, "n")
        assert heaps._heaps["n"].tickets == []
        assert heaps.next_ticket() is None
        assert heaps._heaps == {}

    def test_heads_that_are_out_of_date_do_not_stay_in_memory(self) -> None:
        heaps: DueHeaps[str] = DueHeaps()
        for number in range(5_000):
            heaps.add(10_000 - number, "n", "")
        assert len(heaps._heads) <= 2 + due_heaps._REMOVED_MAX + 1
        assert heaps.first() == 10_000 - 4_999


@given(st.lists(st.tuples(st.sampled_from("arp"), st.integers(0, 40), st.sampled_from("xyz")), max_size=80))
def test_whatever_is_added_removed_and_popped_nothing_is_lost_or_popped_twice(
    steps: list[tuple[str, int, str]],
) -> None:
    heaps: DueHeaps[int] = DueHeaps()
    model: dict[int, str] = {}
    for number, (step, value, namespace) in enumerate(steps):
        if step == "a":
            ticket = value << 10 | number
            heaps.add(ticket, namespace, ticket)
            model[ticket] = namespace
        elif step == "r" and model:
            ticket = sorted(model)[value % len(model)]
            assert heaps.remove(ticket, model.pop(ticket))
        elif step == "p":
            due_before = value << 10
            taken = list(heaps.pop_due(due_before, value % 5))
            due = [ticket for ticket in model if ticket < due_before]
            assert len(taken) == min(value % 5, len(due)), "nothing that is due is passed over"
            for name in "xyz":
                mine = [ticket for ticket in taken if model[ticket] == name]
                assert mine == sorted(ticket for ticket in due if model[ticket] == name)[: len(mine)]
            for ticket in taken:
                del model[ticket]
        assert heaps.first() == min(model, default=None)
        assert sorted(heaps.tickets()) == sorted(model)
        following = heaps.next_ticket()
        if model:
            assert following is not None
            assert following <= min(model)
