"""The pool with workers in this process that are lost at any moment. The words of the module's head: each rollout that
was asked for ends exactly once, whichever workers are lost or hang meanwhile, with the tokens that an undisturbed
worker would have given it; a worker samples nothing before it has the newest weights that were given out, and none with
other content than was published; one that is lost is started again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from draft_worlds import drive, world_with
from tiny_models import group, small_llama
from transformers import PreTrainedModel

from slipstream.draft.selector import Choice, Selector
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import OFF, Strategy
from slipstream.models.weights import fingerprint, named_weights, write_weights
from slipstream.observe.ledger import Ledger
from slipstream.runtime.pool import MAX_LOSSES, Pool, WorkerBroke
from slipstream.runtime.rollout_messages import Broke, DraftAs, GiveBack, Grown, Here, SampleGroup
from slipstream.runtime.rollout_worker import PastTexts, RolloutWorker
from slipstream.schedule.allocation import Allocator, StepSeen
from slipstream.schedule.events import (
    DraftChosen,
    FleetAction,
    FleetEvent,
    Item,
    RolloutsAsked,
    Sample,
    WorkerJoined,
    WorkerLeft,
)
from slipstream.schedule.fleet import Fleet
from slipstream.schedule.rules import MODES
from slipstream.types import Request, Rollout, WeightVersion

SLOTS = 6
NOTHING_KNOWN: Mapping[str, object] = {}
SEEDS = {0: 0, 1: 1}
"""By version: of the weights."""


def engine_of(seed: int = 0) -> Engine:
    return Engine(small_llama(seed), max_sequences=SLOTS, max_length=96)


MODELS = {number: small_llama(seed) for number, seed in SEEDS.items()}


def version_of(number: int) -> WeightVersion:
    return WeightVersion(number, fingerprint(MODELS[number]))


class Shelf:
    def catch_up(self, model: PreTrainedModel, number: int) -> WeightVersion:
        write_weights(model, named_weights(MODELS[number]))
        return WeightVersion(number, fingerprint(model))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class LocalLink:
    """A worker in this process, which takes a step now and then, tells all its tokens, and can be lost."""

    def __init__(self, name: str, clock: Clock, shelf: Any, selector: Selector | None = None) -> None:
        self.name, self.pid, self.log_file = name, 0, Path("log")
        self._inbox: list[Any] = []
        self._outbox: list[Any] = [Here(SLOTS, ((1, 0.01), (SLOTS, 0.02)))]
        self.is_gone = self.hangs = False
        self.clock = clock
        # It starts with other weights than any version has.
        say = self._outbox.append
        self.worker = RolloutWorker(engine_of(9), shelf, PastTexts(), say, clock, selector=selector or Selector())

    def send(self, message: object) -> None:
        self._inbox.append(message)

    def run(self) -> None:
        if not self.is_gone and not self.hangs:
            inbox, self._inbox[:] = list(self._inbox), []
            for message in inbox:
                self.worker.obey(message)
            self.is_gone = self.worker.is_leaving
            if not self.is_gone:
                self.worker.step()

    def receive(self) -> list[Any]:
        said, self._outbox[:] = list(self._outbox), []
        return said

    def how_it_ended(self) -> str:
        return f"{self.name} was ended. Its log: {self.log_file}"

    def kill(self) -> None:
        self.is_gone = True

    def close(self) -> None:
        self.is_gone = True


class Stage:
    """A pool and what is played on it."""

    def __init__(
        self,
        mode: str,
        num_workers: int,
        silence_s: float = 60.0,
        shelf: Any = None,
        drafting: Mapping[str, object] = NOTHING_KNOWN,
    ) -> None:
        self.clock, self.links, self.noted, self.said = Clock(), dict[str, LocalLink](), list[Item](), list[str]()
        self.started: list[LocalLink] = []
        self.selector = Selector()
        self.shelf = shelf or Shelf()
        self.ledger = Ledger()
        self.pool = Pool(
            MODES[mode],
            num_workers,
            self.start,
            silence_s=silence_s,
            ledger=self.ledger,
            note=self.noted.append,
            say=self.said.append,
            clock=self.clock,
            drafting=drafting,
        )

    def start(self, name: str) -> LocalLink:
        self.links[name] = LocalLink(name, self.clock, self.shelf, self.selector)
        self.started.append(self.links[name])
        return self.links[name]

    def advance(self, chance: random.Random | None = None) -> list[Rollout]:
        self.clock.now_s += 0.3
        for link in list(self.links.values()):
            if chance is None or chance.random() < 0.8:
                link.run()
        return self.pool.advance()

    def until_done(self, chance: random.Random | None = None) -> dict[str, Rollout]:
        ended: dict[str, Rollout] = {}
        for _ in range(3000):
            for rollout in self.advance(chance):
                assert rollout.request.uid not in ended, "twice"
                ended[rollout.request.uid] = rollout
            if not self.pool.has_work:
                return ended
        raise AssertionError("it never ends")


def requests_of(number: int, samples: int = 3) -> list[Request]:
    prompt = tuple((7 * number + place) % 90 + 3 for place in range(4 + number % 5))
    return group(f"1/{number}", prompt, samples, max_new_tokens=8 + 5 * (number % 6))


def undisturbed(groups: list[list[Request]], seed: int = 0) -> dict[str, tuple[Any, ...]]:
    engine = engine_of(seed)
    for requests in groups:
        engine.submit(requests)
    ended: list[Rollout] = []
    while engine.has_work:
        ended += engine.step()
    return {rollout.request.uid: (rollout.token_ids, rollout.logprobs, rollout.finish_reason) for rollout in ended}


def content(rollouts: dict[str, Rollout]) -> dict[str, tuple[Any, ...]]:
    return {uid: (one.token_ids, one.logprobs, one.finish_reason) for uid, one in rollouts.items()}


GROUPS = [requests_of(number) for number in range(8)]


@pytest.mark.parametrize("mode", sorted(MODES))
def test_two_workers_give_what_one_engine_gives(mode: str) -> None:
    stage = Stage(mode, 2)
    stage.pool.give_weights(version_of(0))
    for number, requests in enumerate(GROUPS):
        stage.pool.ask(1, f"prompt {number}", requests)
    ended = stage.until_done()
    assert content(ended) == undisturbed(GROUPS)
    assert {(one.first_version, one.last_version) for one in ended.values()} == {(0, 0)}
    assert stage.pool.num_lost == 0 and stage.pool.live == 0


def test_the_fleet_is_told_the_tokens_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RolloutsAsked] = []
    on_event = Fleet.on_event

    def heard(self: Fleet, event: FleetEvent, now_s: float) -> list[FleetAction]:
        if isinstance(event, RolloutsAsked):
            asked.append(event)
        return on_event(self, event, now_s)

    monkeypatch.setattr(Fleet, "on_event", heard)
    stage = Stage("sync", 1)
    for number, requests in enumerate(GROUPS):
        stage.pool.ask(1, f"prompt {number}", requests)
    stage.advance()
    assert [one.prompts for one in asked] == [
        tuple((f"prompt {number}", requests[0].prompt_ids) for number, requests in enumerate(GROUPS))
    ]


@pytest.mark.parametrize("seed", range(6))
def test_workers_that_are_lost_or_hang_harm_no_rollout(seed: int) -> None:
    chance = random.Random(seed)
    stage = Stage(sorted(MODES)[seed % 3], 3, silence_s=2.0)
    stage.pool.give_weights(version_of(0))
    for number, requests in enumerate(GROUPS):
        stage.pool.ask(1, f"prompt {number}", requests)
    ended: dict[str, Rollout] = {}
    num_harmed = 0
    for tick in range(400):
        if tick % 9 == 8 and num_harmed < 6:
            link = stage.links[chance.choice(sorted(stage.links))]
            num_harmed += 1
            if chance.random() < 0.5:
                link.kill()
            else:
                link.hangs = True
        for rollout in stage.advance(chance):
            assert rollout.request.uid not in ended, "twice"
            ended[rollout.request.uid] = rollout
    assert not stage.pool.has_work
    assert content(ended) == undisturbed(GROUPS)
    assert stage.pool.num_lost >= 4 and len(stage.started) == 3 + stage.pool.num_lost
    assert sum(isinstance(event, WorkerLeft) for event in stage.noted) > 0


def test_a_lost_rollout_goes_on_from_its_tokens() -> None:
    stage = Stage("sync", 2)
    stage.pool.give_weights(version_of(0))
    requests = group("1/0", (5, 6, 7), 1, max_new_tokens=40)
    stage.pool.ask(1, "prompt", requests)
    for _ in range(20):
        stage.advance()
    busy = next(link for link in stage.links.values() if link.worker.has_work)
    other = next(link for link in stage.links.values() if link is not busy)
    busy.kill()
    ended = stage.until_done()
    assert content(ended) == undisturbed([requests])
    assert stage.pool.num_resumed == 1
    sampled = other.worker._engine.facts().decode_tokens
    assert 0 < sampled < 30, "the other worker sampled only the rest"


@pytest.mark.parametrize("seed", range(3))
def test_workers_come_and_go_and_no_rollout_is_harmed(seed: int) -> None:
    chance = random.Random(seed)
    stage = Stage(sorted(MODES)[seed], 2)
    stage.pool.give_weights(version_of(0))
    for number, requests in enumerate(GROUPS):
        stage.pool.ask(1, f"prompt {number}", requests)
    ended: dict[str, Rollout] = {}
    for tick in range(200):
        if tick in (12, 24, 40):
            stage.pool.resize({12: 4, 24: 1, 40: 3}[tick])
        ended |= {rollout.request.uid: rollout for rollout in stage.advance(chance)}
    assert not stage.pool.has_work and stage.pool.num_workers == 3
    assert content(ended) == undisturbed(GROUPS)
    assert stage.pool.num_lost == 0, "who leaves is not lost"
    assert {event.worker for event in stage.noted if isinstance(event, WorkerLeft)} == {
        *("rollout-1", "rollout-2", "rollout-3"),
    }
    num_sampled = sum(link.worker._engine.facts().decode_tokens for link in stage.started)
    assert num_sampled == sum(len(rollout.token_ids) for rollout in ended.values()), "no token is sampled twice"


def test_weights_are_there_before_anything_later_is_sampled() -> None:
    stage = Stage("sync", 2)
    stage.pool.give_weights(version_of(0))
    stage.pool.ask(1, "prompt", GROUPS[0])
    stage.until_done()
    stage.pool.give_weights(version_of(1))
    second = [group("2/9", (9, 8, 7), 3)]
    stage.pool.ask(2, "other", second[0])
    assert stage.pool.live == 0
    stage.links["rollout-0"].kill()  # its successor catches up by itself
    ended = stage.until_done()
    assert stage.pool.live == 1
    assert content(ended) == undisturbed(second, seed=1)
    assert {one.first_version for one in ended.values()} == {1}


def test_a_worker_with_wrong_weights_samples_nothing() -> None:
    class Spoiled(Shelf):
        num_calls = 0

        def catch_up(self, model: PreTrainedModel, number: int) -> WeightVersion:
            self.num_calls += 1
            if self.num_calls == 1:
                return WeightVersion(number, fingerprint(model))  # nothing was written
            return super().catch_up(model, number)

    stage = Stage("sync", 1, shelf=Spoiled())
    stage.pool.give_weights(version_of(0))
    stage.pool.ask(1, "prompt", GROUPS[3])
    assert content(stage.until_done()) == undisturbed(GROUPS[3:4])
    assert stage.pool.num_lost == 1
    assert any("other weights than were published" in line for line in stage.said)


def test_workers_that_cannot_live_end_the_run_with_their_log() -> None:
    stage = Stage("sync", 1)
    stage.pool.give_weights(version_of(0))
    with pytest.raises(WorkerBroke, match=r"one after the other; the last: rollout-0 was ended\. Its log: log"):
        for _ in range(MAX_LOSSES + 1):
            stage.links["rollout-0"].kill()
            stage.advance()


def test_an_error_of_the_work_itself_is_told_as_it_is() -> None:
    stage = Stage("sync", 1)
    stage.links["rollout-0"]._outbox.append(Broke("the model gave logits that are not numbers"))
    with pytest.raises(
        WorkerBroke, match="rollout worker rollout-0: the model gave logits that are not numbers\nrollout-0 was"
    ):
        stage.advance()


def test_a_worker_that_cannot_start_beside_others_is_told_of_and_left_out() -> None:
    """As when there is no memory for one more."""
    stage = Stage("sync", 1)
    stage.pool.give_weights(version_of(0))
    while not any(isinstance(event, WorkerJoined) for event in stage.noted):
        stage.advance()
    stage.pool.resize(2)
    stage.links["rollout-1"]._outbox.append(Broke("CUDA out of memory"))
    stage.advance()
    stage.links["rollout-1"].kill()
    stage.advance()
    assert stage.pool.num_workers == 1
    assert any("rollout-1 cannot start: CUDA out of memory" in line for line in stage.said)


def test_what_a_worker_drafts_from_now_on_is_noted_once() -> None:
    stage = Stage("sync", 1)
    stage.selector.choices.append(Choice(8, Strategy(4.0, 1), "it gives more"))
    for _ in range(8):
        stage.advance()
    assert [one for one in stage.noted if isinstance(one, DraftChosen)] == [
        DraftChosen(8, "4 drafts, 1+", "it gives more")
    ]


def test_what_workers_know_of_ways_to_draft_is_kept_and_given_to_those_who_come() -> None:
    stage = Stage("sync", 1)
    drive(stage.selector, world_with(0.8, 0.02), 8, 300)
    stage.pool.give_weights(version_of(0))
    while not stage.pool.drafting:
        stage.advance()
    experienced, best = stage.selector, stage.selector.best(8)
    assert best != OFF and stage.pool.drafting == experienced.state_dict()
    stage.selector = Selector()
    stage.pool.resize(2)
    while stage.pool.num_joined < 2:
        stage.advance()
    assert stage.selector.best(8) == best, "a worker that comes later begins with what others have measured"
    assert experienced.best(8) == best

    saved = json.loads(json.dumps(stage.pool.drafting))
    resumed = Stage("sync", 1, drafting=saved)
    resumed.pool.give_weights(version_of(0))
    while not resumed.pool.num_joined:
        resumed.advance()
    assert resumed.selector.best(8) == best, "and a run with what is in its checkpoint"


def test_a_worker_tells_tokens_once_and_ignores_what_has_ended() -> None:
    said: list[Any] = []
    clock = Clock()
    worker = RolloutWorker(engine_of(), Shelf(), PastTexts(), said.append, clock)
    worker.obey(DraftAs({"8 plain": {}}))  # of a run that drafted, which this one does not
    requests = group("1/0", (5, 6, 7), 2, max_new_tokens=30)
    worker.obey(SampleGroup(tuple(requests)))
    told: dict[str, list[int]] = {request.uid: [] for request in requests}
    for _ in range(20):
        clock.now_s += 0.2
        worker.step()
    pieces = [piece for message in said if isinstance(message, Grown) for piece in message.pieces]
    for piece in pieces:
        told[piece.request.uid] += piece.token_ids
    wanted = undisturbed([requests])
    assert all(len(tokens) > 5 and tuple(tokens) == wanted[uid][0][: len(tokens)] for uid, tokens in told.items())
    while worker.has_work:
        worker.step()
    said.clear()
    worker.obey(GiveBack("1/0/0"))
    assert said == []


def test_a_run_that_may_choose_adds_a_worker_and_gives_it_back_and_no_rollout_is_harmed() -> None:
    """Sampling takes long at first; later there is little to sample."""
    stage, allocator = Stage("sync", 1), Allocator(1, 2)
    stage.pool.give_weights(version_of(0))
    asked: list[list[Request]] = []
    ended: dict[str, Rollout] = {}
    sizes, wishes = [], []
    for step in range(1, 25):
        began_s, num_groups = stage.clock.now_s, 4 if step <= 13 else 1
        groups = [group(f"{step}/{place}", (5, 6, 7 + place), 3, max_new_tokens=4) for place in range(num_groups)]
        for number, requests in enumerate(groups):
            stage.pool.ask(1, f"prompt {number}", requests)
        asked += groups
        ended |= stage.until_done()
        sizes.append(stage.pool.num_joined)
        num_tokens = 12.0 * num_groups
        seen = StepSeen(
            step_s=stage.clock.now_s - began_s,
            num_tokens=num_tokens,
            busy_s=0.3 * num_tokens / SLOTS,
            train_s=1.0,
            num_workers=stage.pool.num_joined,
            num_wanted=stage.pool.num_workers,
        )
        wish = allocator.observe(seen)
        if wish is not None:
            wishes.append(wish.num_workers)
            stage.pool.resize(wish.num_workers)
    assert wishes == [2, 1] and (sizes[0], max(sizes), sizes[-1]) == (1, 2, 1)
    assert content(ended) == undisturbed(asked)
    assert stage.pool.num_lost == 0
    assert [event.reason for event in stage.noted if isinstance(event, WorkerLeft)] == ["it was told to leave"]


def test_the_log_tells_where_rollouts_went_and_why_workers_were_lost() -> None:
    stage = Stage("sync", 2, silence_s=2.0)
    stage.pool.give_weights(version_of(0))
    stage.pool.ask(1, "prompt", group("1/0", (5, 6, 7), 6, max_new_tokens=40))
    for _ in range(12):
        stage.advance()
    stage.links["rollout-0"].hangs = True
    stage.until_done()
    lost = [event for event in stage.noted if isinstance(event, WorkerLeft)]
    assert len(lost) == 1 and lost[0].reason == "it said nothing for 2 s" and lost[0].tokens
    went = {(event.rollout, event.worker) for event in stage.noted if isinstance(event, Sample)}
    assert {(uid, "rollout-1") for uid, num_tokens in lost[0].tokens if num_tokens} <= went
    assert sum(isinstance(event, Sample) for event in stage.noted) < 12, "beginnings are not told"
