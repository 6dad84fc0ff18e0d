"""The batcher against an oracle that knows what each request must become, and a device that remembers what was written.

The words of the module's head: a plan never exceeds `max_step_tokens`; a seated sequence has one slot, and pages for
every token that was launched; every submitted request ends exactly once; free + held = all pages.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from batcher_bench import Bench, Budgets, expected, make_batcher, make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import report_of

from slipstream.engine import batcher
from slipstream.engine.sequences import PartialRollout
from slipstream.types import Request, SamplingParams


@pytest.fixture(scope="module", autouse=True)
def looks_often_who_is_behind() -> Iterator[None]:
    """As there are few steps here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher, "BEHIND_STEPS", 2)
        yield


def served(budgets: Budgets, sizes: list[tuple[int, int, int]]) -> tuple[Bench, list[list[Request]]]:
    """A bench that has finished groups of these sizes, and the groups."""
    bench = Bench(*budgets)
    groups = [make_group(f"g{number}", *size) for number, size in enumerate(sizes)]
    for requests in groups:
        bench.submit(requests)
    bench.finish()
    return bench, groups


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
DRAFTS = st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 20), st.integers(1, 5)))
BUDGETS = st.tuples(st.integers(10, 40), st.integers(1, 24), st.integers(1, 9), st.integers(0, 2), DRAFTS)
AMPLE = st.tuples(st.just(400), st.integers(1, 24), st.integers(1, 30), st.integers(0, 2), DRAFTS)


@settings(max_examples=150)
@given(BUDGETS, st.lists(SIZES, min_size=1, max_size=6))
def test_every_request_ends_once_however_few_pages_there_are(
    budgets: Budgets, sizes: list[tuple[int, int, int]]
) -> None:
    bench, groups = served(budgets, sizes)
    assert set(bench.done) == {request.uid for requests in groups for request in requests}


@settings(max_examples=100)
@given(AMPLE, st.lists(SIZES, min_size=1, max_size=6))
def test_with_pages_for_all_every_prompt_is_computed_once_but_for_its_last_token(
    budgets: Budgets, sizes: list[tuple[int, int, int]]
) -> None:
    bench, groups = served(budgets, sizes)
    assert bench.batcher.num_preempted == 0
    prompts = sum(len(requests[0].prompt_ids) + len(requests) - 1 for requests in groups)
    decoded = sum(len(rollout.token_ids) - 1 for rollout in bench.done.values())
    assert bench.computed == prompts + decoded - bench.gained


def test_while_others_wait_nobody_is_behind_and_then_who_may_sample_most() -> None:
    """Also in a second rollout, whose sequences take the slots of the first."""
    bench = Bench(400, 24, num_slots=4, drafts=(8, 2))
    for rollout in "ab":
        for number in range(6):
            bench.submit(make_group(f"{rollout}{number}", 1, 3, 7 + 6 * number))
        met = set()
        while bench.batcher.has_work:
            bench.step()
            assert bench.batcher.others_follow == (bench.batcher.num_waiting > 0)
            met.add((bench.batcher.others_follow, bench.batcher.tokens_behind is None))
            table = bench.batcher._table
            behind = [bench.slots[slot].sequence for slot in table.in_turn if table["is_behind"][slot] > 0]
            assert all(sequence.request.group.startswith(rollout) for sequence in behind)
        assert met - {(False, True)} == {(True, True), (False, False)}


def test_others_follow_who_wait_elsewhere_or_here_unless_only_what_runs_is_ended() -> None:
    fed = make_batcher(40, 64, 4, others_follow=True)
    assert fed.others_follow
    batcher = make_batcher(40, 64, 1)
    assert not batcher.others_follow
    for name in "ab":
        batcher.submit(make_group(name, 1, 3, 9))
    batcher.plan()
    assert batcher.others_follow
    batcher.admits_fresh = False
    assert not batcher.others_follow


