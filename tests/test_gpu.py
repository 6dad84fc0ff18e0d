"""What only a GPU can show; the rest of the suite runs without one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from slipstream.config import Algorithm, Training
from slipstream.draft.history import HistoryDrafter
from slipstream.draft.learned import ModelGuesser
from slipstream.draft.online import EAGER_UPDATES, DrafterTrainer
from slipstream.engine.engine import BrokenLogits, Engine
from slipstream.engine.first_runs import FirstRuns
from slipstream.engine.graphs import GraphPool
from slipstream.engine.packing import Launch, StepSizes
from slipstream.engine.strategy import Always, Strategy
from slipstream.models.attention import AttentionForm, Documents
from slipstream.models.loading import load_model
from slipstream.models.packed import document_hidden
from slipstream.models.precision import check_batch_invariance, use_batch_invariant_products
from slipstream.models.shapes import random_model
from slipstream.models.weights import named_weights
from slipstream.rng import derive_seed
from slipstream.train.trainer import Trainer
from slipstream.types import Request, Rollout, SamplingParams, TrainSample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_all_documents_at_once_equal_one_by_one_with_gradients() -> None:
    torch.manual_seed(0)
    lengths = [1, 70, 33, 128, 5]
    documents = Documents(lengths)
    for window in (None, 16):
        form = AttentionForm(scaling=0.2, sliding_window=window)
        inputs = [
            torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (6, 2, 2)
        ]
        weight = torch.randn(sum(lengths), 6, 64, device="cuda")
        results = []
        for way in (documents.attend_one_by_one, lambda *args: documents.attend(0, *args)):
            out = way(*inputs, form)
            grads = torch.autograd.grad((out.float() * weight).sum(), inputs)
            results.append([out, *grads])
        for plain, fast in zip(*results, strict=True):
            error = (plain.float() - fast.float()).abs().max() / plain.float().abs().max()
            assert error < 2e-2, (window, error)


def test_training_in_bfloat16_attends_to_all_documents_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, where rotary positions leave queries and keys in float32; the gradient is that of one by one."""
    dice = torch.Generator().manual_seed(0)
    samples = []
    for number, length in enumerate((1, 40, 7, 300, 90, 90, 12, 65)):
        response = tuple(torch.randint(0, 200, (length,), generator=dice).tolist())
        samples.append(TrainSample(f"g/{number}", (1, 2, 3), response, (-3.0,) * length, 1.0 if number % 2 else -1.0))
    model = random_model("smollm2-135m", dtype=torch.float32, device=torch.device("cuda"))
    training = Training(precision="bfloat16", max_grad_norm=1e9, lr=1e-30)
    gradients = []

    def never(*_: Any) -> None:
        raise AssertionError("a call for each document")

    plainly = Documents.attend_one_by_one
    for at_once in (True, False):
        if at_once:
            monkeypatch.setattr(Documents, "attend_one_by_one", never)
        else:
            monkeypatch.undo()
            monkeypatch.setattr(Documents, "attend", lambda self, layer, *args: plainly(self, *args))
        trainer = Trainer(model, training, Algorithm(), temperature=1.0, max_new_tokens=512)
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.accumulate_gradients(samples, None)
        parts = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        gradients.append(torch.cat(parts))
    fast, plain = gradients
    assert (fast - plain).norm() < 0.03 * plain.norm()  # .6 where documents see each other, .1 with a window of 64


def requests_for(group: int, **sampling: Any) -> list[Request]:
    params = SamplingParams(**{"max_new_tokens": 64} | sampling)
    return [
        Request(f"0/{group}/{i}", f"0/{group}", (5, 6, 7, 8 + group), derive_seed(0, group, i), params)
        for i in range(8)
    ]


def generate(engine: Engine, groups: Iterable[Sequence[Request]]) -> dict[str, Rollout]:
    for requests in groups:
        engine.submit(requests)
    rollouts: dict[str, Rollout] = {}
    while engine.has_work:
        rollouts |= {rollout.request.uid: rollout for rollout in engine.step()}
    return rollouts


@cache
def small_model() -> PreTrainedModel:
    """The shape of SmolLM2 with random weights in bfloat16."""
    return random_model("smollm2-135m", dtype=torch.bfloat16, device=torch.device("cuda"))


