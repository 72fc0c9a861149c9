"""The bytes of bodies, shared between tenants."""

from __future__ import annotations

from duetime.http.body_budget import WAITING_MAX, WAITING_PER_TENANT_MAX, BodyBudget


def taken(budget: BodyBudget, tenant: str, size: int) -> int:
    """How many bodies of this size the tenant gets."""
    count = 0
    while budget.take(tenant, size):
        count += 1
    return count


def test_each_tenant_leaves_as_much_as_it_holds() -> None:
    budget = BodyBudget(1_200)
    assert taken(budget, "a", 10) == 60  # a half
    assert taken(budget, "b", 10) == 30  # a half of the rest
    assert budget.take("c", 300)  # a tenant without any may take all that is left
    assert not budget.take("d", 1)


def test_a_tenant_alone_may_send_the_largest_body() -> None:
    budget = BodyBudget(100)
    assert budget.take("a", 100)
    budget.release("a", 100)
    assert not budget.take("a", 101)
    assert budget.held == 0


def test_room_goes_to_the_tenant_that_holds_least_and_in_order() -> None:
    budget = BodyBudget(100)
    granted: list[str] = []
    assert budget.take("a", 40)
    assert budget.take("b", 60)
    assert budget.wait("b", 10, lambda: granted.append("b"))
    assert budget.wait("c", 20, lambda: granted.append("c1"))
    assert budget.wait("c", 20, lambda: granted.append("c2"))
    budget.release("a", 40)
    assert granted == ["c1"]
    assert not budget.take("c", 1)  # not before the one that waits
    budget.release("b", 60)
    assert granted == ["c1", "b", "c2"]
    assert (budget.held, budget.waiting) == (50, 0)


def test_one_that_stops_waiting_lets_the_next_through() -> None:
    budget = BodyBudget(100)
    granted: list[str] = []

    def large() -> None:
        granted.append("large")

    assert budget.take("a", 50)
    assert budget.wait("b", 60, large)
    assert budget.wait("b", 10, lambda: granted.append("small"))
    budget.cancel("b", 60, large)
    assert granted == ["small"]
    assert (budget.held, budget.waiting) == (60, 0)


def test_few_wait() -> None:
    budget = BodyBudget(1)
    budget.add("x", 1)
    for number in range(WAITING_PER_TENANT_MAX):
        assert budget.wait("a", 1, lambda number=number: None)  # type: ignore[misc]
    assert not budget.wait("a", 1, lambda: None)
    others = [budget.wait(f"t{number}", 1, lambda: None) for number in range(WAITING_MAX)]
    assert others.count(True) == WAITING_MAX - WAITING_PER_TENANT_MAX
