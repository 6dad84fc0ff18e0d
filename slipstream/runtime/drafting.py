"""The drafter of a run: sized by its recipe, given to the engine, restored from a checkpoint; metrics of its drafts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.config import Config
from slipstream.draft.eagle import kind_of
from slipstream.draft.history import HistoryDrafter, Past
from slipstream.draft.learned import ModelGuesser
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.saved import DRAFTER_FILE, DrafterState, DrafterStateLost, load_drafter_state, names_in
from slipstream.draft.selector import ASKING, DEFAULT_STRATEGIES, MIXED_STRATEGIES, MODEL_STRATEGIES, Fixed, Selector
from slipstream.draft.shelves import Text, shelf_tokens
from slipstream.draft.votes import texts_of
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import OFF, DraftCounts, Strategy
from slipstream.history.format import FILE_NAME, HistoryStoreError
from slipstream.history.store import HistoryStore, PastRollout
from slipstream.history.takeover import find_source
from slipstream.models.rendering import prompt_key
from slipstream.observe.metrics import draft_share_name
from slipstream.runtime.drafters import SavedDrafter, check_fit, find_drafter
from slipstream.runtime.rollouts import GradedGroup
from slipstream.schedule.events import DraftChosen, DrafterAsked, DraftRecord
from slipstream.train.checkpoint import earlier_checkpoints
from slipstream.types import ORIGIN_NAMES, Scored

SHOWN_PLACES = (0, 1, 3, 7, 15)
"""After the last known token: how often the draft of the next one was right, of the second, the fourth and so on."""


STRATEGIES = {
    "off": DEFAULT_STRATEGIES,
    "history": DEFAULT_STRATEGIES,
    "drafter": MODEL_STRATEGIES,
    "both": MIXED_STRATEGIES,
}
"""By draft.source: what the selector chooses among."""


def build_drafter(config: Config, past: Past | None, device: torch.device) -> HistoryDrafter:
    """Drafts from the group, the sequence itself and, where there is a past, from earlier rollouts; and of a learned
    model where the recipe has one."""
    keep = config.history.keep_per_prompt if past is not None else 0
    num_texts = keep + config.train.samples_per_prompt
    longest = shelf_tokens(config.engine.max_prompt_tokens, num_texts, config.sampling.max_new_tokens)
    num_groups = math.ceil(config.engine.max_sequences / config.train.samples_per_prompt) + 1
    library_tokens = config.draft.library_tokens or num_groups * longest
    return HistoryDrafter(
        num_slots=config.engine.max_sequences,
        max_drafts=config.draft.max_drafts,
        library_tokens=library_tokens if remembers(config) else 0,
        longest_shelf=longest,
        device=device,
        past=past or (lambda prompt_ids: ()),
        rule=config.draft.widths,
        guesser=ModelGuesser(num_slots=config.engine.max_sequences, kind=config.drafter.kind, seed=config.seed)
        if learns(config)
        else None,
    )


def build_selector(config: Config, device: torch.device) -> Selector:
    """Chooses among the ways of drafting that the recipe has."""
    has_price, has_model = device.type == "cuda", config.drafter.warm_from is not None
    fixed = fixed_way(config)
    if fixed is not None:
        return Fixed(fixed, has_price=has_price, has_model=has_model)
    return Selector(ways_of(config), has_price=has_price, has_model=has_model)


def ways_of(config: Config) -> list[Strategy]:
    most = config.draft.max_drafts
    ways = [way for way in STRATEGIES[config.draft.source] if way.depth <= most]
    # With twice as many drafts as a sequence may have, a chain is the one before it once more.
    return [way for way in ways if way.branches > 1 or way.drafts_each < 2 * most]


def fixed_way(config: Config) -> Strategy | None:
    """What draft.way names; ValueError if that is none of those that draft.source has."""
    if config.draft.way is None or config.draft.source == "off":
        return None
    ways = {str(way): way for way in ways_of(config) if way != OFF}
    if config.draft.way not in ways:
        raise ValueError(
            f"draft.way: there is no {config.draft.way!r} with draft.source={config.draft.source}; write one of "
            f"{', '.join(map(repr, ways))}, or draft.source=off"
        )
    return ways[config.draft.way]


def known_ways(run_state: Mapping[str, Any], learner: DrafterTrainer | None) -> dict[str, object]:
    """What a checkpoint knows of ways to draft, for a selector. Whether a model is asked it says of its own drafter
    alone, not of a new one in the place of one that was lost, nor after a part of the run without any."""
    known = dict(run_state.get("drafting", {}))  # older checkpoints have none
    if learner is None or learner.num_updates == 0:
        known.pop(ASKING, None)
    return known


def draft_choices(selector: Selector) -> tuple[DraftRecord, ...]:
    """What it has chosen since this was last asked, for the record."""
    chosen = (DraftChosen(one.batch, str(one.strategy), one.reason, one.is_matching) for one in selector.take_choices())
    return (*chosen, *(DrafterAsked(one.is_asked, one.reason) for one in selector.take_turns()))


def settle_source(config: Config, device: torch.device) -> Config:
    """What draft.source=auto means here."""
    if config.draft.source != "auto":
        return config
    source = "off" if device.type == "cpu" else "history"
    return config.model_copy(update={"draft": config.draft.model_copy(update={"source": source})})


def without_learning(config: Config) -> Config:
    """For an engine beside no training: drafts of a model that nothing teaches would cost time and give nothing."""
    source = {"drafter": "off", "both": "history"}.get(config.draft.source, config.draft.source)
    return config.model_copy(update={"draft": config.draft.model_copy(update={"source": source})})


def remembers(config: Config) -> bool:
    """Whether there are drafts from history."""
    return config.draft.source in ("history", "both")


def learns(config: Config) -> bool:
    """Whether there is a drafter to train."""
    return config.draft.source in ("drafter", "both")


def unread_settings(config: Config) -> list[str]:
    """About drafts: what the recipe changes, and nobody reads with this draft.source."""
    is_read = {
        "draft": config.draft.source != "off",
        "draft.library_tokens": remembers(config),
        "drafter": learns(config),
        "history": remembers(config),
    }
    found = []
    for section in ("draft", "drafter", "history"):
        settings = getattr(config, section)
        for name, default in type(settings)().model_dump().items():
            path = f"{section}.{name}"
            if getattr(settings, name) != default and not is_read.get(path, is_read[section]) and name != "source":
                found.append(path)
    return found


def drafter_trainer_for(config: Config, policy: PreTrainedModel, lessons: Path, seed: int) -> DrafterTrainer:
    """`lessons`: a folder of its own. `seed`: of what it is shown."""
    return DrafterTrainer(
        policy,
        lr=config.drafter.lr,
        temperature=config.sampling.temperature,
        memory_bytes=int(config.drafter.memory_gb * 1e9),
        disk_bytes=int(config.drafter.disk_gb * 1e9),
        folder=lessons,
        kind=config.drafter.kind,
        seed=seed,
    )


def draft_with(engine: Engine, weights: Iterable[tuple[str, Tensor]], *, is_taught: bool = True) -> None:
    """From the engine's next step on. Its policy is told: what is known of the drafter is known of an earlier one.
    `is_taught`: else nobody need ask it."""
    drafter = engine.drafter
    assert isinstance(drafter, HistoryDrafter) and drafter.guesser is not None, "the engine has no learned drafter"
    assert engine.policy is not None
    drafter.guesser.write(weights)
    if is_taught:
        engine.policy.note_new_model()


def draft_as(engine: Engine, state: DrafterState) -> None:
    """From the engine's next step on, as one that was published."""
    draft_with(engine, state.weights.items(), is_taught=state.num_updates > 0)


