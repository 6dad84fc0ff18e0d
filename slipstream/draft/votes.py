"""What a past rollout's vote counts when a draft is chosen: fresh ones more than old, good ones more than bad. Pure.

The policy that is about to sample resembles the one that sampled last; and training moves it towards what was rewarded.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.draft.shelves import Text
from slipstream.history.store import PastRollout

BY_AGE = (4, 2, 1)
"""Of the rollouts of the last step that had the prompt, of the one before, and of all older ones."""
BETTER = 2
"""Times this, if it was rewarded more than the prompt's rollouts on average."""


def texts_of(past: Sequence[PastRollout]) -> list[Text]:
    """The rollouts of one prompt, newest first, as texts to draft from."""
    steps = sorted({rollout.step for rollout in past}, reverse=True)
    rewards = [rollout.reward for rollout in past if rollout.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    texts = []
    for rollout in past:
        votes = BY_AGE[min(steps.index(rollout.step), len(BY_AGE) - 1)]
        is_better = rollout.reward is not None and rollout.reward > mean
        texts.append(Text(rollout.token_ids, votes * BETTER if is_better else votes))
    return texts