GROUPS = [requests_for(0), requests_for(1, temperature=0.7), requests_for(2, top_k=50, top_p=0.9), requests_for(3)]


@pytest.mark.parametrize("max_sequences", [1, 5, 7, 300])
def test_rollouts_have_the_same_bits_in_any_batch_and_under_preemption(max_sequences: int) -> None:
    wanted = generate(Engine(small_model(), max_sequences=32, max_length=192), GROUPS)
    engine = Engine(
        small_model(), max_sequences=max_sequences, max_length=192, kv_tokens=192 if max_sequences == 7 else None
    )
    company = [] if max_sequences < 300 else [requests_for(group, max_new_tokens=90) for group in range(4, 36)]
    got = generate(engine, [*company, *GROUPS])
    assert {uid: got[uid] for uid in wanted} == wanted
    assert engine.facts().num_graphs > 0 and (max_sequences != 7 or engine.facts().num_preempted > 0)


def test_graphs_and_late_reading_change_no_bit() -> None:
    eager = generate(Engine(small_model(), max_sequences=32, max_length=192, graphs=False), GROUPS)
    assert generate(Engine(small_model(), max_sequences=32, max_length=192), GROUPS) == eager


def test_new_weights_reach_captured_graphs() -> None:
    model = random_model("smollm2-135m", dtype=torch.bfloat16, device=torch.device("cuda"))
    engine = Engine(model, max_sequences=32, max_length=192)
    before = generate(engine, GROUPS)
    old = [(name, tensor.clone()) for name, tensor in named_weights(model)]
    engine.apply_weights([(name, tensor * 1.1) for name, tensor in old], 1)
    assert generate(engine, GROUPS)["0/0/0"].token_ids != before["0/0/0"].token_ids
    engine.apply_weights(old, 0)
    assert generate(engine, GROUPS) == before


@pytest.mark.parametrize("weights", [False, True])
def test_an_engine_that_slept_generates_the_same(weights: bool) -> None:
    model = random_model("smollm2-135m", dtype=torch.bfloat16, device=torch.device("cuda"))
    engine = Engine(model, max_sequences=32, max_length=192)
    before = generate(engine, GROUPS)
    kept = [(name, tensor.clone()) for name, tensor in named_weights(model)]
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for _ in range(2):
        engine.submit(GROUPS[0])
        for _ in range(20):
            engine.step()
        engine.sleep(weights=weights)
        freed = held - torch.cuda.memory_allocated()
        assert freed > (sum(tensor.nbytes for _, tensor in kept) if weights else 0)
        engine.apply_weights(kept, 0)
        assert generate(engine, GROUPS[1:]) == before
        assert engine.facts().num_graphs > 0


def test_logits_that_are_not_numbers_are_an_error_on_the_gpu_too() -> None:
    model = random_model("smollm2-135m", dtype=torch.bfloat16, device=torch.device("cuda"))
    engine = Engine(model, max_sequences=8, max_length=192)
    old = [(name, tensor.clone()) for name, tensor in named_weights(model)]
    engine.apply_weights([(name, torch.full_like(tensor, torch.nan)) for name, tensor in old], 1)
    engine.submit(GROUPS[0])
    num_errors = 0
    while engine.has_work:  # two steps are in flight, so siblings may break in the second one
        try:
            engine.step()
        except BrokenLogits:
            num_errors += 1
    assert num_errors > 0
    engine.apply_weights(old, 2)
    assert len(generate(engine, GROUPS[1:])) == 24


def test_the_gpu_engine_agrees_with_the_cpu_engine_in_float32() -> None:
    """Not bit for bit (other kernels), but the same tokens wherever no near-tie decides."""
    by_device = {}
    for device in ("cpu", "cuda"):
        model = load_model("tiny", dtype=torch.float32, device=torch.device(device))
        # Exactness is not the question here, and float32 products of cuBLAS may not have it.
        rollouts = generate(
            Engine(model, max_sequences=32, max_length=128, exact=False), [requests_for(group) for group in range(4)]
        )
        by_device[device] = {uid: rollout.token_ids for uid, rollout in rollouts.items()}
    same = [by_device["cpu"][uid] == by_device["cuda"][uid] for uid in by_device["cpu"]]
    assert sum(same) >= 0.9 * len(same)


