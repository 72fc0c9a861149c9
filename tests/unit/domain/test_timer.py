"""The types of timers: identity, delivery ids, limits, and fields of later versions."""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from duetime.domain.instants import format_instant
from duetime.domain.settle import (
    AttemptResult,
    Contact,
    armed_at,
    attempted,
    settle,
)
from duetime.domain.timer import (
    BEFORE_ALL,
    DAY_MS,
    ID_BYTES_MAX,
    ROW_FORMAT,
    SHARDS_MAX,
    Extras,
    Namespace,
    Timer,
    TimerFilter,
    TimerSpec,
    shard_of,
    uuid_hex,
    uuid_of,
)
from duetime.testing import make_timer

NOW_MS = 1_800_000_000_000
STARTED_MS = NOW_MS - 20
DUE_MS = NOW_MS - 50
LATER_MS = NOW_MS + 90_000
LATER = format_instant(LATER_MS)

NAMESPACE = Namespace(name="orders", num_shards=16, created_at_ms=0)
STRICT = replace(NAMESPACE, require_ok=True)
TIMER = Timer(
    namespace="orders",
    timer_id="order-17",
    uuid_high=1,
    uuid_low=2,
    generation=5,
    execute_at_ms=DUE_MS,
    scheduled_at_ms=DUE_MS,
    created_at_ms=DUE_MS - 1_000,
    callback_url="http://shop.test/hook",
    extras=Extras(headers={"x-a": "1"}, tags=("red",)),
)


class TestIdentity:
    @pytest.mark.parametrize(
        ("timer_id", "num_shards", "shard"),
        [("123456789", 2**32, 0xCBF43926), ("order-17", 16, 4), ("order-17", 256, 20), ("ü", 16_384, 10_709)],
    )
    def test_the_shard_of_an_id_never_changes(self, timer_id: str, num_shards: int, shard: int) -> None:
        assert shard_of(timer_id, num_shards) == shard

    @given(st.text(), st.integers(1, 16_384))
    def test_a_shard_is_crc32_of_the_utf8_bytes_modulo_the_number_of_shards(self, timer_id: str, count: int) -> None:
        assert shard_of(timer_id, count) == zlib.crc32(timer_id.encode("utf-8")) % count

    def test_a_uuid_never_changes(self) -> None:
        assert uuid_hex(*uuid_of("orders", "order-17")) == "10a24a84db9acf81ab926e776db9c7f0"

    def test_parts_do_not_run_into_each_other(self) -> None:
        assert uuid_of("a:b", "c") != uuid_of("a", "b:c")
        assert uuid_of("ab", "c") != uuid_of("a", "bc")
        assert uuid_of("a", "", "b") != uuid_of("a", "b", "")

    @given(st.lists(st.text(), min_size=3, max_size=3), st.lists(st.text(), min_size=3, max_size=3))
    def test_different_parts_have_different_uuids(self, one: list[str], other: list[str]) -> None:
        assert (uuid_of(*one) == uuid_of(*other)) == (one == other)

    @pytest.mark.parametrize(("one", "other"), [("A", "a"), ("a", "a "), ("é", "e\u0301")])
    def test_ids_that_only_look_alike_are_different_timers(self, one: str, other: str) -> None:
        assert uuid_of("n", one) != uuid_of("n", other)

    def test_both_halves_fit_a_signed_long_and_survive_hex(self) -> None:
        for number in range(100):
            high, low = uuid_of("n", str(number))
            assert -(2**63) <= high < 2**63
            assert -(2**63) <= low < 2**63
            assert len(uuid_hex(high, low)) == 32

    def test_every_position_comes_after_the_one_before_all(self) -> None:
        assert replace(TIMER, execute_at_ms=0, uuid_high=-(2**63), uuid_low=-(2**63)).position > BEFORE_ALL

    def test_positions_go_by_time_then_by_uuid(self) -> None:
        early = replace(TIMER, execute_at_ms=1, uuid_high=9).position
        late = replace(TIMER, execute_at_ms=2, uuid_high=-9).position
        assert sorted([late, early]) == [early, late]


class TestDeliveryId:
    def test_it_is_the_same_for_every_retry(self) -> None:
        retried = armed_at(attempted(TIMER, NOW_MS), NOW_MS, occurrence_done=False)
        assert retried.attempts == 1
        assert retried.delivery_id == TIMER.delivery_id

    def test_it_is_new_for_a_new_occurrence(self) -> None:
        again = armed_at(TIMER, LATER_MS, occurrence_done=True)
        assert again.delivery_id != TIMER.delivery_id

    def test_it_is_new_for_a_new_generation(self) -> None:
        assert replace(TIMER, generation=6).delivery_id != TIMER.delivery_id

    def test_generation_and_occurrence_do_not_run_into_each_other(self) -> None:
        one = replace(TIMER, generation=0x11, extras=Extras(occurrence=1))
        other = replace(TIMER, generation=0x1, extras=Extras(occurrence=11))
        assert one.delivery_id != other.delivery_id


class TestNumbers:
    """What stored rows, other databases and the documents rely on."""

    def test_the_limits_and_the_row_format(self) -> None:
        assert (DAY_MS, SHARDS_MAX, ID_BYTES_MAX, ROW_FORMAT) == (86_400_000, 16_384, 255, 1)
        assert BEFORE_ALL == (-1, 0, 0)

    def test_the_defaults(self) -> None:
        assert (NAMESPACE.revision, NAMESPACE.callback_timeout_seconds) == (0, 10)
        assert not TimerSpec(namespace="n", timer_id="t").if_absent
        assert TimerFilter(namespace="n").limit == 100
        assert AttemptResult(Contact.BROKEN).status == 0
        assert Extras(occurrence=7).asked_for().occurrence == 0


class TestLaterVersions:
    """Case 53: what a later version added to a timer survives this one's hands."""

    LATER: ClassVar = {"y": [1, {"deep": "value"}]}

    def later_timer(self, **fields: Any) -> Timer:
        return make_timer(extras=Extras(tags=("a",), later=self.LATER), **fields)

    def test_case_53_a_retry_and_a_new_occurrence_keep_it(self) -> None:
        timer, namespace = self.later_timer(), Namespace(name="n", num_shards=1, created_at_ms=0)
        for outcome in (
            AttemptResult(Contact.ANSWERED, 500),
            AttemptResult(Contact.BROKEN, error="?"),
            AttemptResult(Contact.ANSWERED, 200, b'{"ok": true, "nextExecuteAt": "2030-01-01T00:00:00Z"}'),
            AttemptResult(Contact.ANSWERED, 200, b'{"ok": false, "nextExecuteAt": "1970-01-01T00:00:05Z"}'),
        ):
            settlement = settle(timer, outcome, namespace, started_at_ms=1, now_ms=2, jitter=lambda: 0.5)
            assert settlement.rearmed is not None
            assert settlement.rearmed.extras.later == self.LATER

    def test_case_53_it_is_written_as_it_was_read(self) -> None:
        text = b'{"t":["a"],"x":{"y":[1,{"deep":"value"}]}}'
        assert msgspec.json.encode(msgspec.json.decode(text, type=Extras)) == text

    def test_case_53_fields_that_are_not_known_at_all_do_no_harm(self) -> None:
        assert msgspec.json.decode(b'{"t":["a"],"zz":1}', type=Extras) == Extras(tags=("a",))