ACTS = st.one_of(
    SIZES.map(lambda size: ("submit", size)),
    st.just(("step", None)),
    st.just(("seat", None)),
    st.integers(0, 99).map(lambda which: ("withdraw", which)),
    st.just(("bring back", None)),
    st.just(("forget prompts", None)),
    st.just(("send all back", None)),
    st.just(("send unbegun back", None)),
    st.just(("restart", None)),
)


@settings(max_examples=300)
@given(BUDGETS, st.lists(ACTS, max_size=40))
def test_sequences_may_leave_and_come_back_at_any_time(budgets: Budgets, acts: list[tuple[str, object]]) -> None:
    bench, submitted = Bench(*budgets), set()
    for number, (act, detail) in enumerate(acts):
        if act == "submit":
            requests = make_group(f"g{number}", *detail)  # type: ignore[misc]
            bench.submit(requests)
            submitted |= {request.uid for request in requests}
        elif act == "withdraw" and bench.alive:
            bench.withdraw(sorted(bench.alive)[detail % len(bench.alive)])  # type: ignore[operator]
        elif act == "bring back" and bench.away:
            bench.bring_back()
        elif act == "forget prompts":
            bench.batcher.forget_prompts()
        elif act == "send all back":
            bench.batcher.send_back_running()
        elif act == "send unbegun back":
            bench.batcher.send_back_unbegun()
        elif act == "restart":
            bench.batcher.restart_begun()
        elif act == "seat":
            bench.seat()
        elif act == "step":
            bench.step()
        bench.check_books()
    bench.finish()
    assert set(bench.done) == submitted


def test_under_pressure_the_youngest_give_way_and_the_oldest_never_does() -> None:
    bench = Bench(num_pages=12, max_step_tokens=64)
    sampling = SamplingParams(max_new_tokens=30)
    requests = [Request(f"r{n}", f"g{n}", (5000 + n,) * 8, 0, sampling) for n in range(4)]
    for request in requests:
        bench.submit([request])
    while len(bench.done) < 1:
        bench.step()
    assert set(bench.done) == {"r0"} and bench.batcher.num_preempted > 0


def test_new_weights_may_restart_what_is_running() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    requests = [Request(f"r{n}", "g", (7, 8), 0, SamplingParams(max_new_tokens=30)) for n in range(3)]
    bench.submit(requests)
    for _ in range(5):
        bench.step()
    bench.batcher.restart_begun()
    assert bench.batcher.num_running == 0 and bench.batcher.num_waiting == 3
    version = bench.version
    bench.finish()
    assert all(rollout.first_version > version for rollout in bench.done.values())


def test_only_what_has_begun_is_seated_while_nothing_fresh_is_admitted() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    bench.submit(make_group("g", 2, 3, 4))
    bench.batcher.admits_fresh = False
    assert bench.batcher.plan().num_tokens == 0
    bench.batcher.admits_fresh = True
    for _ in range(3):
        bench.step()
    bench.submit(make_group("h", 2, 3, 4))
    bench.batcher.send_back_running()
    bench.batcher.admits_fresh = False
    while bench.batcher.num_begun:
        bench.step()
    assert {uid[0] for uid in bench.done} == {"g"}, "what has begun ends, and nothing else begins"
    bench.batcher.admits_fresh = True
    bench.finish()


def test_drafts_give_several_tokens_a_step_and_never_cost_another_its_pages() -> None:
    requests = [Request(f"r{n}", f"g{n}", (5000 + n,) * 4, 0, SamplingParams(max_new_tokens=36)) for n in range(3)]
    steps = {}
    for drafts in ((0, 0), (12, 4)):
        bench = Bench(num_pages=30, max_step_tokens=64, drafts=drafts)
        for request in requests:
            bench.submit([request])
        while bench.batcher.has_work:
            bench.step()
        steps[drafts] = bench.version
        assert bench.batcher.num_preempted == 0 and (bench.gained > 0) == (drafts != (0, 0))
    assert steps[12, 4] < 0.7 * steps[0, 0]