def test_training_gives_the_same_bits_every_time_if_asked_to() -> None:
    """Long documents with common tokens, so that sums in the order of chance would show."""
    dice = torch.Generator().manual_seed(0)
    samples = []
    for number in range(16):
        response = tuple(torch.randint(0, 50, (300 + 40 * number,), generator=dice).tolist())
        advantage = 1.0 if number % 2 else -1.0
        samples.append(TrainSample(f"g{number // 8}/{number}", (1, 2, 3), response, (-3.0,) * len(response), advantage))
    use_batch_invariant_products()
    results = []
    for _ in range(4):
        model = random_model("smollm2-135m", dtype=torch.float32, device=torch.device("cuda"))
        training = Training(deterministic=True, precision="bfloat16", lr=1e-4, micro_batch_tokens=4096)
        trainer = Trainer(model, training, Algorithm(), temperature=1.0, max_new_tokens=1024)
        for _ in range(2):
            trainer.step(samples)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert not torch.are_deterministic_algorithms_enabled(), "the engine must not pay for it"
    check_batch_invariance(torch.nn.Linear(8960, 1536, bias=False, device="cuda", dtype=torch.bfloat16))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "strategy", [Strategy(4.0, 0, 4), Strategy(4.0, 1, 3), Strategy(12.0, 0, 4, 3), Strategy(8.0, 2, 3, 2)], ids=str
)
def test_a_learned_drafter_changes_no_bit_on_a_gpu(strategy: Strategy) -> None:
    """Untaught, in chains and trees, alone and beside drafts from the group, with graphs."""
    model = small_model()
    groups = [requests_for(group, max_new_tokens=48) for group in range(3)]
    plain = generate(Engine(model, max_sequences=16, max_length=96), groups)
    drafter = HistoryDrafter(
        num_slots=16, max_drafts=16, library_tokens=1 << 14, device=torch.device("cuda"),
        guesser=ModelGuesser(num_slots=16),
    )  # fmt: skip
    engine = Engine(model, max_sequences=16, max_length=96, drafter=drafter, policy=Always(strategy))
    for _ in range(2):  # eagerly and captured
        assert generate(engine, groups) == plain
    assert engine.facts().num_graphs > 0 and engine.take_draft_counts().num_drafted > 0


def taught_drafter(**changes: Any) -> DrafterTrainer:
    """With texts of a random policy to learn from, one of them longer than a lesson."""
    policy = random_model("smollm2-135m", dtype=torch.float32, device=torch.device("cuda"))
    trainer = DrafterTrainer(policy, lr=1e-3, temperature=1.0, **{"memory_bytes": 10**9} | changes)
    lengths = [100 + 150 * number for number in range(9)]
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 200, (sum(lengths),), generator=dice).cuda()
    with torch.no_grad():
        last = document_hidden(policy, ids, lengths)
    trainer.collect(ids, lengths, [length - 50 for length in lengths], last)
    return trainer


def test_a_captured_update_of_the_drafter_is_an_eager_one(tmp_path: Path) -> None:
    """From the disk too, and after its state was loaded anew."""
    first = {name: one.clone() for name, one in taught_drafter().weights()}
    on_disk = {"memory_bytes": 0, "disk_bytes": 10**9, "folder": tmp_path / "lessons"}
    captured, eager, spilled = taught_drafter(), taught_drafter(graphs=False), taught_drafter(**on_disk)
    for trainer in (captured, eager, spilled):
        trainer.train(4)
        trainer.load_state_dict(trainer.state_dict(), trainer.num_updates)
        trainer.train(EAGER_UPDATES + 5)
    assert captured.trains_aside and spilled.trains_aside and not eager.trains_aside
    wanted = dict(eager.weights())
    for trainer in (captured, spilled):
        for name, weight in trainer.weights():
            moved = (wanted[name] - first[name]).norm()
            assert moved > 0 and (weight - wanted[name]).norm() < 0.05 * moved, name
    told = [trainer.take_metrics() for trainer in (captured, eager, spilled)]
    assert told[0].keys() == told[1].keys() == told[2].keys() and told[0]["drafter/updates"] == 9 + EAGER_UPDATES
    assert told[0]["drafter/loss"] == pytest.approx(told[1]["drafter/loss"], rel=1e-2)
    assert told[2]["drafter/loss"] == pytest.approx(told[1]["drafter/loss"], rel=1e-2)
    spilled.close()