class Publisher:
    """Gives the drafter to the engine, and knows which one it has."""

    def __init__(self, learner: DrafterTrainer, engine: Engine) -> None:
        self._learner, self._engine = learner, engine
        self._version, self._policy = -1, 0
        """Updates of the drafter that the engine has, and the policy's version when it got it."""

    def ensure(self) -> None:
        """That it has one."""
        if self._version < 0:
            self.publish()

    def publish(self) -> None:
        """On the engine's stream; no update may be under way."""
        draft_with(self._engine, self._learner.weights(), is_taught=self._learner.num_updates > 0)
        self._version, self._policy = self._learner.num_updates, self._engine.facts().version.number

    def metrics(self) -> dict[str, float]:
        """Of the drafter that the engine has: its updates, and how many versions the policy is ahead of the one it was
        published beside."""
        behind = self._engine.facts().version.number - self._policy
        return {"drafter/version": float(self._version), "drafter/behind": float(behind)}


def restore_drafter(
    learner: DrafterTrainer, checkpoint: Path, target_digest: str, warm: Callable[[], SavedDrafter | None]
) -> None:
    """Go on from the checkpoint's drafter, or from that of an earlier checkpoint, or from what a new run begins with; a
    warning tells where it is not the first."""
    problem = ""
    for folder in (checkpoint, *earlier_checkpoints(checkpoint)):
        try:
            state = load_drafter_state(folder)
            if folder == checkpoint and state.target_digest != target_digest:
                raise DrafterStateLost(f"{folder / DRAFTER_FILE} was trained for other weights than are there")
            learner.load_state_dict(state.tensors, state.num_updates)
        except ValueError as error:
            problem = problem or str(error)
            continue
        if problem:
            warnings.warn(f"{problem}; the drafter goes on from {folder}", stacklevel=2)
        return
    begin_with = warm()
    if begin_with is not None:
        learner.model.load_state_dict(begin_with.state.weights)
    words = "the one of drafter.warm_from" if begin_with is not None else "a new drafter"
    warnings.warn(f"{problem}; training goes on with {words}", stacklevel=2)