@pytest.mark.parametrize(("num_pages", "lengths"), [(11, (30, 8, 8, 4)), (13, (8, 8, 30, 12)), (10, (4, 8, 12, 30))])
def test_where_pages_are_few_drafts_are_left_out_before_anyone_gives_way(
    num_pages: int, lengths: tuple[int, ...]
) -> None:
    for drafts in ((0, 0), (12, 4)):
        bench = Bench(num_pages, max_step_tokens=64, lag=1, drafts=drafts)
        for number, length in enumerate(lengths):
            sampling = SamplingParams(max_new_tokens=length)
            bench.submit([Request(f"r{number}", f"g{number}", (5000 + number,) * 4, 0, sampling)])
        bench.finish()
        assert bench.batcher.num_preempted == 0


def test_drafts_give_way_to_prompts_so_that_a_step_stays_as_large() -> None:
    batcher = make_batcher(40, 64, 99, fit_drafts=lambda num_tokens, num_drafts: min(num_drafts, 12 - num_tokens))
    for number, prompt_tokens in enumerate((1, 5)):
        batcher.submit(make_group(f"g{number}", 1, prompt_tokens, 30))
        plan = batcher.plan(11, 11)
        batcher.commit(plan, report_of({slot: ([7], [0.0], [0], 0) for slot in range(2)}), 0)
        assert plan.num_tokens == 12 and plan.num_drafts == (11 if number == 0 else 6)


def test_slots_that_the_device_has_not_heard_of_are_vacated_by_the_next_plan() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    bench.submit([Request(f"r{n}", "g", (7, 8), 0, SamplingParams(max_new_tokens=30)) for n in range(3)])
    for _ in range(3):
        bench.step()
    slot = bench.batcher._seated["r2"].slot
    bench.withdraw("r2")
    lost = bench.batcher.plan()
    bench.batcher.vacate_again(lost)
    assert lost.vacated == (slot,) and bench.batcher.plan().vacated == (slot,)


def test_everyones_turn_comes_when_there_are_more_sequences_than_tokens() -> None:
    bench = Bench(num_pages=200, max_step_tokens=3)
    requests = [
        Request(f"r{n}", "g", (7, 8), 0, SamplingParams(max_new_tokens=30)) for n in range(10)
    ]  # no stop token: all run on
    bench.submit(requests)
    for _ in range(45):
        bench.step()
    lengths = [len(partial.token_ids) for partial in bench.batcher.grown_since({})]
    assert len(lengths) == 10 and max(lengths) - min(lengths) <= 2 and max(lengths) > 10


def test_those_who_come_later_do_not_take_the_turns_of_those_who_are_there() -> None:
    bench = Bench(num_pages=200, max_step_tokens=2, num_slots=6)
    for number in range(3):
        bench.submit([Request(f"long{number}", f"long{number}", (7,), 0, SamplingParams(max_new_tokens=39))])
    for _ in range(20):
        bench.step()
    for number in range(90):  # short ones, for every free slot
        bench.submit([Request(f"short{number}", f"short{number}", (7,), 0, SamplingParams(max_new_tokens=1))])
        if number % 3 == 2:
            bench.step()
    lengths = [len(partial.token_ids) for partial in bench.batcher.grown_since({}) if "long" in partial.request.uid]
    assert len(lengths) == 3 and min(lengths) > 20 and len(bench.done) > 20


def test_what_has_grown_says_since_when() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    bench.submit([Request("r", "g", (7, 8), 0, SamplingParams(max_new_tokens=30))])
    for _ in range(4):
        bench.step()
    (partial,) = bench.batcher.grown_since({"r": 1})
    assert partial.token_ids == expected(partial.request)[1:4] == tuple(map(int, partial.logprobs))
    assert partial.first_version == 1 and bench.batcher.grown_since({"r": 4}) == []