def drafting_engine() -> tuple[Engine, ModelGuesser]:
    guesser = ModelGuesser(num_slots=32)
    drafter = HistoryDrafter(num_slots=32, max_drafts=8, library_tokens=0, device=torch.device("cuda"), guesser=guesser)
    model = random_model("smollm2-135m", dtype=torch.bfloat16, device=torch.device("cuda"))
    policy = Always(Strategy(4.0, 0, 4))
    return Engine(model, max_sequences=32, max_length=192, drafter=drafter, policy=policy), guesser


def test_training_the_drafter_beside_decoding_changes_no_token() -> None:
    wanted = {uid: one.token_ids for uid, one in generate(drafting_engine()[0], GROUPS).items()}
    engine, guesser = drafting_engine()
    trainer = taught_drafter()
    trainer.train(EAGER_UPDATES + 1)
    assert trainer.trains_aside
    before = {name: one.clone() for name, one in named_weights(guesser.model)}
    for _ in range(2):  # in the first round the engine's graphs are captured beside updates
        for requests in GROUPS:
            engine.submit(requests)
        got, begun = dict[str, tuple[int, ...]](), trainer.num_updates
        trainer.follow()
        while engine.has_work:
            got |= {rollout.request.uid: rollout.token_ids for rollout in engine.step()}
            if not trainer.is_busy:
                if trainer.num_updates % 2:
                    guesser.write(trainer.weights())
                    trainer.follow()
                trainer.start()
        trainer.finish()
        assert got == wanted and trainer.num_updates > begun + 3
    assert any(not torch.equal(one, before[name]) for name, one in named_weights(guesser.model))
    assert all(torch.isfinite(one).all() for _, one in trainer.weights())
    assert 0 < trainer.take_metrics()["drafter/loss"] < 100


def test_once_kernels_are_loaded_graphs_are_made_without_waiting_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstRuns, "graphs", lambda self: [])
    engine, _ = drafting_engine()
    engine.load_kernels()
    engine.submit(GROUPS[0])
    engine.step()  # the prompt
    torch.cuda.synchronize()
    num_graphs, done = engine.facts().num_graphs, torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    done.record()
    engine.step()
    assert not done.query() and engine.facts().num_graphs > num_graphs


def test_graphs_that_are_made_before_the_first_step_give_the_same_tokens() -> None:
    groups, found, made = [requests_for(0), requests_for(1, temperature=0.7), requests_for(3)], {}, {}
    for is_loaded in (False, True):
        engine, _ = drafting_engine()
        if is_loaded:
            engine.load_kernels()
        num_graphs = engine.facts().num_graphs
        assert (num_graphs > 20) == is_loaded
        found[is_loaded] = {uid: (one.token_ids, one.logprobs) for uid, one in generate(engine, groups).items()}
        made[is_loaded] = engine.facts().num_graphs - num_graphs
    assert found[True] == found[False] and len(found[True]) == sum(map(len, groups))
    assert made[True] < made[False] / 2


def test_graphs_of_growing_sizes_take_what_the_largest_takes() -> None:
    pool = GraphPool(budget_bytes=1 << 40)
    sizes = [num << 22 for num in range(1, 9)]  # of numbers: up to 128 MiB
    kept = torch.zeros(len(sizes), device="cuda")

    def body(number: int) -> None:
        whole = torch.full((sizes[number],), float(number), device="cuda")
        kept[number] = (whole + 1)[-1]

    for number, size in enumerate(sizes):
        launch = Launch(None, StepSizes(size, 1, size, with_drafts=False, with_cuts=False))
        for _ in range(2):  # of which the first, of all, is not captured
            pool.run(launch, partial(body, number))
    assert len(pool) == len(sizes)
    assert kept.tolist() == [number + 1 for number in range(len(sizes))]
    assert pool.num_bytes < 1.2 * 2 * 4 * sizes[-1]
    segments = torch.cuda.memory_snapshot()
    assert {segment["is_expandable"] for segment in segments} == {True, False}, "of graphs and of all else"
