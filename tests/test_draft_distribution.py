"""Without exact mode too, tokens that went through drafts follow the model's distribution; a bias would show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from tiny_models import small_llama
from torch import Tensor

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import Text
from slipstream.engine import step as step_module
from slipstream.engine.engine import Engine
from slipstream.engine.state import StepState
from slipstream.engine.step import PackedStep
from slipstream.engine.strategy import Always, Strategy
from slipstream.rng import derive_seed
from slipstream.types import Request, SamplingParams

PROMPT = (5, 6, 7, 8)
NUM_SLOTS, GROUP, NUM_GROUPS, SHARPNESS = 32, 2, 2048, 0.4


def probabilities(token_ids: Sequence[int]) -> Tensor:
    """Of the next token, by the plain model."""
    with torch.inference_mode():
        logits = small_llama(attention="eager")(torch.tensor([token_ids])).logits[0, -1]
    return (logits.double() / SHARPNESS).softmax(-1)


def likeliest(token_ids: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The next tokens, each the likeliest."""
    for _ in range(length):
        token_ids = (*token_ids, int(probabilities(token_ids).argmax()))
    return token_ids[-length:]


@cache
def past_texts() -> list[Text]:
    """What the model might say, though not what it says most: votes that outweigh the noise and the siblings."""
    texts = []
    for first in probabilities(PROMPT).topk(3).indices.tolist():
        text = [first]
        for _ in range(3):
            text.append(int(probabilities((*PROMPT, *text)).topk(2).indices[-1]))
        texts.append(Text(tuple(text), 100_000))
    return texts


def sample() -> tuple[list[tuple[int, ...]], int]:
    """Four tokens after the prompt, 4,096 times, with drafts of likely texts; how many drafts were accepted."""
    drafter = HistoryDrafter(
        num_slots=NUM_SLOTS,
        max_drafts=3,
        library_tokens=8192,
        device=torch.device("cpu"),
        past=lambda _: past_texts(),
    )
    engine = Engine(
        small_llama(),
        max_sequences=NUM_SLOTS,
        max_length=16,
        exact=False,
        drafter=drafter,
        policy=Always(Strategy(3.0, 1)),
    )
    sampling = SamplingParams(max_new_tokens=4, temperature=SHARPNESS)
    for group in range(NUM_GROUPS):
        uids = [f"{group}/{member}" for member in range(GROUP)]
        engine.submit([Request(uid, str(group), PROMPT, derive_seed("sample", uid), sampling) for uid in uids])
    texts = []
    while engine.has_work:
        texts += [rollout.token_ids for rollout in engine.step()]
    return texts, engine.take_draft_counts().num_accepted


def deviation(tokens: Sequence[int], chance_V: Tensor) -> float:
    """Chi-square of the counts, tokens expected less than five times taken together, in standard deviations of a normal
    variable (Wilson and Hilferty)."""
    counts, total = Counter(tokens), len(tokens)
    often = [token for token, chance in enumerate(chance_V.tolist()) if chance * total >= 5]
    cells = [(counts[token], float(chance_V[token]) * total) for token in often]
    seen, expected = total - sum(cell[0] for cell in cells), total - sum(cell[1] for cell in cells)
    cells += [(seen, expected)] if expected >= 5 else []
    statistic, freedom = sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def deviations() -> list[float]:
    """Of the first token, of the second after the likeliest first, and of the third after the likeliest two."""
    texts, num_accepted = sample()
    assert len(texts) == GROUP * NUM_GROUPS and num_accepted > 500
    before = likeliest(PROMPT, 2)
    return [
        deviation(
            [text[place] for text in texts if text[:place] == before[:place]],
            probabilities((*PROMPT, *before[:place])),
        )
        for place in range(3)
    ]


def test_tokens_that_went_through_drafts_follow_the_distribution() -> None:
    assert max(deviations()) < 4


def test_a_planted_bias_towards_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step_module.commit

    def biased(state: StepState, step: PackedStep, tokens_N: Tensor, logprobs_N: Tensor) -> None:
        """Every second first draft is taken for right, whatever was sampled."""
        for row, slot in enumerate(step.rows.slot_R.tolist()):
            start, end = step.sample_start_R1[row : row + 2].tolist()
            if end - start > 1 and int(state["seed_low"][slot]) % 2 == 0:
                tokens_N[start] = state["drafts"][slot, 0]
        honest(state, step, tokens_N, logprobs_N)

    monkeypatch.setattr(step_module, "commit", biased)
    assert max(deviations()) > 6
