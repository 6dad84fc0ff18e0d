"""The nouns of Slipstream: one frozen record per stage, true from birth.

    Problem -> Prompt -> Request -> Rollout -> Scored | Unscored -> TrainSample

Each stage returns a new type instead of filling in fields of the old one, so nothing here is None "until later".
This file imports nothing of ours and no tensor library; records travel between processes and machines as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, str]
"""One turn of a conversation: {"role": "user", "content": "..."}."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One item of a task set, as text: what to ask, and all that a reward may need to judge the answer."""

    source: str
    """The task set's name in the recipe, e.g. "train/0" or "eval/heldout"."""
    index: int
    """Position in its set; (source, index) names a problem for the whole run."""
    messages: tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the data; given to reward functions by keyword."""
    solution: str | None = None
    """A worked solution ending in the answer, where the source has one; the warm start learns from it."""
    is_conversational: bool = False
    """The data has the prompt as messages, not as a string. Reward functions get prompts and completions in the same
    form, as in TRL."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem rendered with the model's chat template."""

    problem: Problem
    token_ids: tuple[int, ...]
    key: str
    """Stable hash of token_ids: the same prompt has the same key in every run with this tokenizer."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The defaults sample the model's own distribution, as RL wants it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end a response; they stay in it."""

    @property
    def cuts_tail(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sample asked of an engine. A rollout is a pure function of (weights, prompt tokens, seed, sampling)."""

    uid: str
    """Unique in the run: "<step>/<prompt number>/<sample>" (evaluation: "eval/<set>/<step>/...")."""
    group: str
    """Requests of one group share their prompt and its prefill."""
    prompt_ids: tuple[int, ...]
    seed: int
    """64-bit, from rng.derive_seed(run seed, step, prompt key, sample)."""
    sampling: SamplingParams
    script_ids: tuple[int, ...] = ()
    """Replay: tokens to walk instead of those sampled, at the full cost of sampling them."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Weights have numbers and a content hash, so that an engine can prove what it holds."""

    number: int
    digest: str


ORIGIN_NAMES = {0: "sampled", 1: "sibling", 2: "history", 3: "own text", 4: "drafter"}
"""Where a token came from: 0 from the model alone, else from the draft of this source that was accepted."""
TEXT_ORIGINS = (1, 2, 3)
"""Of these, copied from a text."""
MODEL_ORIGIN = 4
"""Drafted by a learned drafter."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What an engine made of a request."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the temperature-scaled distribution, before any top-k/top-p/min-p cut,
    from the same float32 logits it was sampled from. So it compares with the trainer's and the reference's."""
    finish_reason: FinishReason
    first_version: int
    last_version: int
    origins: tuple[int, ...] = field(default=(), compare=False)
    """With a drafter, for each token a key of ORIGIN_NAMES. How a rollout was computed is no part of what it is."""
    log_kept: tuple[float, ...] = ()
    """Log of the probability mass that top-k, top-p and min-p kept at each token; empty without a cut. A token was
    drawn with log-probability `logprobs - log_kept`."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A rollout with its worth."""

    rollout: Rollout
    text: str
    reward: float
    parts: Mapping[str, float]
    """The value each reward function gave, by its name; reward is their weighted sum."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Metrics that reward functions logged in a call with this sample, by "function/name"."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Columns that reward functions logged for this sample: short texts and numbers."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """A rollout whose grader failed. It is counted and shown, never trained on, and never a zero."""

    rollout: Rollout
    text: str
    kind: Literal["raised", "timeout", "not_a_number", "died", "no_score"]
    detail: str
    """The traceback, or what was wrong with the value."""
    logged: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    """As in Scored, from the functions that did not fail."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """What the trainer needs to know of one scored rollout: tokens and numbers, no algorithm."""

    uid: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    advantage: float
    log_kept: tuple[float, ...] = ()
    """As in `Rollout`."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What one engine says of itself."""

    version: WeightVersion
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    prefill_tokens: int
    """Tokens computed so far only for their keys: prompts but for the last token, and what was computed again."""
    decode_tokens: int
    """Tokens sampled so far."""
    num_forwards: int
    num_preempted: int
    """Times a sequence gave up its pages to older ones, to be computed again."""
    forward_s: float
    prefill_s: float
    """Of these: in each step, by the share of its tokens that were computed only for their keys."""
    kv_bytes: int
    num_graphs: int
    graph_bytes: int
    graph_s: float
    """That the device had nothing to do, because a CUDA graph was made, or a step had none yet."""
    num_unread: int
    """Steps launched and not yet read."""
    paused: bool
