"""A language model that learns lengths: it ranks prompts never seen, follows drift, and leaves its model alone."""

from __future__ import annotations

import random
import statistics

import pytest
import torch
from tiny_models import build_family

from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.loading import load_model
from slipstream.models.weights import fingerprint
from slipstream.schedule.lengths import tail_recall
from slipstream.train import length_model
from slipstream.train.length_model import LengthModel

pytestmark = pytest.mark.usefixtures("one_thread")

ALIKE, VOCABULARY = 12, 90
MARK = {"long": 7, "short": 11}
"""The one token that tells the kinds apart, somewhere in the prompt."""
MEANS = {"long": 400.0, "short": 40.0}


def drawn_prompts(first: int, num: int) -> dict[str, list[int]]:
    """Random tokens behind the same beginning; of both kinds by turns."""
    prompts = {}
    for number in range(first, first + num):
        dice = random.Random(number)
        kind = ("long", "short")[number % 2]
        ids = [*range(20, 20 + ALIKE), *(dice.randrange(40, VOCABULARY) for _ in range(6))]
        ids.insert(dice.randrange(ALIKE, len(ids)), MARK[kind])
        prompts[f"{kind} {number}"] = ids
    return prompts


def lengths_of(prompts: dict[str, list[int]], times: float = 1.0) -> dict[str, list[float]]:
    return {
        name: [times * MEANS[name.split()[0]] * random.Random(f"{name} {i}").uniform(0.7, 1.3) for i in range(4)]
        for name in prompts
    }


def tiny(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_model("tiny", dtype=dtype, device=torch.device("cpu"), seed=0)


def taught(seed: int = 0, steps: int = 1) -> LengthModel:
    """Weights of `tiny` are random: it may learn faster than a model that knows a language."""
    learner = LengthModel(tiny(), lr=3e-4, seed=seed)
    for step in range(steps):
        prompts = drawn_prompts(32 * step, 32)
        learner.learn_step(prompts, lengths_of(prompts))
    return learner


def test_it_ranks_prompts_never_seen_by_their_kind_and_follows_at_once_when_all_lengths_fall() -> None:
    learner, new = taught(steps=4), drawn_prompts(1000, 60)
    forecasts = learner.score(new)
    actual = {name: statistics.fmean(lengths) for name, lengths in lengths_of(new).items()}
    assert tail_recall(forecasts, actual, 0.5) >= 0.9
    typical = {kind: statistics.median(forecasts[name] for name in new if name.startswith(kind)) for kind in MEANS}
    assert all(0.5 < typical[kind] / mean < 2 for kind, mean in MEANS.items())
    prompts = drawn_prompts(500, 32)
    learner.learn_step(prompts, lengths_of(prompts, times=0.1))
    fallen = learner.score(new)
    assert 0.06 < statistics.median(fallen[name] / forecasts[name] for name in new) < 0.16


def test_top_layers_learn_and_nothing_else_changes() -> None:
    model = tiny()
    before = fingerprint(model)
    learner = LengthModel(model, num_layers=1, lr=1e-3)
    parts = {"below": learner._below, "top": learner._top}
    prints = {name: fingerprint(part) for name, part in parts.items()}
    prompts = drawn_prompts(0, 20)
    learner.learn_step(prompts, lengths_of(prompts))
    assert fingerprint(model) == before and fingerprint(learner._below) == prints["below"]
    assert fingerprint(learner._top) != prints["top"]
    assert len(learner._below.layers) == 2 and len(learner._top.layers) == 1
    assert not any(parameter.requires_grad for parameter in learner._below.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters()), "the model may go on being trained"


def test_a_model_that_is_trained_on_does_not_move_forecasts() -> None:
    model, prompts = tiny(), drawn_prompts(0, 20)
    learner = LengthModel(model)
    learner.learn_step(prompts, lengths_of(prompts))
    new = drawn_prompts(1000, 4)
    before = learner.score(new)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    learner._kept.clear()
    assert learner.score(new) == before


def test_the_same_seed_gives_the_same_forecasts_and_another_does_not() -> None:
    new = drawn_prompts(1000, 8)
    one, same, other = (taught(seed).score(new) for seed in (0, 0, 1))
    assert one == same != other


def test_many_at_once_are_forecast_as_one_by_one_and_whether_or_not_states_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = drawn_prompts(1000, 12)
    learner = taught()
    kept = learner.score(new)
    assert {name: learner.forecast(ids) for name, ids in new.items()} == pytest.approx(kept, rel=1e-4)
    monkeypatch.setattr(length_model, "KEPT_TOKENS", 50)
    monkeypatch.setattr(length_model, "BATCH_TOKENS", 64)
    forgetful = taught()
    assert forgetful.score(new) == pytest.approx(kept, rel=1e-3)
    assert forgetful._kept_tokens == sum(map(len, forgetful._kept)) <= 50


def test_frozen_layers_see_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, prompts = LengthModel(tiny()), drawn_prompts(0, 8)
    calls = []
    run = length_model.document_hidden
    monkeypatch.setattr(length_model, "document_hidden", lambda *given: calls.append(given[2]) or run(*given))
    for _ in range(3):
        learner.learn_step(prompts, lengths_of(prompts))
    assert [len(lengths) for lengths in calls] == [8]


def test_what_nothing_is_known_of_is_skipped() -> None:
    learner = LengthModel(tiny(torch.bfloat16))
    learner.learn_step({}, {"unknown": [3.0]})
    learner.learn_step({"empty": [5, 6]}, {"empty": []})
    assert not learner.has_learned
    with pytest.raises(AssertionError, match="has_learned"):
        learner.forecast([5, 6])
    learner.learn_step({"a": [5, 6], "unasked": [7]}, {"a": [30.0], "unknown": [3.0]})
    assert learner.has_learned and learner.forecast([5, 6]) == pytest.approx(30, rel=0.2)


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="granite cannot be cut"):
        LengthModel(build_family("granite", ATTENTION_NAME))
    with pytest.raises(ValueError, match="gpt_neox has no `layers`"):
        LengthModel(build_family("gpt_neox", ATTENTION_NAME))
    for num_layers in (0, 4):
        with pytest.raises(ValueError, match="has 3 layers"):
            LengthModel(tiny(), num_layers=num_layers)
    LengthModel(build_family("gemma3_text", ATTENTION_NAME), num_layers=1)