def test_only_sequences_without_a_token_give_up_their_seats_for_new_weights() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64, lag=1)
    for name in "ab":
        bench.submit([Request(name, name, (7, 8), 0, SamplingParams(max_new_tokens=30))])
        bench.step()
    assert bench.batcher.num_begun == 2, "the second will have a token of its own"
    bench.batcher.send_back_unbegun()
    assert list(bench.batcher._seated) == ["a"] and bench.batcher.num_begun == 1
    bench.finish()


def test_who_sampled_in_a_slot_is_not_who_has_it_now() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64, num_slots=2)
    for name in "ab":
        bench.submit([Request(name, name, (7, 8), 0, SamplingParams(max_new_tokens=30))])
    plan = bench.step()
    assert bench.batcher.uids_of(plan, [0, 1]) == ["a", "b"]
    bench.withdraw("a")
    bench.submit([Request("c", "c", (7, 8), 0, SamplingParams(max_new_tokens=30))])
    assert bench.batcher.uids_of(bench.step(), [0, 1]) == ["c", "b"] and bench.batcher.uids_of(plan, [0, 1]) == ["b"]


def test_prompts_are_computed_in_order_of_arrival_and_in_chunks() -> None:
    bench = Bench(num_pages=20, max_step_tokens=5)
    bench.submit(make_group("a", 1, 7, 4))
    bench.submit(make_group("b", 1, 6, 4))
    first, second = bench.step(), bench.step()
    assert first.allotments.tolist() == [[0, 5], [1, 0]] and len(first.samplers) == 0
    assert second.allotments.tolist() == [[0, 2], [1, 3]] and second.samplers.slot_R.tolist() == [0]
    assert bench.batcher.uids_of(second, [0, 1]) == ["a.0"]


@pytest.mark.parametrize(
    ("prompt", "words"), [((), "prompt is empty"), ((1,) * 30, "prompt of 30 tokens \\+ 11 new tokens")]
)
def test_a_request_that_cannot_fit_is_refused_by_name(prompt: tuple[int, ...], words: str) -> None:
    batcher = make_batcher(10, 8)
    with pytest.raises(ValueError, match=f"request r: .*{words}"):
        batcher.submit([Request("r", "g", prompt, 0, SamplingParams(max_new_tokens=11))])
    assert not batcher.has_work


def test_a_partial_rollout_that_cannot_fit_is_refused_by_name() -> None:
    batcher = make_batcher(10, 8)
    request = Request("r", "g", (1,) * 30, 0, SamplingParams(max_new_tokens=11))
    with pytest.raises(ValueError, match=r"request r: prompt of 30 tokens \+ 11 new tokens"):
        batcher.submit_partial(PartialRollout(request, (5, 6), (0.0, 0.0), 0))
    assert not batcher.has_work


def test_pages_that_cannot_hold_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="9 pages of 4 tokens cannot hold one sequence of 40 tokens"):
        make_batcher(9, 8)


def test_a_refused_group_leaves_nothing_behind() -> None:
    batcher = make_batcher(10, 8)
    good = Request("good", "g", (1, 2), 0, SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match="request bad"):
        batcher.submit([good, Request("bad", "g", (1, 2), 0, SamplingParams(max_new_tokens=99))])
    batcher.submit([good])
    assert batcher.num_waiting == 1


def test_a_rollout_that_has_ended_cannot_go_on() -> None:
    request = Request("r", "g", (1, 2), 0, SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match="request r: this rollout has already ended"):
        make_batcher(10, 8).submit_partial(PartialRollout(request, (5, 6), (0.0, 0.0), 0))


def test_a_script_of_another_length_is_refused() -> None:
    request = Request("r", "g", (1, 2), 0, SamplingParams(max_new_tokens=4), script_ids=(5, 6))
    with pytest.raises(ValueError, match="request r: a script of 2 tokens"):
        make_batcher(10, 8).submit([request])


def test_a_group_with_a_prompt_of_one_token_is_seated_at_once() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    bench.submit(make_group("g", 5, 1, 4))
    assert len(bench.step().seats) == 5


def test_withdrawing_what_is_not_here_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        make_batcher(10, 8).withdraw("nobody")