def check_kind(config: Config, checkpoint: Path) -> None:
    """Before anything is written: a run that goes on keeps the kind of its drafter. ValueError if it cannot."""
    if not learns(config):
        return
    for folder in (checkpoint, *earlier_checkpoints(checkpoint)):
        try:
            kind = kind_of(names_in(folder))
        except DrafterStateLost:
            continue  # `restore_drafter` tells
        if kind != config.drafter.kind:
            raise ValueError(
                f"the drafter of {folder} is of the kind {kind}: write drafter.kind={kind}, or begin a new run, in "
                "another run.dir, to teach one of another kind"
            )
        return


def warm_drafter(config: Config, target: PretrainedConfig) -> SavedDrafter | None:
    """What a new run's drafter begins with, if the recipe says so; ValueError if it cannot."""
    source = config.drafter.warm_from
    if source is None:
        return None
    if not learns(config):
        raise ValueError(
            "drafter.warm_from is of no use without a drafter: write draft.source=drafter or both, or leave it out"
        )
    drafter = find_drafter(source)
    if drafter.kind != config.drafter.kind:
        raise ValueError(f"{source} holds a drafter of the kind {drafter.kind}: write drafter.kind={drafter.kind}")
    check_fit(drafter, target, "leave out drafter.warm_from, or name a drafter of this recipe's model")
    return drafter


def past_texts(history: HistoryStore, prompt_ids: tuple[int, ...]) -> list[Text]:
    """A history that cannot be read costs time, not the run."""
    try:
        return texts_of(history.of_prompt(prompt_key(prompt_ids)))
    except HistoryStoreError as error:
        warnings.warn(f"no drafts from history: {error}", stacklevel=2)
        return []


def remember(history: HistoryStore, step: int, groups: Sequence[GradedGroup]) -> None:
    try:
        history.add(past_rollouts(step, groups))
    except HistoryStoreError as error:
        warnings.warn(f"step {step} is not in the history: {error}", stacklevel=2)


def check_warm_history(config: Config) -> None:
    """Before anything is written: is there something to take over, and a use for it?"""
    other = config.history.warm_from
    if other is None:
        return
    if not remembers(config):
        raise ValueError(
            "history.warm_from is of no use without drafts from history: write draft.source=history or both, or leave "
            "it out"
        )
    if other.resolve() == config.run.dir.resolve():
        raise ValueError(f"history.warm_from={other} is this run's own folder; write that of another run")
    find_source(other)


def open_history(config: Config, run_dir: Path, step: int) -> HistoryStore:
    """The run's own history, without what was sampled after the step it goes on from; a new run may take another's."""
    settings = config.history
    store = HistoryStore(
        run_dir / FILE_NAME, keep_per_prompt=settings.keep_per_prompt, disk_bytes=int(settings.disk_gb * 1e9)
    )
    store.forget_after(step)
    if step == 0 and settings.warm_from is not None:
        store.warm_from(settings.warm_from)
    return store


def past_rollouts(step: int, groups: Sequence[GradedGroup]) -> list[PastRollout]:
    """What the history keeps of a step."""
    return [
        PastRollout(
            prompt_key=group.prompt.key,
            token_ids=result.rollout.token_ids,
            reward=result.reward if isinstance(result, Scored) else None,
            step=step,
            first_version=result.rollout.first_version,
            last_version=result.rollout.last_version,
        )
        for group in groups
        for result in group.results
    ]


def draft_metrics(counts: DraftCounts, num_unserved: int = 0, spent_s: float = 0.0) -> dict[str, float]:
    """Of one step; nothing if no sequence sampled."""
    if not counts.num_rows:
        return {}
    metrics = {
        "rollout/spec_accept_length": counts.num_tokens / counts.num_rows,
        "rollout/spec_drafted": float(counts.num_drafted),
        "rollout/spec_accepted": float(counts.num_accepted),
        "rollout/spec_wasted": float(counts.num_drafted - counts.num_accepted),
        "rollout/spec_groups_without_room": float(num_unserved),
        "rollout/spec_saved_s": counts.saved_s,
    }
    if spent_s:
        metrics["rollout/spec_draft_s"] = spent_s
    if counts.num_drafted:
        metrics["rollout/spec_accept_rate"] = counts.num_accepted / counts.num_drafted
    for place in SHOWN_PLACES:
        rate = counts.accept_rate_at(place)
        if rate is not None:
            metrics[f"rollout/spec_accept_at_{place + 1}"] = rate
    for origin in ORIGIN_NAMES:
        if origin:
            metrics[draft_share_name(origin)] = counts.tokens_from[origin] / counts.num_tokens
    return metrics
