"""One replica: a rollout is a function of (weights, prompt, seed, sampling) alone, and the books add up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, group, small_llama

from slipstream.engine import engine as engine_module
from slipstream.engine.engine import BrokenLogits, Engine
from slipstream.models.packed import document_hidden, head_logits
from slipstream.models.weights import named_weights
from slipstream.train.loss import logprobs_and_entropy
from slipstream.types import Request, Rollout

PROMPTS = [tuple(3 + (place * (number + 5)) % 90 for place in range(1 + number * 5 % 23)) for number in range(16)]
PROMPT = PROMPTS[3]


def build_engine(
    seed: int = 0, *, max_sequences: int = 8, max_length: int = 64, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Engine:
    return Engine(small_llama(seed, dtype=dtype), max_sequences=max_sequences, max_length=max_length, **kwargs)


def run(engine: Engine, groups: Iterable[Sequence[Request]]) -> dict[str, Rollout]:
    for requests in groups:
        engine.submit(requests)
    return finish(engine)


def finish(engine: Engine) -> dict[str, Rollout]:
    rollouts: dict[str, Rollout] = {}
    while engine.has_work:
        for rollout in engine.step():
            assert rollout.request.uid not in rollouts
            rollouts[rollout.request.uid] = rollout
    return rollouts


def test_weights_prompt_seed_and_sampling_each_matter() -> None:
    base = run(build_engine(), [group("g", PROMPT, 1)])["g/0"].token_ids
    assert run(build_engine(seed=1), [group("g", PROMPT, 1)])["g/0"].token_ids != base
    assert run(build_engine(), [group("g", PROMPT[1:], 1)])["g/0"].token_ids != base
    assert run(build_engine(), [group("g", PROMPT, 1, seed=1)])["g/0"].token_ids != base
    assert run(build_engine(), [group("g", PROMPT, 1, temperature=0.3)])["g/0"].token_ids != base


def test_a_stop_token_ends_a_rollout_and_is_its_last_token() -> None:
    free = run(build_engine(), [group("g", PROMPT, 6)])
    stops = (free["g/0"].token_ids[3], free["g/1"].token_ids[0])
    stopped = run(build_engine(), [group("g", PROMPT, 6, stop_token_ids=stops)])
    for uid, rollout in stopped.items():
        whole = free[uid].token_ids
        places = [place for place, token in enumerate(whole) if token in stops]
        assert rollout.token_ids == (whole[: places[0] + 1] if places else whole)
        assert rollout.finish_reason == ("stop" if places else "length")
        assert len(rollout.logprobs) == len(rollout.token_ids)


def test_the_length_limit_ends_a_rollout_even_at_the_last_place_of_its_page() -> None:
    engine = build_engine(max_length=len(PROMPT) + 7)
    rollouts = run(engine, [group("g", PROMPT, 3, max_new_tokens=7), group("h", PROMPT, 3, max_new_tokens=1)])
    assert {uid: len(rollout.token_ids) for uid, rollout in rollouts.items() if uid[0] == "g"} == dict.fromkeys(
        ("g/0", "g/1", "g/2"), 7
    )
    assert all(len(rollouts[f"h/{n}"].token_ids) == 1 for n in range(3))
    assert {rollout.finish_reason for rollout in rollouts.values()} == {"length"}


def test_a_prompt_that_is_too_long_is_refused_by_name() -> None:
    engine = build_engine(max_length=20)
    with pytest.raises(ValueError, match=r"request g/0: prompt of 15 tokens \+ 12 new tokens exceed the engine's 20"):
        engine.submit(group("g", (5,) * 15, 1))
    assert not engine.has_work


def test_a_paused_engine_stands_still_and_goes_on_unchanged() -> None:
    requests = group("g", PROMPT, 3)
    engine = build_engine()
    engine.submit(requests)
    engine.step()
    engine.pause()
    before = engine.facts()
    assert engine.step() == [] and engine.facts() == before and before.paused
    engine.resume()
    assert finish(engine) == run(build_engine(), [requests])


def test_new_weights_are_written_in_place_and_numbered() -> None:
    engine, other = build_engine(0), small_llama(1)
    storage = {name: tensor.data_ptr() for name, tensor in named_weights(engine.model)}
    before = engine.facts().version
    version = engine.apply_weights(named_weights(other), 5)
    assert {name: tensor.data_ptr() for name, tensor in named_weights(engine.model)} == storage
    assert version == engine.facts().version and version.number == 5 and version.digest != before.digest
    assert version.digest == build_engine(1).facts().version.digest, "the digest is of the content"
    assert [r.token_ids for r in run(engine, [group("g", PROMPT, 2)]).values()] == [
        r.token_ids for r in run(build_engine(1), [group("g", PROMPT, 2)]).values()
    ]


def test_a_rollout_records_the_versions_of_its_first_and_last_token() -> None:
    engine = build_engine()
    engine.apply_weights(list(named_weights(small_llama(0))), 3)
    engine.submit(group("g", PROMPT, 1))
    for _ in range(4):
        engine.step()
    engine.apply_weights(named_weights(small_llama(1)), 4)
    engine.submit(group("h", PROMPT, 1))
    rollouts = finish(engine)
    old = run(build_engine(0), [group("g", PROMPT, 1)])["g/0"]
    assert (rollouts["g/0"].first_version, rollouts["g/0"].last_version) == (3, 4)
    assert (rollouts["h/0"].first_version, rollouts["h/0"].last_version) == (4, 4)
    assert rollouts["g/0"].token_ids[:4] == old.token_ids[:4] and rollouts["g/0"].token_ids != old.token_ids


@pytest.mark.parametrize("weights", ["missing", "wrong shape", "unknown"])
def test_weights_that_do_not_fit_are_refused(weights: str) -> None:
    whole = dict(named_weights(small_llama(1)))
    name = next(iter(whole))
    changed = {
        "missing": {key: tensor for key, tensor in whole.items() if key != name},
        "wrong shape": whole | {name: torch.zeros(3)},
        "unknown": whole | {"model.extra": torch.zeros(3)},
    }[weights]
    engine = build_engine()
    before = engine.facts().version
    with pytest.raises(ValueError, match="weight"):
        engine.apply_weights(changed.items(), 1)
    assert engine.facts().version == before
    assert run(engine, [group("g", PROMPT, 1)]) == run(build_engine(), [group("g", PROMPT, 1)]), "nothing was written"


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_a_sequence_moved_to_another_engine_ends_as_if_it_had_stayed(steps: int) -> None:
    requests = group("g", PROMPT, 3)
    stayed = run(build_engine(), [requests])
    first, second = build_engine(max_sequences=2), build_engine()
    first.submit(requests)
    for _ in range(steps):
        first.step()
    second.submit(group("other", PROMPTS[5], 4))
    for uid in ("g/1", "g/0"):
        second.import_sequence(first.export_sequence(uid))
    moved = finish(first) | finish(second)
    assert {uid: moved[uid] for uid in stayed} == stayed


def test_a_sequence_too_long_for_the_other_engine_is_refused() -> None:
    first = build_engine()
    first.submit(group("g", PROMPT, 1))
    with pytest.raises(ValueError, match="g/0"):
        build_engine(max_length=8).import_sequence(first.export_sequence("g/0"))


def test_facts_add_up_and_every_prompt_is_prefilled_once() -> None:
    """Prompts of 1 token, and one whose last chunk is a single token, count like any other."""
    prompts = [*PROMPTS, (7,), tuple(3 + place % 90 for place in range(129))]
    groups = [group(f"g{number}", prompt, 4) for number, prompt in enumerate(prompts)]
    engine = build_engine(max_sequences=6, max_length=160)
    started = time.perf_counter()
    rollouts = run(engine, groups)
    facts = engine.facts()
    assert facts.prefill_tokens == sum(len(prompt) - 1 for prompt in prompts) and facts.num_preempted == 0
    assert facts.decode_tokens == sum(len(rollout.token_ids) for rollout in rollouts.values())
    assert (facts.num_running, facts.num_waiting, facts.num_free_pages, facts.num_pages) == (0, 0, 18, 18)
    assert 0 < facts.forward_s < time.perf_counter() - started and facts.num_forwards > 0


def test_facts_of_a_busy_engine() -> None:
    engine = build_engine(max_sequences=3)
    engine.submit(group("g", PROMPT, 5))
    assert (engine.facts().num_running, engine.facts().num_waiting) == (0, 5)
    engine.step()
    engine.step()
    facts = engine.facts()
    assert (facts.num_running, facts.num_waiting, facts.num_free_pages, facts.num_forwards) == (3, 2, 0, 2)
    assert facts.kv_bytes > 0 and facts.num_graphs == 0
    assert engine.has_work


def test_sequences_preempted_under_pressure_end_as_if_they_had_room() -> None:
    groups = [group(f"g{number}", PROMPTS[number], 2, max_new_tokens=150) for number in range(3)]
    roomy = run(build_engine(max_length=192, max_sequences=6), groups)
    for num_pages in (3, 7):
        engine = build_engine(max_length=192, max_sequences=6, kv_tokens=64 * num_pages)
        assert run(engine, groups) == roomy
        assert engine.facts().num_preempted > 0 and engine.facts().num_free_pages == num_pages


def test_a_replay_walks_the_recorded_tokens_and_reports_the_engines_own_logprobs() -> None:
    recorded = run(build_engine(), [group("g", PROMPT, 2)])
    replayed = run(
        build_engine(),
        [[dataclasses.replace(r.request, seed=9, script_ids=r.token_ids) for r in recorded.values()]],
    )
    assert {uid: r.token_ids for uid, r in replayed.items()} == {uid: r.token_ids for uid, r in recorded.items()}
    script = tuple(reversed(PROMPTS[9][:12]))
    other = run(
        build_engine(), [[dataclasses.replace(request, script_ids=script) for request in group("g", PROMPT, 2)]]
    )
    assert {r.token_ids for r in other.values()} == {script}


def test_logits_that_are_not_numbers_end_their_sequence_with_an_error_and_leave_the_engine_usable() -> None:
    engine = build_engine()
    good = [(name, tensor.clone()) for name, tensor in named_weights(engine.model)]
    engine.apply_weights([(name, torch.full_like(tensor, torch.nan)) for name, tensor in good], 1)
    engine.submit(group("g", PROMPT, 1))
    with pytest.raises(BrokenLogits, match=r"not numbers .* for g/0"):
        finish(engine)
    assert not engine.has_work and engine.facts().num_free_pages == engine.facts().num_pages
    engine.apply_weights(good, 0)
    assert run(engine, [group("h", PROMPT, 2)]) == run(build_engine(), [group("h", PROMPT, 2)])


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("running", ["keep", "wait", "abort"])
def test_running_sequences_keep_on_end_first_or_begin_again_with_new_weights(running: Any, steps_ahead: int) -> None:
    engine, requests = build_engine(max_sequences=2, steps_ahead=steps_ahead), group("g", PROMPT, 3)
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    engine.apply_weights(named_weights(small_llama(1)), 1, running)
    versions = {uid: (r.first_version, r.last_version) for uid, r in finish(engine).items()}
    begun = {"keep": (0, 1), "wait": (0, 0), "abort": (1, 1)}[running]
    assert versions == {"g/0": begun, "g/1": begun, "g/2": (1, 1)}


@pytest.mark.parametrize("steps_ahead", [1, 2, 20])
def test_once_all_have_ended_there_is_nothing_left_to_wait_for(steps_ahead: int) -> None:
    first = run(build_engine(), [group("g", PROMPT, 1)])["g/0"]
    engine = build_engine(steps_ahead=steps_ahead)
    stop = first.token_ids[len(first.token_ids) // 2]  # sooner than the host foresees
    run(engine, [group("g", PROMPT, 1, stop_token_ids=(stop,))])
    assert engine.facts().num_unread == 0
    engine.apply_weights(named_weights(small_llama(1)), 1, "wait")


def weight_bytes(engine: Engine) -> int:
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in engine.model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def cut_off(model: Any) -> Any:
    raise OSError("who sent them is gone")


@pytest.mark.parametrize("weights", [False, True])
def test_a_sleeping_engine_holds_no_keys_and_goes_on_as_if_it_had_not_slept(weights: bool) -> None:
    requests = group("g", PROMPT, 3)
    engine = build_engine()
    own = [(name, tensor.clone()) for name, tensor in named_weights(engine.model)]
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    assert engine.facts().kv_bytes > 0
    whole = weight_bytes(engine)
    engine.sleep(weights=weights)
    facts = engine.facts()
    assert (facts.kv_bytes, facts.num_running, facts.num_free_pages) == (0, 0, facts.num_pages)
    if weights:
        assert weight_bytes(engine) < 0.02 * whole
        with pytest.raises(AssertionError, match="apply_weights first"):
            engine.step()
        with pytest.raises(OSError, match="gone"):
            engine.change_weights(cut_off)
        with pytest.raises(AssertionError, match="apply_weights first"):
            engine.step()
        engine.apply_weights(own, 0)
    awake = {uid: rollout.token_ids for uid, rollout in finish(engine).items()}
    assert awake == {uid: rollout.token_ids for uid, rollout in run(build_engine(), [requests]).items()}


@pytest.mark.parametrize("running", ["wait", "abort"])
def test_preempted_sequences_end_or_begin_again_like_seated_ones(running: Any) -> None:
    """With pages for one sequence of three the others wait with their tokens."""
    groups = [group(f"g{number}", PROMPTS[number], 1, max_new_tokens=120) for number in range(3)]
    engine = build_engine(max_length=192, kv_tokens=192)
    for requests in groups:
        engine.submit(requests)
    while engine.facts().num_preempted == 0:
        assert engine.step() == []
    engine.apply_weights(named_weights(small_llama(1)), 1, running)
    old = run(build_engine(max_length=192), groups)
    for uid, rollout in finish(engine).items():
        assert rollout.first_version == rollout.last_version, "no rollout is of two versions"
        assert (rollout.token_ids == old[uid].token_ids) == (rollout.first_version == 0)


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_reading_late_changes_nothing(steps_ahead: int) -> None:
    """Stops, preemption, pauses, sleep and moves with steps on their way, as on a GPU."""
    groups = [group(f"g{n}", PROMPTS[n], 3, max_new_tokens=80, stop_token_ids=(5, 9, 11)) for n in range(6)]
    wanted = run(build_engine(max_length=160, max_sequences=20), groups)
    engine = build_engine(max_length=160, max_sequences=10, kv_tokens=10 * 64, steps_ahead=steps_ahead)
    for requests in groups:
        engine.submit(requests)
    got: dict[str, Rollout] = {}
    for number in range(40):
        got |= {rollout.request.uid: rollout for rollout in engine.step()}
        if number == 10:
            engine.sleep()
        if number == 15:
            engine.pause()
            assert engine.step() == []
            engine.resume()
        running = [uid for uid in wanted if uid not in got]
        if number % 7 == 3 and running:
            try:
                engine.import_sequence(engine.export_sequence(running[number % len(running)]))
            except KeyError:  # it has ended, which is not read yet
                assert steps_ahead > 0
    got |= finish(engine)
    assert got == wanted


def test_an_engine_whose_launch_fails_goes_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = group("g", PROMPT, 3)
    engine = build_engine(steps_ahead=1)
    engine.submit(requests)
    for _ in range(4):
        engine.step()

    def out_of_memory(*arguments: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(engine_module, "run_step", out_of_memory)
        engine.step()
    assert finish(engine) == run(build_engine(), [requests])


def test_too_many_stop_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="g/0: at most 8 stop tokens"):
        build_engine().submit(group("g", PROMPT, 1, stop_token_ids=tuple(range(9))))


def test_an_idle_engine_does_nothing() -> None:
    engine = build_engine()
    assert not engine.has_work and engine.step() == [] and engine.facts().num_forwards == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engines_log_probabilities_are_the_trainers(temperature: float) -> None:
    engine = build_engine()
    rollouts = run(
        engine, [group(f"g{n}", PROMPTS[n], 2, temperature=temperature, top_k=20) for n in range(4)]
    ).values()
    documents = [(*r.request.prompt_ids, *r.token_ids) for r in rollouts]
    lengths = [len(document) for document in documents]
    with torch.no_grad():
        hidden = document_hidden(engine.model, torch.tensor([token for d in documents for token in d]), lengths)
        for rollout, states in zip(rollouts, hidden.split(lengths), strict=True):
            predicting = states[len(rollout.request.prompt_ids) - 1 : -1]
            trained, _ = logprobs_and_entropy(engine.model, predicting, torch.tensor(rollout.token_ids), temperature, 8)
            torch.testing.assert_close(trained, torch.tensor(rollout.logprobs), rtol=0, atol=1e-4)
            scaled = head_logits(engine.model, predicting) / temperature
            kept = scaled.topk(20).values.logsumexp(-1) - scaled.logsumexp(-1)
            torch.testing.assert_close(kept, torch.tensor(rollout.log_kept), rtol=0, atol=1e-4)
            assert max(rollout.token_ids) < VOCABULARY
