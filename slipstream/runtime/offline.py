"""`slipstream train-drafter`: a drafter taught from what a run recorded, with no rollout sampled anew.

The policy of the run's latest checkpoint is run over recorded rollouts, some at a time, and the drafter learns from its
hidden states as it does beside a run (`draft/online.py`). Rollouts of one prompt in ten are held out; on them it is
told how many tokens a step the drafter gives, before and after (`draft/judge.py`). What a round shows depends on its
number alone, so training that was stopped goes on as if it had not been, but for texts kept from the round before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.config import Config, load_config
from slipstream.draft.eagle import DraftModel, Features
from slipstream.draft.export import refuse_filled
from slipstream.draft.judge import num_steps, right_drafts
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.saved import DrafterState
from slipstream.files import check_output_folder
from slipstream.models.loading import check_model, load_model, load_tokenizer
from slipstream.models.packed import document_hidden
from slipstream.models.precision import precision_of
from slipstream.models.rendering import render_prompts
from slipstream.models.weights import fingerprint
from slipstream.observe.console import Console
from slipstream.observe.store import RunStore, RunStoreError, StoredRollout
from slipstream.rng import derive_seed, keyed_random
from slipstream.runtime.drafters import ABOUT, check_fit, find_checkpoint, find_drafter, save_drafter
from slipstream.runtime.engines import choose_device
from slipstream.runtime.prompts import load_training_problems
from slipstream.runtime.stopping import stop_on_signals
from slipstream.train.checkpoint import find_damage
from slipstream.types import Prompt

NEWEST_ROLLOUTS = 4096
"""That are learned from: older ones are of a policy that is no more."""
LONGEST_TEXT = 2048
"""Tokens of a rollout that are looked at, with its prompt, from its beginning."""
ROUND_UPDATES, ROUND_TOKENS = 4, 4096
"""Between two looks at new texts, and at whether it is to stop."""
HELD_OUT = 10
"""One prompt in so many is never learned from."""
JUDGED_TOKENS = 8192
"""Of held-out rollouts."""
DEPTH = 4
"""Drafts a step, when it is judged: as many as it is taught to make on its own."""
TOLD_TIMES = 10
NOT_HERE = {
    "drafter.updates": "write --updates N",
    "drafter.warm_from": "write --from DIR",
    "drafter.disk_gb": "a few texts at a time are looked at, and none are kept",
    "model": "a drafter is taught for the run's own model",
}
"""Settings of a run that `train-drafter` has other words for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded rollout with its prompt."""

    ids: tuple[int, ...]
    num_prompt: int
    seed: int


@dataclass(frozen=True, slots=True)
class Taught:
    folder: Path
    num_updates: int
    is_done: bool
    lines: list[str]
    """What to tell the user."""


def train_offline(
    run: Path,
    overrides: Sequence[str],
    *,
    updates: int,
    out: Path | None,
    begin_with: Path | None,
    resume: bool,
    quiet: bool,
) -> Taught:
    """Up to so many updates in all, or until Ctrl-C; written to `out` either way. ValueError for what can be fixed."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run folder (it has no config.yaml)")
    for override in overrides:
        instead = NOT_HERE.get(override.partition("=")[0])
        if instead is not None:
            raise ValueError(f"{override} is of no use here: {instead}")
    folder = out or run / "drafter"
    check_output_folder(folder, "--out")
    config = load_config(run / "config.yaml", overrides)
    checkpoint = find_checkpoint(run)
    if resume and not (folder / ABOUT).is_file():
        raise ValueError(f"{folder} holds no drafter to go on with; leave out --resume")
    if resume and begin_with is not None:
        raise ValueError("--resume goes on with the drafter in --out: leave out --from, or --resume")
    if not resume:
        refuse_filled(folder, ", or go on with the drafter in it: --resume" if (folder / ABOUT).is_file() else "")
    damage = find_damage(checkpoint)
    if damage is not None:
        raise ValueError(f"checkpoint {checkpoint} cannot be used: {damage}; give another run, or a checkpoint of it")
    check_model(str(checkpoint))
    device = choose_device(config.device)
    with Console(1, quiet=quiet) as console, stop_on_signals() as flag:
        learned_from, held_out = recorded_samples(run, config, str(checkpoint))
        model = load_model(str(checkpoint), dtype=torch.float32, device=device).requires_grad_(False).eval()
        kind: str = config.drafter.kind
        source = folder if resume else begin_with
        saved = find_drafter(source) if source is not None else None
        if saved is not None:
            check_fit(
                saved, model.config, f"leave out {'--resume' if resume else '--from'}, or name one of this run's model"
            )
            if kind != saved.kind and any(one.startswith("drafter.kind=") for one in overrides):
                raise ValueError(f"the drafter in {source} is of the kind {saved.kind}: leave out drafter.kind={kind}")
            kind = saved.kind
        learner = DrafterTrainer(
            model,
            lr=config.drafter.lr,
            temperature=config.sampling.temperature,
            memory_bytes=int(config.drafter.memory_gb * 1e9),
            kind=kind,
            seed=config.seed,
        )
        if saved is not None and resume:
            learner.load_state_dict(saved.state.tensors, saved.state.num_updates)
        elif saved is not None:
            learner.model.load_state_dict(saved.state.weights)
        judge = Judge(config, model, kind, held_out)
        console.start_run(
            [
                f"{folder}: {kind} for {checkpoint} on {device}, {len(learned_from):,} rollouts to learn from, "
                f"{len(held_out)} held out"
            ]
        )
        about: dict[str, Any] = {"target": str(checkpoint), "run": str(run), "held_out_rollouts": len(held_out)}
        before = saved.tokens_a_step_before if saved is not None and resume else None
        about["tokens_a_step_before"] = before or judge.tokens_a_step(learner.model)[0]
        step, digest = int(checkpoint.name.partition("_")[2]), fingerprint(model)

        def save() -> None:
            about["updates"] = learner.num_updates
            save_drafter(folder, DrafterState(step, learner.num_updates, digest, learner.state_dict()), about)

        if learner.num_updates >= updates:
            console.note(f"{learner.num_updates} updates were made already: for more, give --updates a larger number")
        with console.phase("updates", updates) as advance:
            advance(learner.num_updates)
            for metrics in _teach(learner, model, config, learned_from, updates):
                loss, right = metrics["drafter/loss"], metrics.get("drafter/right_at_1", 0.0)
                advance(ROUND_UPDATES, loss=loss, right=right)
                if learner.num_updates % max(ROUND_UPDATES, updates // TOLD_TIMES) < ROUND_UPDATES:
                    console.note(f"{learner.num_updates} updates: loss {loss:.3f}, {right:.0%} of first drafts right")
                    save()
                if flag.reason is not None:
                    break
        save()  # before anything else can go wrong
        lines = list[str]()
        if flag.reason is None:  # who has stopped it does not want to wait
            (about["tokens_a_step"],) = judge.tokens_a_step(learner.model)
            save()
            lines = [
                f"held-out rollouts, {DEPTH} drafts a step: {about['tokens_a_step_before']:.2f} tokens a step before, "
                f"{about['tokens_a_step']:.2f} after {learner.num_updates} updates"
            ]
    return Taught(folder, learner.num_updates, learner.num_updates >= updates, lines)


def recorded_samples(run: Path, config: Config, tokenizer_name: str) -> tuple[list[Sample], list[Sample]]:
    """To learn from, and held out: the newest, of prompts that the recipe still has."""
    problems = load_training_problems(config)
    rendered = render_prompts(load_tokenizer(tokenizer_name), problems, config.engine.max_prompt_tokens)
    prompts = {prompt.key: prompt for prompt in rendered}
    try:
        with RunStore(run, read_only=True) as store:
            rollouts = [one for one in store.rollouts(kind="train") if one.prompt_key in prompts and one.token_ids]
    except RunStoreError as error:
        raise ValueError(str(error)) from error
    rollouts = sorted(rollouts, key=lambda one: one.step)[-NEWEST_ROLLOUTS:]
    by_prompt: dict[str, list[StoredRollout]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(rollout.prompt_key, []).append(rollout)
    if len(by_prompt) < 2:
        raise ValueError(
            f"{run} has recorded rollouts of {len(by_prompt)} prompt(s) of its recipe; at least two are needed, one of "
            "them to judge by"
        )
    in_order = sorted(by_prompt, key=lambda key: derive_seed("held out", key))
    num_held = max(1, len(in_order) // HELD_OUT)
    held, rest = (
        [sample_of(prompts[key], one) for key in keys for one in by_prompt[key]]
        for keys in (in_order[:num_held], in_order[num_held:])
    )
    return rest, list(_up_to(held, JUDGED_TOKENS, "judged"))


def sample_of(prompt: Prompt, rollout: StoredRollout) -> Sample:
    return Sample((*prompt.token_ids, *rollout.token_ids)[:LONGEST_TEXT], len(prompt.token_ids), rollout.seed)


def _up_to(samples: Sequence[Sample], num_tokens: int, *key: int | str) -> Iterator[Sample]:
    """Some by chance, until they have so many tokens; one at least."""
    order = list(samples)
    keyed_random("offline", *key).shuffle(order)
    for sample in order:
        yield sample
        num_tokens -= len(sample.ids)
        if num_tokens <= 0:
            return


def _teach(
    learner: DrafterTrainer, model: PreTrainedModel, config: Config, samples: Sequence[Sample], updates: int
) -> Iterator[dict[str, float]]:
    """Metrics of each round."""
    while learner.num_updates < updates:
        number = learner.num_updates // ROUND_UPDATES
        learner.begin_step()
        for batch in _batches(_up_to(samples, ROUND_TOKENS, config.seed, number), config.train.micro_batch_tokens):
            texts = [sample.ids[:-1] for sample in batch]  # as the trainer has them, who asks nothing of the last
            ids_T = torch.tensor([token for text in texts for token in text], device=model.device)
            last_TD = _hidden(model, config, ids_T, [len(text) for text in texts])
            learner.collect(
                ids_T,
                [len(text) for text in texts],
                [len(sample.ids) - sample.num_prompt for sample in batch],
                last_TD,
            )
        learner.train(min(ROUND_UPDATES, updates - learner.num_updates))
        metrics = learner.take_metrics()
        if "drafter/loss" not in metrics:
            raise ValueError("no text to learn from fits into drafter.memory_gb: raise it")
        yield metrics


def _batches(samples: Iterable[Sample], most_tokens: int) -> Iterator[list[Sample]]:
    batch, num_tokens = list[Sample](), 0
    for sample in samples:
        if batch and num_tokens + len(sample.ids) > most_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(sample)
        num_tokens += len(sample.ids)
    if batch:
        yield batch


@torch.no_grad()
def _hidden(model: PreTrainedModel, config: Config, ids_T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """In the trainer's number format."""
    dtype = precision_of(config.train.precision, model)
    with torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32):
        return document_hidden(model, ids_T, lengths)


class Judge:
    """Walks held-out rollouts; the policy's features of them are computed once for each walk and not kept."""

    def __init__(self, config: Config, model: PreTrainedModel, kind: str, samples: Sequence[Sample]) -> None:
        self._config, self._model, self._samples = config, model, samples
        self._features = Features(model, kind)

    def tokens_a_step(self, *drafts: DraftModel) -> list[float]:
        """Of each, in order."""
        num_tokens, steps = 0, [0] * len(drafts)
        for sample in self._samples:
            ids_T = torch.tensor(sample.ids, device=self._model.device)
            _hidden(self._model, self._config, ids_T, [len(ids_T)])
            features_TF = self._features.take().float()
            for number, draft in enumerate(drafts):
                right_JT = right_drafts(
                    draft,
                    self._model,
                    ids_T,
                    features_TF,
                    seed=sample.seed,
                    depth=DEPTH,
                    temperature=self._config.sampling.temperature,
                )
                steps[number] += num_steps(right_JT, sample.num_prompt)
            num_tokens += len(sample.ids) - sample.num_prompt
        return [num_tokens / count for count in steps]
