"""Real processes train a drafter of the tiny model together; some are killed, called away, come late; nobody's rollouts
are other than without any drafter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_workers import Gate, Texts, taught_by, worker
from test_draft_history import generate, groups
from test_draft_learned import target
from test_draft_lesson import packed, windows_of

from slipstream.draft import versions
from slipstream.draft.eagle import build_draft
from slipstream.draft.lesson import lesson_loss
from slipstream.draft.saved import DrafterState
from slipstream.runtime.drafter_session import DrafterSession
from slipstream.schedule.coordinator import Coordinator
from slipstream.schedule.events import EndSession, Item, Lend, LessonsAdded, Publish, Recall, TrainRound, WorkerLeft
from slipstream.types import Request, Rollout, SamplingParams

Work = list[list[Request]]

UPDATES = 3
LESSONS = 1000
"""A round's, so that it is here that one is begun."""
SOON_S = 120.0


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def held_out_loss(state: DrafterState, texts: Texts) -> float:
    model = target()
    draft = build_draft(model.config, "eagle3")
    draft.load_state_dict(state.weights, strict=False)
    windows = windows_of(model, texts, 4)
    lesson = packed(windows, sum(len(window.ids_T) for window in windows))
    with torch.no_grad():
        return float(
            lesson_loss(draft, model.get_input_embeddings(), model.get_output_embeddings(), lesson, passes=4).loss
        )


class Crew(DrafterSession):
    def __init__(self, folder: Path, texts: dict[str, Texts]) -> None:
        self.said = list[Item]()
        self.texts, self.gates, self.pids = texts, folder / "gates", dict[str, int]()
        self.gates.mkdir()
        coordinator = Coordinator(least_idle=1, least_lessons=LESSONS)
        super().__init__(folder / "drafter", updates=UPDATES, coordinator=coordinator, record=self.said.append)

    def begin(self, name: str) -> None:
        self.pids[name] = self.start(name, worker, self.texts[name], ord(name), self.gates)

    def until_here(self, *names: str) -> None:
        self.wait_until(lambda: set(names) <= set(self.here), SOON_S, f"{names} have started")

    def lend(self, *names: str) -> None:
        for name in names:
            self.tell(Lend(name))

    def gate(self, name: str) -> Gate:
        gate = Gate(self.gates, name)
        gate.shut()
        return gate

    def until_waits(self, gate: Gate) -> None:
        for _ in range(int(SOON_S / 0.05)):
            if gate.somebody_waits:
                return
            self.wait(0.05)
        raise TimeoutError("nobody came to the gate")

    def begin_round(self) -> None:
        self.tell(LessonsAdded(LESSONS))

    def end_round(self) -> DrafterState:
        """When it is published, and taken in by all who are there."""
        num_ended = sum(isinstance(item, EndSession) for item in self.said)
        self.wait_until(
            lambda: sum(isinstance(item, EndSession) for item in self.said) > num_ended, SOON_S, "the round is over"
        )
        return versions.load_version(self.folder, self.version)

    def until_taken(self, *names: str) -> None:
        self.wait_until(lambda: all(self.here[name] == self.version for name in names), SOON_S, "all have it")

    def sampled(self, name: str, count: int) -> dict[str, Rollout]:
        got = list[tuple[str, Rollout]]()

        def all_there() -> bool:
            got.extend(self.take_results())
            return len(got) >= count

        self.wait_until(all_there, SOON_S, f"{name} has sampled {count}")
        assert {sender for sender, _ in got} == {name}
        return {rollout.request.uid: rollout for _, rollout in got}


