"""Drafts of a learned model change no bit, whatever it says; in the step and in training it computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_draft_history import MAX_LENGTH, NUM_SLOTS, drafter_with, generate, groups, tiny
from torch import Tensor

from slipstream.draft.eagle import KINDS, DraftModel, Features, build_draft, feature_layers
from slipstream.draft.learned import ModelGuesser
from slipstream.engine.engine import Engine
from slipstream.engine.packing import DraftSizes
from slipstream.engine.sampling import SamplingRows, sample_plainly
from slipstream.engine.state import StepState
from slipstream.engine.strategy import OFF, Always, Feeding, StepResult, Strategy
from slipstream.models.attention import attend_causally
from slipstream.models.loading import load_model
from slipstream.models.packed import document_hidden, head_logits
from slipstream.types import MODEL_ORIGIN, Request, Rollout, SamplingParams

DEPTH = 4
SEED = 7
CPU = torch.device("cpu")


of_each_kind = pytest.mark.parametrize("kind", KINDS)


def sharp(kind: str, seed: int) -> DraftModel:
    """Untrained, but with opinions."""
    model = build_draft(tiny().config, kind, seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
    return model


def guessing(
    kind: str, strategy: Strategy, past: Sequence[Rollout] = (), **engine_changes: int
) -> tuple[ModelGuesser, Engine]:
    drafter = drafter_with(past, rule="aimd")
    drafter.guesser = ModelGuesser(num_slots=NUM_SLOTS, kind=kind)
    sizes = {"max_sequences": NUM_SLOTS, "max_length": MAX_LENGTH} | engine_changes
    return drafter.guesser, Engine(tiny(), drafter=drafter, policy=Always(strategy), **sizes)


@of_each_kind
@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        (Strategy(4.0, 0, DEPTH), {"steps_ahead": 2}),
        pytest.param(Strategy(2.0, 2, 3), {"kv_tokens": 512}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_poor_drafter_changes_no_bit(kind: str, strategy: Strategy, changes: dict[str, int]) -> None:
    plain, _ = generate(groups(3, 4))
    _, engine = guessing(kind, strategy, list(plain.values())[::2], **changes)
    drafted = rolled_out(engine)
    assert drafted == plain
    origins = {origin for rollout in drafted.values() for origin in rollout.origins}
    assert 4 in origins and (strategy.min_match > 0) == bool(origins & {1, 2, 3}), "some guesses are right by chance"


def rolled_out(engine: Engine) -> dict[str, Rollout]:
    """What the engine makes of the groups that `generate` is given."""
    for group in groups(3, 4):
        engine.submit(group)
    drafted: dict[str, Rollout] = {}
    while engine.has_work:
        drafted |= {rollout.request.uid: rollout for rollout in engine.step()}
    return drafted


def target() -> Any:
    """A copy of the engine's model that is not fused."""
    model = load_model("tiny", dtype=torch.float32, device=CPU)
    model.load_state_dict(tiny().state_dict())
    return model.requires_grad_(False)


def plain_chain(model: Any, kind: str, draft: DraftModel, ids: Tensor) -> list[int]:
    """What is drafted after `ids`, as the words of `eagle.py` have it: everything computed anew, one text."""
    features = Features(model, kind)
    document_hidden(model, ids, [len(ids)])
    weight, last = model.get_input_embeddings().weight, len(ids) - 1  # as they are, where a family scales them
    hidden = draft.fuse(features.take()[:last])
    residual, query, keys, values = draft.begin(weight[ids[1:]], hidden, torch.arange(last))
    hidden = draft.finish(residual, attend_causally(query, keys, values, draft.form))[-1:]
    tokens = []
    for place in range(DEPTH):
        one = torch.ones(1)
        rows = SamplingRows(
            seed_N2=torch.tensor([[SEED, 0]]),
            position_N=torch.tensor([len(ids) + place]),
            inverse_temperature_N=one,
            greedy_N=one < 0,
            top_k_N=torch.zeros(1, dtype=torch.long),
            top_p_N=one,
            min_p_N=torch.zeros(1),
        )
        logits = head_logits(model, draft.head_input(hidden))
        token, _ = sample_plainly(logits, rows, torch.full((1,), -torch.inf))
        tokens.append(int(token))
        residual, query, key, value = draft.begin(weight[token], hidden, torch.tensor([last + place]))
        keys, values = torch.cat([keys, key]), torch.cat([values, value])
        hidden = draft.finish(residual, attend_causally(query, keys, values, draft.form))
    return tokens


class Told(Always):
    """Sums what it is told that the drafter gave."""

    num_right = 0.0

    def observe(self, step: StepResult) -> None:
        assert (step.of_model is None) == (step.strategy.depth == 0)
        self.num_right += step.batch * (step.of_model or 0.0)


@pytest.mark.parametrize("strategy", [Strategy(4.0, 0, DEPTH), Strategy(4.0, 1, DEPTH), Strategy(4.0, 1)], ids=str)
def test_a_policy_is_told_how_many_of_its_drafts_were_right(strategy: Strategy) -> None:
    plain, _ = generate(groups(1, 1))
    _, engine = guessing("eagle3", strategy, list(plain.values()) if strategy.min_match else [])
    engine.policy = policy = Told(strategy)
    engine.submit(groups(1, 1)[0])
    while engine.has_work:
        engine.step()
    num_right = engine.take_draft_counts().tokens_from[MODEL_ORIGIN]
    assert policy.num_right == pytest.approx(num_right) and (num_right > 0) == (strategy.min_match == 0)


