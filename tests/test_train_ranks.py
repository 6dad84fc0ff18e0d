"""Several trainer ranks in real processes over gloo: the numbers of one rank, and checkpoints of any number of them."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from slipstream.config import Config, build_config
from slipstream.models.tiny import build_tiny_tokenizer
from slipstream.train.checkpoint import CheckpointNotSaved
from slipstream.train.policy import NonFiniteLoss
from slipstream.train.trainer_rank import TrainerRank
from slipstream.types import TrainSample

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, MAX_NEW_TOKENS, NUM_PROCESSES = 103, 12, 3
ROUNDING = 5e-6
"""Relative distance of two gradients that differ by the order of their sums; measured: up to 9e-7 in a second step,
whose weights differ already. Weights move by little, so they are nearer by far: measured up to 2e-8."""
Group = list[TrainSample]


class Process:
    """A process that holds one rank and calls what it is sent."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["slipstream.train.trainer_rank", "transformers.models.llama.modeling_llama"])
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()


def serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    held: list[TrainerRank] = []
    while True:
        call, arguments = pipe.recv()
        try:
            pipe.send((True, call(held, *arguments)))
        except BaseException as error:
            pipe.send((False, error))


def open_rank(held: list[TrainerRank], config: Config, source: str, named: dict[str, Any]) -> None:
    held.append(TrainerRank(config, source, **named))
    if config.algorithm.kl_coef:
        held[0].set_reference(str(Path(source).parent / "reference"))


def close_rank(held: list[TrainerRank]) -> None:
    held.pop().close()


def run_step(held: list[TrainerRank], feeds: Sequence[Group]) -> dict[str, float]:
    rank = held[0]
    rank.begin_step()
    for samples in feeds:
        rank.feed(samples)
    return rank.finish_step()


def abandon(held: list[TrainerRank], samples: Group) -> None:
    held[0].begin_step()
    held[0].feed(samples)
    held[0].abandon_step()


def supervise(held: list[TrainerRank]) -> dict[str, float]:
    return held[0].supervised_step([((1, 2, token), (token, 5, 7)) for token in range(9)], 1e-3)


def take_weights(held: list[TrainerRank]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in held[0].weights()}


def take_moments(held: list[TrainerRank]) -> list[Tensor] | None:
    state = held[0].trainer.state_dict()["optimizer"]["state"]
    return [moments["exp_avg"] for moments in state.values()]


def count_numbers(held: list[TrainerRank]) -> int:
    """Of weights and moments that this rank keeps."""
    trainer = held[0].trainer
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
    return sum(whole.to_local().numel() for whole in (*trainer.parameters, *moments))


def refer_to_itself(held: list[TrainerRank], folder: Path) -> None:
    held[0].save_model(folder)
    held[0].set_reference(str(folder))


def save(held: list[TrainerRank], step: int) -> Path | None:
    return held[0].save(step, {"position": 3})


def watch(held: list[TrainerRank]) -> None:
    held[0].trainer.on_hidden = lambda batch, hidden_TD: SHOWN.extend(batch.names or ["nobody"])


SHOWN: list[str] = []


def shown(held: list[TrainerRank]) -> list[str]:
    return SHOWN


def run_own_step(held: list[TrainerRank], feeds_by_rank: Sequence[Sequence[Group]]) -> dict[str, float]:
    return run_step(held, feeds_by_rank[held[0].trainer.ranks.rank])