@pytest.mark.slow
def test_workers_train_together_are_killed_called_away_and_come_late(tmp_path: Path) -> None:
    long, _ = generate(groups(4, 3))
    by_group = [[[*one.request.prompt_ids, *one.token_ids] for one in list(long.values())[n::4]] for n in range(4)]
    short = SamplingParams(max_new_tokens=20, stop_token_ids=(2,))
    work = [[replace(request, sampling=short) for request in group] for group in groups(2, 3)]
    plain, _ = generate(work)
    with Crew(tmp_path, dict(zip("abc", by_group, strict=False))) as crew, one_thread():
        crew.begin("a")
        crew.begin("b")
        crew.until_here("a", "b")
        first = versions.load_version(crew.folder, 0)
        last = together_as_by_hand(crew, first)
        assert held_out_loss(last, by_group[3]) < held_out_loss(first, by_group[3]) - 0.5
        assert called_away(crew, work[:1]) == {request.uid: plain[request.uid] for request in work[0]}
        drafted = the_leader_is_killed_while_somebody_samples(crew, work)
        assert drafted == plain and any(4 in rollout.origins for rollout in drafted.values()), "some drafts were right"
        a_follower_is_killed(crew)
        pids = list(crew.pids.values())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "none is left"


def together_as_by_hand(crew: Crew, first: DrafterState) -> DrafterState:
    """a and b train four rounds, of which the first is computed here as well."""
    crew.lend("a", "b")
    crew.begin_round()
    state = crew.end_round()
    crew.begin("c")  # late: there is a version 1
    shares = []
    for name in "ab":
        twin = taught_by(crew.texts[name], ord(name))
        twin.load_state_dict(first.tensors, 0)
        twin.train(UPDATES)
        shares.append({key: one.clone() for key, one in twin.weights()})
    assert (state.step, state.num_updates) == (1, 2 * UPDATES) and state.weights.keys() == shares[0].keys()
    for name, tensor in state.weights.items():
        by_hand = (UPDATES * shares[0][name] + UPDATES * shares[1][name]) / (2 * UPDATES)
        assert torch.allclose(tensor, by_hand, atol=1e-6), name
        assert not torch.allclose(shares[0][name], shares[1][name], atol=1e-5), "they have learned different things"
    for _ in range(3):
        crew.begin_round()
        state = crew.end_round()
    crew.until_taken("a", "b")
    assert state.step == crew.version == 4
    return state


def called_away(crew: Crew, work: Work) -> dict[str, Rollout]:
    """a is recalled in the middle of an update, and samples once that is over; the round goes on without it."""
    gate = crew.gate("a-update")
    crew.begin_round()
    crew.until_waits(gate)
    crew.tell(Recall("a"))
    crew.give("a", work)
    state = crew.end_round()  # of b alone: a is still at its gate
    assert (state.step, state.num_updates) == (5, 9 * UPDATES) and crew.coordinator.idle == ("b",)
    gate.open()
    rollouts = crew.sampled("a", 3)
    assert crew._workers["a"].num_given_up == 1, "the update under way was its last"
    return rollouts


def the_leader_is_killed_while_somebody_samples(crew: Crew, work: Work) -> dict[str, Rollout]:
    """b leads, and is killed in the middle of an update; c, who came late, samples before, meanwhile and after."""
    crew.until_here("c")
    assert crew.here["c"] > 0, "not the first one"
    crew.until_taken("c")
    crew.lend("a")
    at_step, at_update = crew.gate("c-step"), crew.gate("b-update")
    crew.give("c", work)
    crew.begin_round()
    crew.until_waits(at_step)
    crew.until_waits(at_update)
    assert crew.said[-1] == TrainRound(6, "b", ("b", "a"))
    os.kill(crew.pids["b"], signal.SIGKILL)
    state = crew.end_round()
    assert WorkerLeft("b") in crew.said and crew.said[-2:] == [Publish(6, "a"), EndSession(6)]
    assert (state.step, state.num_updates) == (6, 10 * UPDATES), "one version on, of what a has learned"
    at_step.open()
    rollouts = crew.sampled("c", 6)
    crew.until_taken("a", "c")
    assert crew.here == {"a": 6, "c": 6}
    return rollouts


def a_follower_is_killed(crew: Crew) -> None:
    """c, who has learned in one round by then."""
    crew.lend("c")
    crew.begin_round()
    state = crew.end_round()
    assert (state.step, state.num_updates) == (7, 12 * UPDATES), "both have learned"
    gate = crew.gate("c-update")
    crew.begin_round()
    crew.until_waits(gate)
    os.kill(crew.pids["c"], signal.SIGKILL)
    state = crew.end_round()
    assert (state.step, state.num_updates) == (8, 13 * UPDATES) and crew.coordinator.idle == ("a",)