class CopyInStretches(Always):
    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        return Strategy(8.0, 1) if is_matching else self.strategy


def test_it_is_ready_to_draft_as_soon_as_a_stretch_of_copies_ends() -> None:
    plain, _ = generate(groups(1, 1))
    [past] = plain.values()
    text = (*past.token_ids[:20], *range(40, 60))
    guesser, engine = guessing("eagle3", Strategy(4.0, 8, DEPTH), [past])
    engine.policy = CopyInStretches(Strategy(4.0, 8, DEPTH))
    sampling = SamplingParams(max_new_tokens=len(text))
    engine.submit([Request("a", "a", past.request.prompt_ids, SEED, sampling, script_ids=text)])
    were_ready: list[bool] = []
    known, guess = list[int](), guesser.guess

    def watched(state: StepState, width_S: Tensor, found_S: Tensor, sizes: DraftSizes) -> Tensor:
        were_ready.append(bool(guesser.kept_at_S[0] == engine._state["known"][0]))
        known.append(int(state["known"][0]))
        return guess(state, width_S, found_S, sizes)

    guesser.guess = watched  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert max(later - before for before, later in pairwise(known)) > 8, "it was not asked for long"
    assert all(were_ready)


def scripted(uid: str, text: Sequence[int]) -> Request:
    return Request(uid, uid, (5, 6, 7), SEED, SamplingParams(max_new_tokens=len(text)), script_ids=tuple(text))


def watch(guesser: ModelGuesser) -> dict[int, list[int]]:
    """What is drafted for the first slot, by the tokens known then; none if nothing is."""
    seen: dict[int, list[int]] = {}
    guess = guesser.guess

    def watched(state: StepState, width_S: Tensor, found_S: Tensor, sizes: DraftSizes) -> Tensor:
        found = guess(state, width_S, found_S, sizes)
        if width_S[0]:
            seen[int(state["known"][0])] = state["drafts"][0, :DEPTH].tolist() if found[0] else []
        return found

    guesser.guess = watched  # type: ignore[method-assign]
    return seen


def drafted_by_hand(
    kind: str, draft: DraftModel, request: Request, seen: dict[int, list[int]], model: Any = None
) -> dict[int, list[int]]:
    """With as many tokens known. `model`: one that is not fused; by default as the engine's."""
    ids, model = torch.tensor([*request.prompt_ids, *request.script_ids]), model or target()
    return {known: plain_chain(model, kind, draft, ids[:known]) for known in seen}


@of_each_kind
@torch.inference_mode()
def test_what_it_drafts_in_the_step_is_what_it_drafts_by_hand(kind: str) -> None:
    draft = sharp(kind, 3)
    guesser, engine = guessing(kind, Strategy(4.0, 0, DEPTH))
    guesser.write(draft.state_dict().items())
    request = scripted("a", range(40, 60))
    engine.submit([request])
    seen = watch(guesser)
    while engine.has_work:
        engine.step()
    assert len(seen) > 10 and seen == drafted_by_hand(kind, draft, request, seen)


class AsksLater(Always):
    asks = False

    def __init__(self, strategy: Strategy, feeding: Feeding) -> None:
        super().__init__(strategy)
        self.feeding = feeding

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        return self.strategy if self.asks else OFF

    def feed(self, batch: int) -> Feeding:
        return self.feeding


@of_each_kind
@pytest.mark.parametrize("feeding", [Feeding.NOTHING, Feeding.KEYS])
@torch.inference_mode()
def test_kept_up_to_date_it_drafts_as_ever_and_fed_nothing_it_does_so_with_the_next_text(
    kind: str, feeding: Feeding
) -> None:
    draft = sharp(kind, 3)
    guesser, engine = guessing(kind, OFF)
    guesser.write(draft.state_dict().items())
    engine.policy = policy = AsksLater(Strategy(4.0, 0, DEPTH), feeding)
    seen = watch(guesser)
    first = scripted("a", range(40, 70))
    engine.submit([first])
    for _ in range(10):
        engine.step()
    assert not seen
    policy.asks = True
    while engine.has_work:
        engine.step()
    assert len(seen) > 10 and [known for known, drafts in seen.items() if not drafts] == [min(seen)], "not ready yet"
    del seen[min(seen)]
    assert (seen == drafted_by_hand(kind, draft, first, seen)) == (feeding == Feeding.KEYS)
    seen.clear()
    request = scripted("b", range(30, 50))
    engine.submit([request])
    while engine.has_work:
        engine.step()
    assert len(seen) > 10 and seen == drafted_by_hand(kind, draft, request, seen)


def test_features_are_taken_where_other_engines_take_them() -> None:
    assert feature_layers(30) == (2, 15, 27) and feature_layers(28) == (2, 14, 25)
    assert feature_layers(3) == (1, 2, 3) and feature_layers(1) == (0, 0, 1)
