"""The drafter of a run, sized by its recipe, and the metrics of its drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.config import Config
from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import MAX_MATCH, SOURCE_NAMES
from slipstream.draft.votes import texts_of
from slipstream.engine.strategy import DraftCounts
from slipstream.history.format import FILE_NAME
from slipstream.history.store import HistoryStore, PastRollout
from slipstream.models.rendering import prompt_key
from slipstream.runtime.rollouts import GradedGroup
from slipstream.types import Scored

SHOWN_PLACES = (0, 1, 3, 7, 15)
"""After the last known token: how often the draft of the next one was right, of the second, the fourth and so on."""


def build_drafter(config: Config, history: HistoryStore | None, device: torch.device) -> HistoryDrafter:
    """Drafts from the group, the sequence itself and, where there is a store, from earlier rollouts."""
    keep = config.history.keep_per_prompt if history is not None else 0
    text_tokens = MAX_MATCH + config.sampling.max_new_tokens + 1
    longest = config.engine.max_prompt_tokens + 2 + (keep + config.train.samples_per_prompt) * text_tokens
    num_groups = math.ceil(config.engine.max_sequences / config.train.samples_per_prompt) + 1
    return HistoryDrafter(
        num_slots=config.engine.max_sequences,
        max_drafts=config.draft.max_drafts,
        library_tokens=config.draft.library_tokens or num_groups * longest,
        longest_shelf=longest,
        device=device,
        past=lambda ids: texts_of(history.of_prompt(prompt_key(ids))) if history is not None else (),
        rule=config.draft.widths,
    )


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


def draft_metrics(counts: DraftCounts, saved_s: float) -> dict[str, float]:
    """Of one step; nothing if no sequence sampled."""
    if not counts.num_rows:
        return {}
    metrics = {
        "rollout/spec_accept_length": counts.num_tokens / counts.num_rows,
        "rollout/spec_drafted": float(counts.num_drafted),
        "rollout/spec_accepted": float(counts.num_accepted),
        "rollout/spec_wasted": float(counts.num_drafted - counts.num_accepted),
        "rollout/spec_saved_s": saved_s,
    }
    if counts.num_drafted:
        metrics["rollout/spec_accept_rate"] = counts.num_accepted / counts.num_drafted
    for place in SHOWN_PLACES:
        if counts.drafted_at[place]:
            metrics[f"rollout/spec_accept_at_{place + 1}"] = counts.accepted_at[place] / counts.drafted_at[place]
    for source, name in SOURCE_NAMES.items():
        if source:
            metrics[f"rollout/spec_share_{name.replace(' ', '_')}"] = counts.accepted_from[source] / counts.num_tokens
    return metrics
