"""Rollout workers that train a drafter together, of which some are killed, hang, come late or never have time: their
rollouts are those of an engine without any drafter, and the drafter is there."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_draft_together import publish_once
from test_runtime_pool import GROUPS, SLOTS, Clock, LocalLink, Shelf, Stage, content, undisturbed, version_of
from tiny_models import group, small_llama
from transformers import PreTrainedModel

from slipstream.draft import online, together, versions
from slipstream.draft.history import HistoryDrafter
from slipstream.draft.learned import ModelGuesser
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.reading import Reader
from slipstream.draft.saved import DrafterState
from slipstream.draft.together import Member
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import Always, Strategy
from slipstream.models.packed import document_hidden
from slipstream.observe.ledger import Ledger
from slipstream.runtime.drafter_session import DrafterSession
from slipstream.runtime.drafter_worker import DrafterWorker
from slipstream.runtime.pool import Pool
from slipstream.runtime.rollout_messages import Here
from slipstream.runtime.rollout_worker import PastTexts, RolloutWorker
from slipstream.schedule.events import EndSession, Item, Rest, StopTraining, TrainRound
from slipstream.schedule.rules import MODES
from slipstream.types import Rollout, WeightVersion

UPDATES = 4
LONG = [group("1/90", (5, 6, 7), 1, max_new_tokens=60), group("1/91", (5, 6, 8), 2, max_new_tokens=10)]
MIXED = [group("1/80", (5, 6, 7), 4, max_new_tokens=6), group("1/81", (5, 6, 8), 8, max_new_tokens=40)]
"""As many as two workers have slots for."""
FEW, LATER = GROUPS[:3], [group("2/9", (9, 8, 7), 3)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(online, "LESSON_TOKENS", 64)


@pytest.fixture(autouse=True)
def files_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "PIECE_S", 60.0)


class LearningLink(LocalLink):
    """A worker whose engine drafts with the newest version, and that learns when it is told to."""

    def __init__(self, name: str, clock: Clock, shelf: Any, folder: Path) -> None:
        super().__init__(name, clock, shelf)
        guesser = ModelGuesser(num_slots=SLOTS)
        drafter = HistoryDrafter(
            num_slots=SLOTS,
            max_drafts=4,
            library_tokens=0,
            device=torch.device("cpu"),
            past=lambda ids: (),
            rule="aimd",
            guesser=guesser,
        )
        model, policy = small_llama(9).requires_grad_(False), Always(Strategy(4.0, 0, 4))
        engine = Engine(model, max_sequences=SLOTS, max_length=96, drafter=drafter, policy=policy)
        trainer = DrafterTrainer(model, lr=3e-3, temperature=1.0, memory_bytes=10**9, seed=int(name[-1]))
        publish_once(trainer, folder)
        member = Member(trainer, folder, name=name, target_digest="")

        def draft_as(state: DrafterState) -> None:
            guesser.write(state.weights.items())

        self.drafter = DrafterWorker(
            member, Reader(trainer, partial(document_hidden, model)), draft_as, self._outbox.append
        )
        self._outbox[:] = [Here(SLOTS, ((1, 0.01), (SLOTS, 0.02)), self.drafter.version)]
        self.worker = RolloutWorker(engine, shelf, PastTexts(), self._outbox.append, clock, self.drafter)


class Learning(Stage):
    def __init__(
        self, mode: str, num_workers: int, folder: Path, samples: int, silence_s: float = 60.0, shelf: Any = None
    ) -> None:
        self.folder = folder
        super().__init__(mode, num_workers, silence_s, shelf)
        for link in self.links.values():
            link.close()
        self.links.clear()
        self.started.clear()
        self.items, self.ledger = list[Item](), Ledger()
        self.session = DrafterSession(
            folder,
            lambda name, message: self.links[name].send(message),
            updates=UPDATES,
            samples=samples,
            record=self.items.append,
            say=self.said.append,
        )
        self.pool = Pool(
            MODES[mode],
            num_workers,
            self.start,
            silence_s=silence_s,
            ledger=self.ledger,
            note=self.noted.append,
            say=self.said.append,
            clock=self.clock,
            drafter=self.session,
        )
        self.pool.give_weights(version_of(0))

    def start(self, name: str) -> LocalLink:
        self.links[name] = LearningLink(name, self.clock, self.shelf, self.folder)
        self.started.append(self.links[name])
        return self.links[name]

    def at_it(self) -> list[str]:
        """Who is in the middle of something about the drafter."""
        return [name for name, link in self.links.items() if isinstance(link, LearningLink) and link.drafter.is_busy]

    def until(self, is_so: Any) -> dict[str, Rollout]:
        ended: dict[str, Rollout] = {}
        for _ in range(500):
            if is_so():
                return ended
            ended |= {rollout.request.uid: rollout for rollout in self.advance()}
        raise AssertionError("it never is")

    def all_have_it(self) -> bool:
        return set(self.session.here.values()) == {self.session.version} and len(self.session.here) == len(self.links)


def test_an_idle_worker_learns_while_another_samples_and_all_draft_with_what_came_of_it(tmp_path: Path) -> None:
    stage = Learning("sync", 2, tmp_path, samples=4)
    for number, requests in enumerate(LONG):
        stage.pool.ask(1, f"prompt {number}", requests)
    ended = stage.until(stage.at_it)
    (learner,) = stage.at_it()
    sampler = next(link for name, link in stage.links.items() if name != learner)
    assert sampler.worker.has_work and not sampler.drafter.is_busy  # type: ignore[attr-defined]
    ended |= stage.until(lambda: stage.session.version == 1 and stage.all_have_it())
    assert stage.pool.has_work, "the long one is not done yet, and goes on with the new drafter"
    ended |= stage.until_done()
    assert content(ended) == undisturbed(LONG)
    assert any(4 in rollout.origins for rollout in ended.values()), "some drafts were right"
    metrics = stage.pool.take_drafter_metrics()
    assert metrics["drafter/updates_in_tail"] == metrics["drafter/updates"] >= UPDATES // 2
    assert metrics["drafter/loss"] > 0
    assert versions.load_newest(tmp_path).target_digest == version_of(0).digest, "it is known whose drafter it is"
    stage.advance()
    accounts = {(one.device, one.account) for one in stage.ledger.close(1, stage.clock())}
    assert (learner, "drafter training") in accounts


@pytest.mark.slow
def test_work_calls_a_worker_away_before_its_next_update(tmp_path: Path) -> None:
    stage = Learning("sync", 1, tmp_path, samples=4)
    stage.pool.ask(1, "prompt", LONG[1])
    ended = stage.until(lambda: stage.session.take_metrics()["drafter/updates"] == 0 and stage.at_it())
    stage.advance()
    stage.pool.ask(1, "other", LONG[0])
    ended |= stage.until(lambda: any(isinstance(item, StopTraining) for item in stage.items))
    ended |= {rollout.request.uid: rollout for rollout in stage.advance()}
    assert not stage.at_it() and stage.links["rollout-0"].worker.has_work
    ended |= stage.until_done()
    assert content(ended) == undisturbed(LONG)
    stage.until(lambda: stage.session.version >= 1)


@pytest.mark.parametrize("leads", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_worker_killed_in_training_costs_no_rollout_and_one_version_at_most(tmp_path: Path, leads: bool) -> None:
    stage = Learning("sync", 2, tmp_path, samples=2 * sum(map(len, FEW)))
    for number, requests in enumerate(FEW):
        stage.pool.ask(1, f"prompt {number}", requests)
    ended = stage.until(lambda: len(stage.at_it()) == 2)
    (begun,) = (item for item in stage.items if isinstance(item, TrainRound))
    victim = begun.leader if leads else begun.members[-1]
    stage.advance()
    stage.links[victim].kill()
    stage.until(lambda: stage.items[-1] == EndSession(begun.session))
    assert stage.session.version == 1, "the others' round is whole"
    assert versions.load_newest(tmp_path).num_updates == UPDATES // 2, "of the one who is left"
    stage.until(lambda: victim in stage.session.here)
    stage.until(stage.all_have_it)
    stage.pool.give_weights(version_of(1))
    stage.pool.ask(2, "other", LATER[0])
    again = stage.until_done()
    assert content(ended) == undisturbed(FEW) and content(again) == undisturbed(LATER, seed=1)


class Same(Shelf):
    """New versions of the same weights, so that it shows what else has changed."""

    def catch_up(self, model: PreTrainedModel, number: int) -> WeightVersion:
        return WeightVersion(number, super().catch_up(model, 0).digest)


def test_if_nobody_ever_waits_all_learn_when_the_policy_changes(tmp_path: Path) -> None:
    """As in mode=async, where there is always more to sample."""
    stage = Learning("async", 2, tmp_path, samples=4, shelf=Same())
    for number, requests in enumerate(MIXED):
        stage.pool.ask(1, f"prompt {number}", requests)
    ended = stage.until(lambda: stage.session.coordinator.has_enough)
    assert all(link.worker._engine.has_work for link in stage.links.values())
    stage.pool.give_weights(WeightVersion(1, version_of(0).digest))
    both = ("rollout-0", "rollout-1")
    assert stage.items[-2:] == [Rest(both), TrainRound(1, "rollout-0", both)]
    ended |= stage.until(stage.at_it)
    assert all(link.worker._engine.has_work for link in stage.links.values()), "they rest from it"
    ended |= stage.until(lambda: stage.session.version == 1)
    assert stage.pool.has_work and stage.session.coordinator.idle == (), "they sample on"
    ended |= stage.until_done()
    assert content(ended) == undisturbed(MIXED)
    stage.until(stage.all_have_it)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_workers_no_rollout_is_harmed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stage = Learning(sorted(MODES)[seed], 3, tmp_path, samples=6, silence_s=2.0)
    for number, requests in enumerate(GROUPS):
        stage.pool.ask(1, f"prompt {number}", requests)
    ended: dict[str, Rollout] = {}
    for tick in range(250):
        if tick % 12 == 11 and tick < 100:
            link = stage.links[chance.choice(stage.at_it() or sorted(stage.links))]
            if chance.random() < 0.5:
                link.kill()
            else:
                link.hangs = True
        for rollout in stage.advance(chance):
            assert rollout.request.uid not in ended, "twice"
            ended[rollout.request.uid] = rollout
    assert not stage.pool.has_work and content(ended) == undisturbed(GROUPS)
    assert stage.pool.num_lost >= 4 and any(isinstance(item, TrainRound) for item in stage.items)
    before = stage.session.version
    stage.pool.give_weights(version_of(1))
    stage.pool.ask(2, "other", LATER[0])
    assert content(stage.until_done()) == undisturbed(LATER, seed=1)
    stage.until(lambda: stage.session.version > before and stage.all_have_it())
    assert not list(tmp_path.glob(".tmp-*")) and not (tmp_path / "shares").exists()
