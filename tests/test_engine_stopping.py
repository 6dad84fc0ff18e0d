"""Stop texts: a response ends with the token that completes one, however many were sampled in the same step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import Text
from slipstream.engine.engine import Engine
from slipstream.engine.stopping import StopTexts
from slipstream.engine.strategy import Always, Strategy
from slipstream.models.loading import load_model
from slipstream.types import Request, Rollout, SamplingParams


def letters(token_ids: Sequence[int]) -> str:
    """A tokenizer whose token 99 is two letters and whose tokens lose the spaces at the edges of a text."""
    return "".join({98: " ", 99: "xy"}.get(token, chr(97 + token % 26)) for token in token_ids).strip()


@pytest.mark.parametrize(
    ("token_ids", "num_old", "stops", "end"),
    [
        ([0, 1, 2, 3], 0, ["bc"], 3),
        ([0, 1, 2, 3], 3, ["bc"], None),
        ([0, 1, 2, 3], 2, ["zz", "cd"], 4),
        ([0, 99, 1], 0, ["ax"], 2),
        ([0, 1, 98, 2], 0, ["b c"], 4),
        ([0, 1, 98, 2], 0, ["b "], 4),
        ([0, 1, 2], 0, ["q"], None),
    ],
)
def test_the_token_that_completes_a_stop_text(
    token_ids: list[int], num_old: int, stops: list[str], end: int | None
) -> None:
    assert StopTexts(letters).end_of(token_ids, num_old, stops) == end


def test_a_sign_that_is_cut_between_tokens_is_found() -> None:
    def by_bytes(token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    text = list("done\u3002more".encode())
    assert StopTexts(by_bytes).end_of(text, 0, ["\u3002"]) == 7


@cache
def tiny() -> PreTrainedModel:
    return load_model("tiny", dtype=torch.float32, device=torch.device("cpu"))


def decode(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in token_ids)


def generate(stop: tuple[str, ...], past: Sequence[Rollout] = (), *, steps_ahead: int = 0) -> dict[str, Rollout]:
    sampling = SamplingParams(max_new_tokens=40, stop=stop)
    drafter = HistoryDrafter(
        num_slots=4,
        max_drafts=6,
        library_tokens=9000,
        device=torch.device("cpu"),
        past=lambda _: [Text(rollout.token_ids, 1) for rollout in past],
    )
    engine = Engine(
        tiny(),
        max_sequences=4,
        max_length=64,
        steps_ahead=steps_ahead,
        drafter=drafter if past else None,
        policy=Always(Strategy(6.0)) if past else None,
        decode=decode,
    )
    engine.submit([Request(f"r{n}", "g", (5, 6, 7), n, sampling) for n in range(6)])
    rollouts = {}
    while engine.has_work:
        rollouts |= {rollout.request.uid: rollout for rollout in engine.step()}
    assert engine.facts().num_free_pages == engine.facts().num_pages
    assert engine.facts().decode_tokens == sum(len(rollout.token_ids) for rollout in rollouts.values())
    return rollouts


@pytest.mark.parametrize("steps_ahead", [0, 2])
@pytest.mark.parametrize("drafts", [False, True])
def test_stopped_rollouts_are_the_beginnings_of_those_that_go_on(steps_ahead: int, drafts: bool) -> None:
    """Of two stop texts one is a token, the other three, which come in one step or in several."""
    whole = generate(())
    first, second, *_ = (rollout.token_ids for rollout in whole.values())
    stops = (decode(first[10:13]), decode(second[10:11]))
    stopped = generate(stops, list(whole.values()) if drafts else (), steps_ahead=steps_ahead)
    assert len(stopped["r0"].token_ids) <= 13 and len(stopped["r1"].token_ids) <= 11
    for uid, rollout in stopped.items():
        length = len(rollout.token_ids)
        assert rollout.token_ids == whole[uid].token_ids[:length] and rollout.logprobs == whole[uid].logprobs[:length]
        met = [stop in decode(rollout.token_ids) for stop in stops]
        assert rollout.finish_reason == ("stop" if any(met) else "length")
        assert not any(stop in decode(rollout.token_ids[:-1]) for stop in stops)


def test_an_engine_that_cannot_decode_says_so() -> None:
    engine = Engine(tiny(), max_sequences=4, max_length=64)
    with pytest.raises(ValueError, match=r"request r: sampling\.stop needs an engine that can decode"):
        engine.submit([Request("r", "g", (5, 6), 0, SamplingParams(max_new_tokens=4, stop=("x",)))])
