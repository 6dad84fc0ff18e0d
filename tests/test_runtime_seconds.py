"""Where the seconds of rollout workers go: each to one account, whatever they wait for and whenever they start."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from test_runtime_pool import Clock, Shelf, Stage, engine_of, version_of
from tiny_models import group

from slipstream.observe.ledger import Entry, shares
from slipstream.runtime.rollout_messages import Beat, SampleGroup, Spent
from slipstream.runtime.rollout_worker import PastTexts, RolloutWorker


def test_seconds_go_to_accounts_and_none_is_lost() -> None:
    said: list[Any] = []
    clock = Clock()
    worker = RolloutWorker(engine_of(), Shelf(), PastTexts(), said.append, clock)
    for tick in range(60):
        if tick == 10:
            worker.obey(SampleGroup(tuple(group("1/0", (5, 6, 7), 2, max_new_tokens=20))))
        clock.now_s += 0.1
        worker.step()
    clock.now_s += 0.6
    worker.step()
    spent = sum((message.spent for message in said if hasattr(message, "spent")), Spent())
    assert spent.prefill_s + spent.decode_s + spent.weights_s + spent.idle_s == pytest.approx(6.6)
    assert spent.decode_s > spent.prefill_s > 0 and spent.idle_s > 1


def test_held_out_prompts_have_an_account_of_their_own_by_their_share_of_the_sequences() -> None:
    said: list[Any] = []
    clock = Clock()

    class Ticking(RolloutWorker):
        """Each step takes 100 ms."""

        def _lap(self) -> float:
            clock.now_s += 0.1
            return super()._lap()

    worker = Ticking(engine_of(), Shelf(), PastTexts(), said.append, clock)
    worker.obey(SampleGroup(tuple(group("eval/heldout/0/0", (5, 6, 7), 1, max_new_tokens=20))))
    worker.obey(SampleGroup(tuple(group("1/0", (8, 6, 7), 3, max_new_tokens=20))))
    while worker.has_work:
        worker.step()
    spent = sum((message.spent for message in said if isinstance(message, Beat)), Spent())
    sampled_s = spent.prefill_s + spent.decode_s + spent.evaluation_s
    assert spent.evaluation_s == pytest.approx(sampled_s / 4, rel=0.15) and spent.idle_s < 1
    paces = [pace for message in said if isinstance(message, Beat) for pace in message.paces]
    steps, sequences, seconds = (sum(column) for column in zip(*paces, strict=True))
    assert sequences / steps == pytest.approx(4, abs=0.5) and seconds == pytest.approx(sampled_s)


def test_a_worker_that_starts_while_others_work_has_each_second_once() -> None:
    """Also if steps are closed meanwhile."""
    stage = Stage("sync", 2)
    stage.pool.give_weights(version_of(0))
    slow = stage.links["rollout-1"]
    slow.hangs = True
    entries = list[Entry]()
    for step in range(1, 5):
        stage.pool.ask(1, "prompt", group(f"{step}/0", (5, 6, 7), 1, max_new_tokens=10))
        slow.hangs = step < 3
        stage.until_done()
        entries += stage.ledger.close(step, stage.clock.now_s)
        if step == 2:
            joined_s = stage.clock.now_s
    seconds = Counter[str]()
    for entry in entries:
        seconds[entry.device] += entry.seconds
    assert seconds == {link: pytest.approx(stage.clock.now_s) for link in stage.links}
    started_s = sum(one.seconds for one in entries if (one.device, one.account) == ("rollout-1", "start"))
    assert joined_s <= started_s <= joined_s + 1


def test_a_worker_without_work_waits_for_others_for_grades_or_for_training() -> None:
    """Every second is on one account."""
    stage, grading = Stage("sync", 2), [False]
    stage.pool._is_grading = lambda: grading[0]
    stage.pool.give_weights(version_of(0))
    stage.pool.ask(1, "prompt", group("1/0", (5, 6, 7), 1, max_new_tokens=30))  # one of the two has nothing to do
    while stage.pool.has_work:
        stage.advance()
    for tick in range(20):
        grading[0] = tick < 10
        stage.advance()
    found = shares(stage.ledger.close(1, stage.clock.now_s))
    seconds = {device: sum(spent.values()) for device, spent in found.items()}
    assert seconds == {"rollout-0": pytest.approx(1), "rollout-1": pytest.approx(1)}
    idle = min(found.values(), key=lambda spent: spent.get("decode", 0.0))
    for spent in found.values():
        assert spent["reward wait"] == pytest.approx(spent["training wait"], rel=0.3)
        assert spent.get("idle", 0.0) < 0.1
    assert idle["tail wait"] > 0.3 and "decode" not in idle
