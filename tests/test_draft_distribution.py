"""Tokens that went through drafts are distributed as tokens sampled without; a bias towards drafts would show.

In exact mode they are the same to the bit, and other tests say so. This one is for the mode without, which is another
only on a GPU: other seeds are used with drafts than without, and the counts of tokens compared by a chi-square test.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import small_llama
from torch import Tensor

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import Text
from slipstream.engine.engine import Engine
from slipstream.engine.packing import PackedStep
from slipstream.engine.state import StepState
from slipstream.engine.strategy import Always, Strategy
from slipstream.rng import derive_seed
from slipstream.types import Request, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


@cache
def sample_plainly() -> list[tuple[int, ...]]:
    return sample("plain", with_drafts=False)[0]


def sample(label: str, *, with_drafts: bool) -> tuple[list[tuple[int, ...]], int]:
    """Four tokens after the prompt, 4,096 times, with seeds of their own; how many of them were drafts."""
    drafting: dict[str, Any] = {}
    if with_drafts:
        drafter = HistoryDrafter(
            num_slots=NUM_SLOTS, max_drafts=3, library_tokens=8192, device=DEVICE, past=lambda _: past_texts()
        )
        drafting = {"drafter": drafter, "policy": Always(Strategy(3.0, 1))}
    model = small_llama(dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32).to(DEVICE)
    engine = Engine(model, max_sequences=NUM_SLOTS, max_length=16, exact=False, graphs=False, **drafting)
    sampling = SamplingParams(max_new_tokens=4, temperature=SHARPNESS)
    for group in range(NUM_GROUPS):
        uids = [f"{group}/{member}" for member in range(GROUP)]
        engine.submit([Request(uid, str(group), PROMPT, derive_seed(label, uid), sampling) for uid in uids])
    texts = []
    while engine.has_work:
        texts += [rollout.token_ids for rollout in engine.step()]
    return texts, engine.take_draft_counts().num_accepted


def deviation(tokens: Sequence[int], others: Sequence[int]) -> float:
    """Whether both are drawn alike: chi-square of their counts, rare tokens taken together, in standard deviations of a
    normal variable (Wilson and Hilferty)."""
    one, other = Counter(tokens), Counter(others)
    often = [token for token, count in (one + other).items() if count >= 20]
    cells = [(one[token], other[token]) for token in often]
    rest = len(tokens) - sum(cell[0] for cell in cells), len(others) - sum(cell[1] for cell in cells)
    cells += [rest] if sum(rest) >= 20 else []
    ratio = math.sqrt(len(others) / len(tokens))
    statistic = sum((a * ratio - b / ratio) ** 2 / (a + b) for a, b in cells)
    freedom = len(cells) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def deviations() -> list[float]:
    """Of the first token, of the second after the likeliest first, and of the third after the likeliest two."""
    plain = sample_plainly()
    texts, num_accepted = sample("drafts", with_drafts=True)
    assert len(texts) == len(plain) == GROUP * NUM_GROUPS and num_accepted > 500
    before = likeliest(PROMPT, 2)
    return [
        deviation(*([text[place] for text in some if text[:place] == before[:place]] for some in (texts, plain)))
        for place in range(3)
    ]


@pytest.mark.slow
def test_tokens_that_went_through_drafts_are_distributed_as_others() -> None:
    assert max(deviations()) < 4


@pytest.mark.slow
def test_a_planted_bias_towards_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "slipstream.engine.triton_step" if DEVICE.type == "cuda" else "slipstream.engine.step"
    module = importlib.import_module(name)
    honest = module.commit

    def biased(state: StepState, step: PackedStep, tokens_N: Tensor, logprobs_N: Tensor) -> None:
        """Every second first draft is taken for right, whatever was sampled."""
        for row, slot in enumerate(step.rows.slot_R.tolist()):
            start, end = step.sample_start_R1[row : row + 2].tolist()
            if end - start > 1 and int(state["seed_low"][slot]) % 2 == 0:
                tokens_N[start] = state["drafts"][slot, 0]
        honest(state, step, tokens_N, logprobs_N)

    monkeypatch.setattr(module, "commit", biased)
    assert max(deviations()) > 6
