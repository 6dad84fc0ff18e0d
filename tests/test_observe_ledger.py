"""The ledger: whatever is booked, every device-second is on one account."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.observe.ledger import (
    ACCOUNTS,
    IDLE,
    KEPT_WAITS,
    Entry,
    Ledger,
    Waits,
    balance,
    shares,
    split_decoding,
)
from slipstream.observe.store import RunStore

SPENT = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([*ACCOUNTS][:-1]), st.floats(0, 1)), max_size=8)


@given(SPENT, SPENT)
def test_accounts_add_up_to_the_time_that_devices_were_there(first: list[tuple], second: list[tuple]) -> None:
    ledger = Ledger()
    ledger.arrive("a", 0.0)
    ledger.arrive("b", 5.0)
    entries = []
    for step, (spent, now_s) in enumerate(((first, 20.0), (second, 40.0)), 1):
        for one in spent:
            ledger.book(*one)
        entries += ledger.close(step, now_s)
    assert balance(entries, present_s=40.0 + 35.0) == pytest.approx(1.0)
    assert balance([one for one in entries if one.step == 1], present_s=20.0 + 15.0) == pytest.approx(1.0)


def test_what_nobody_booked_was_idle_and_a_device_that_left_is_counted_to_its_end() -> None:
    ledger = Ledger()
    ledger.arrive("rollout-0", 0.0)
    ledger.arrive("rollout-1", 0.0)
    ledger.book("rollout-0", "decode", 6.0)
    ledger.leave("rollout-1", 4.0)
    ledger.book("rollout-1", "decode", 3.0)
    found = {(one.device, one.account): one.seconds for one in ledger.close(1, 10.0)}
    assert found == {
        ("rollout-0", "decode"): 6.0,
        ("rollout-0", IDLE): 4.0,
        ("rollout-1", "decode"): 3.0,
        ("rollout-1", IDLE): 1.0,
    }
    assert [one.device for one in ledger.close(2, 20.0)] == ["rollout-0"]


def test_what_a_device_rests_on_can_change_also_after_a_step_was_closed() -> None:
    ledger = Ledger()
    ledger.arrive("a", 0.0, rest="start")
    entries = ledger.close(1, 10.0)
    ledger.rest_on("a", IDLE, 13.0)
    ledger.book("a", "decode", 2.0)
    entries += ledger.close(2, 20.0)
    found = {(one.step, one.account): one.seconds for one in entries}
    assert found == {(1, "start"): 10.0, (2, "start"): 3.0, (2, "decode"): 2.0, (2, IDLE): 5.0}


def test_who_starts_and_is_lost_and_starts_again_in_one_step_has_one_entry_of_it() -> None:
    ledger = Ledger()
    ledger.arrive("a", 0.0, rest="start")
    ledger.rest_on("a", IDLE, 3.0)
    ledger.book("a", "decode", 1.0)
    ledger.leave("a", 304.0)  # it was given up after five minutes
    ledger.arrive("a", 304.0, rest="start")
    found = ledger.close(1, 309.0)
    assert {one.account: one.seconds for one in found} == {"start": 8.0, "decode": 1.0, IDLE: 300.0} and len(found) == 3


def test_seconds_that_are_told_of_late_are_not_counted_twice() -> None:
    ledger = Ledger()
    ledger.arrive("a", 0.0, rest="rollout wait")
    entries = ledger.close(1, 10.0)
    ledger.book("a", "training", 12.0)  # two of them in step 1
    entries += ledger.close(2, 20.0) + ledger.close(3, 30.0)
    found = {(one.step, one.account): one.seconds for one in entries}
    assert found == {(1, "rollout wait"): 10.0, (2, "training"): 12.0, (3, "rollout wait"): 8.0}
    assert balance(entries, present_s=30.0) == pytest.approx(1.0)


def test_late_seconds_are_owed_through_busy_steps_until_something_rests() -> None:
    ledger = Ledger()
    ledger.arrive("a", 0.0)
    entries = ledger.close(1, 10.0)  # all of it was training, which is told of later
    for step in range(2, 9):
        ledger.book("a", "training", 10.0)
        entries += ledger.close(step, 10.0 * step)
    ledger.book("a", "training", 10.0)
    entries += ledger.close(9, 100.0) + ledger.close(10, 120.0)
    assert balance(entries, present_s=120.0) == pytest.approx(1.0)
    assert sum(one.seconds for one in entries if one.account == "training") == pytest.approx(80.0)


def test_late_seconds_make_up_for_no_more_than_was_taken_for_idle() -> None:
    ledger = Ledger()
    ledger.arrive("a", 0.0)
    ledger.book("a", "training", 9.0)
    entries = ledger.close(1, 10.0)
    ledger.book("a", "training", 10.0)
    ledger.book("a", "decode", 5.0)  # one of these may be of step 1, which had one to spare
    entries += ledger.close(2, 20.0) + ledger.close(3, 30.0)
    assert balance(entries, present_s=30.0) == pytest.approx(34 / 30)


def test_time_that_is_booked_twice_shows() -> None:
    ledger = Ledger()
    ledger.arrive("a", 0.0)
    ledger.book("a", "training", 8.0)
    ledger.book("a", "decode", 8.0)
    assert balance(ledger.close(1, 10.0), present_s=10.0) == pytest.approx(1.6)


def test_an_unknown_account_and_booking_idle_are_refused() -> None:
    for account in ("thinking", IDLE):
        with pytest.raises(AssertionError, match=account):
            Ledger().book("a", account, 1.0)


def test_decoding_is_split_by_the_tokens_that_ran() -> None:
    assert split_decoding(3.0, num_tokens=40, num_accepted=10, num_drafted=30) == {
        "decode": pytest.approx(1.5),
        "accepted drafts": pytest.approx(0.5),
        "rejected drafts": pytest.approx(1.0),
    }
    assert split_decoding(3.0, 40, 0, 0) == {"decode": 3.0}
    assert split_decoding(3.0, 0, 0, 0) == {"decode": 3.0}


def test_shares_of_each_device() -> None:
    entries = [Entry(1, "a", "decode", 3.0), Entry(2, "a", "decode", 3.0), Entry(2, "a", IDLE, 2.0)]
    assert shares(entries) == {"a": {"decode": 0.75, IDLE: 0.25}}


def test_the_store_keeps_it_and_a_resume_forgets_later_steps(tmp_path) -> None:
    entries = [Entry(step, "a", "decode", float(step)) for step in (1, 2, 3)]
    with RunStore(tmp_path) as store:
        store.add_ledger(entries)
        store.add_ledger([Entry(2, "a", "decode", 7.0)])  # a step done again replaces what there was
        store.forget_after(2, 2)
    with RunStore(tmp_path, read_only=True) as store:
        assert store.ledger() == [Entry(1, "a", "decode", 1.0), Entry(2, "a", "decode", 7.0)]


def test_what_was_waited_for_is_known_afterwards() -> None:
    waits = Waits()
    for now_s, account in ((0.0, "tail wait"), (4.0, "tail wait"), (10.0, "reward wait"), (11.0, "training wait")):
        waits.note(account, now_s)
    assert waits.split(8.0, 13.0) == {"tail wait": 2.0, "reward wait": 1.0, "training wait": 2.0}
    assert waits.split(-5.0, 1.0) == {"tail wait": 6.0}, "as at first, before anything was noted"
    assert waits.split(12.0, 12.0) == {}
    for step in range(3 * KEPT_WAITS):
        waits.note(("tail wait", "training wait")[step % 2], 20.0 + step)
    assert sum(waits.split(100.0, 130.0).values()) == pytest.approx(30.0)