class Team:
    """Some of the processes as the ranks of one trainer."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = processes

    def tell(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        for process in self.processes:
            process.pipe.send((call, arguments))
        return self.answers()

    def open(self, config: Config, source: Path, rendezvous: Path, *, resume: bool = False) -> Team:
        for rank, process in enumerate(self.processes):
            named = {"rank": rank, "num_ranks": len(self.processes), "rendezvous": f"file://{rendezvous}"}
            process.pipe.send((open_rank, (config, str(source), named | {"resume": resume})))
        self.answers()
        return self

    def answers(self) -> list[Any]:
        found = self.answers_and_errors()
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

    def answers_and_errors(self) -> list[Any]:
        found = []
        for process in self.processes:
            assert process.pipe.poll(60), "a rank does not answer"
            found.append(process.pipe.recv()[1])
        return found


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    started = [Process() for _ in range(NUM_PROCESSES)]
    yield started
    for one in started:
        one.process.kill()
        one.process.join()


@pytest.fixture
def team(processes: list[Process], tmp_path: Path) -> Iterator[Callable[..., Team]]:
    opened: list[Team] = []

    def open_team(size: int, config: Config, source: Path, *, resume: bool = False) -> Team:
        opened.append(Team(processes[:size]).open(config, source, tmp_path / f"meet{len(opened)}", resume=resume))
        return opened[-1]

    yield open_team
    if opened:
        opened[-1].tell(close_rank)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model none of whose sizes can be shared evenly by two and by three; and another as reference."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("policy", 0), ("reference", 5)):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=40, intermediate_size=35, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / name)
        build_tiny_tokenizer().save_pretrained(folder / name)
    return folder / "policy"


def make_config(folder: Path, algorithm: dict[str, Any] | None = None, **training: Any) -> Config:
    chosen = {"steps": 9, "lr": 1e-3, "micro_batch_tokens": 40, "logprob_chunk_tokens": 7, "precision": "float32"}
    return build_config(
        {
            "model": "tiny",
            "device": "cpu",
            "run": {"dir": str(folder)},
            "tasks": {"train": [{"source": "copy"}]},
            "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
            "algorithm": algorithm or {},
            "train": {**chosen, **training},
        }
    )


def make_groups(step: int = 0, num_groups: int = 6) -> list[Group]:
    draw = random.Random(step)
    groups = []
    for prompt in range(num_groups):
        prompt_ids = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 6)))
        group = []
        for sample in range(3):
            response = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, MAX_NEW_TOKENS)))
            behaviour = tuple(draw.uniform(-4, -2) for _ in response)
            advantage = 0.0 if prompt == 2 else draw.uniform(-2, 2)
            group.append(TrainSample(f"{step}/{prompt}/{sample}", prompt_ids, response, behaviour, advantage))
        groups.append(group)
    return groups


def alone(config: Config, source: Path, *, resume: bool = False) -> list[TrainerRank]:
    held: list[TrainerRank] = []
    open_rank(held, config, str(source), {"resume": resume})
    return held


def distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    a, b = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (first, second))
    return ((a - b).norm() / a.norm()).item()


def compare_step(one: list[TrainerRank], ranks: Team, feeds: Sequence[Group]) -> None:
    """The same step of one rank and of several: gradients (by their moments), metrics and weights."""
    expected, told = run_step(one, feeds), ranks.tell(run_step, feeds)
    assert all(metrics == told[0] for metrics in told)
    assert told[0] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    moments = take_moments(one)
    assert moments is not None and distance(moments, ranks.tell(take_moments)[0]) < ROUNDING
    weights = take_weights(one)
    for given in ranks.tell(take_weights):
        assert given.keys() == weights.keys()
        assert distance(list(weights.values()), list(given.values())) < ROUNDING / 20


KINDS = [
    ({"name": "grpo"}, {"max_grad_norm": 0.01}),
    ({"name": "cispo", "kl_coef": 0.2}, {"updates_per_step": 2, "weight_decay": 0.1}),
    ({"name": "dr_grpo"}, {"precision": "bfloat16", "gradient_checkpointing": True}),
    ({"name": "rloo", "kl_coef": 0.1}, {"micro_batch_tokens": 10_000}),
]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("size", "kind"), [(2, 0), (2, 1), pytest.param(3, 2, marks=pytest.mark.slow), (2, 3)])
def test_ranks_give_the_numbers_of_one(
    team: Callable[..., Team], source: Path, tmp_path: Path, size: int, kind: int
) -> None:
    algorithm, training = KINDS[kind]
    config = make_config(tmp_path, algorithm, **training)
    one, ranks = alone(config, source), team(size, config, source)
    for step in range(2):
        compare_step(one, ranks, make_groups(step))


def test_feeding_is_bit_equal_and_an_abandoned_step_leaves_no_trace(
    team: Callable[..., Team], source: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    groups, found = make_groups(), []
    for feeds, disturbed in ((groups, True), ([[sample for group in groups for sample in group]], False)):
        ranks = team(2, config, source)
        ranks.tell(supervise)
        if disturbed:
            ranks.tell(abandon, make_groups(8)[0])
        found.append((ranks.tell(run_step, feeds), ranks.tell(take_weights)[0]))
        if disturbed:
            ranks.tell(close_rank)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())
    one = alone(config, source)
    metrics = supervise(one)
    assert ranks.tell(supervise)[0].keys() == metrics.keys()


def test_the_warm_start_and_hidden_states(team: Callable[..., Team], source: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, {"kl_coef": 0.1}, micro_batch_tokens=16)
    one, ranks = alone(config, source), team(2, config, source)
    assert ranks.tell(supervise)[0] == pytest.approx(supervise(one), rel=1e-5)
    compare_step(one, ranks, make_groups())
    counts, num_weights = ranks.tell(count_numbers), sum(tensor.numel() for tensor in take_weights(one).values())
    assert sum(counts) == 3 * num_weights and max(counts) < 1.6 * num_weights, "each keeps about half"
    ranks.tell(watch)  # and the policy becomes its own reference, from which it does not differ
    ranks.tell(refer_to_itself, tmp_path / "itself")
    groups = make_groups(1)
    assert ranks.tell(run_step, groups)[0]["actor/kl"] == pytest.approx(0.0, abs=1e-10)
    ranks.tell(run_step, [make_groups(2)[0][:1]])  # the second rank has nothing to compute, and nothing to show
    first, second = ranks.tell(shown)
    taught = [*(sample.uid for group in groups for sample in group), "2/0/0"]
    assert sorted(first + second) == sorted(taught) and first and second, "each is computed once, by one rank"


def test_ranks_that_were_fed_in_another_order_do_not_update(
    team: Callable[..., Team], source: Path, tmp_path: Path
) -> None:
    ranks, groups = team(2, make_config(tmp_path), source), make_groups()
    before = ranks.tell(take_weights)[0]
    for process in ranks.processes:
        process.pipe.send((run_own_step, ([groups, groups[::-1]],)))
    for error in ranks.answers_and_errors():
        assert isinstance(error, AssertionError) and "another order" in str(error)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ranks.tell(take_weights)[0].items())


def test_a_rank_that_dies_is_noticed_by_the_others(source: Path, tmp_path: Path) -> None:
    started = [Process() for _ in range(2)]
    ranks = Team(started).open(make_config(tmp_path), source, tmp_path / "meet")
    ranks.tell(run_step, make_groups())
    started[1].process.kill()
    started[1].process.join()
    try:
        started[0].pipe.send((run_step, (make_groups(1),)))
        assert started[0].pipe.poll(20), "it waits for one that is gone"
        fine, error = started[0].pipe.recv()
        assert not fine and isinstance(error, RuntimeError)
    finally:
        started[0].process.kill()
        started[0].process.join()


def test_a_checkpoint_that_cannot_be_written_harms_nobody(
    team: Callable[..., Team], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder can be in here")
    config = make_config(tmp_path / "file" / "run")
    one, ranks = alone(config, source), team(2, config, source)
    for process in ranks.processes:
        process.pipe.send((save, (1,)))
    error, other = ranks.answers_and_errors()
    assert isinstance(error, CheckpointNotSaved) and other is None
    compare_step(one, ranks, make_groups())


def test_a_fault_of_one_rank_stops_all_and_names_the_sample(
    team: Callable[..., Team], source: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path, micro_batch_tokens=12)
    one, ranks = alone(config, source), team(2, config, source)
    broken = make_groups()
    broken[1][2] = replace(broken[1][2], advantage=math.nan)
    with pytest.raises(NonFiniteLoss, match=r"in step 1, samples .*train\.lr") as caught:
        ranks.tell(run_step, broken)
    assert "0/1/2" in caught.value.uids and len(caught.value.uids) < 4
    compare_step(one, ranks, make_groups(1))


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(2, 3, marks=pytest.mark.slow), (1, 2), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    team: Callable[..., Team], source: Path, tmp_path: Path, before: int, after: int
) -> None:
    config = make_config(tmp_path / "run", weight_decay=0.1, lr_schedule="linear")
    undisturbed = alone(config, source)
    for step in range(2):
        run_step(undisturbed, make_groups(step))
    first = team(before, config, source)
    for step in range(2):
        first.tell(run_step, make_groups(step))
    path, *others = first.tell(save, 2)
    assert path == tmp_path / "run" / "checkpoints" / "step_2" and not any(others)
    first.tell(close_rank)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert type(loaded) is LlamaForCausalLM and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert "FSDP" not in (path / "config.json").read_text()
    kept = {name: tensor.shape for name, tensor in load_file(path / "model.safetensors").items()}
    alone_in = save(undisturbed, 7)
    assert alone_in is not None
    assert kept == {name: tensor.shape for name, tensor in load_file(alone_in / "model.safetensors").items()}
    compare_step(undisturbed, team(after, config, path, resume=True), make_groups(2))
