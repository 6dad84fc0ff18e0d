"""Hints that a run gives from the metrics of its steps: what goes wrong, why that usually is, which setting to change.

Owns the conditions and the wording. Pure: `Advice` is told the row of each finished step, in order, and answers with
hints; the same rows always give the same hints, so a resumed run and `report.html` replay the recorded ones. Every kind
of hint is given once, but for a missing reward signal, which is told again each time that it has lasted three times as
long. A number that a row lacks, or that is not finite, is no evidence of anything.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.config import Config
from slipstream.observe.metrics import draft_share_name
from slipstream.observe.store import RunStore, StoredRollout
from slipstream.types import MODEL_ORIGIN

Row = Mapping[str, float]
"""The metrics of a step."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The numbers that hints depend on, and where each comes from.

    "Healthy runs" are the recorded ones of tests/data/healthy_runs.json: the quickstart recipe with several seeds, and
    SmolLM2-135M on reasoning tasks. None of them may be given a hint about its learning.
    """

    silent_steps: int = 3
    """Steps in a row without a signal before the first hint. Healthy runs had none in a row; one can be chance."""
    cut_share: float = 0.9
    """Responses at the length limit, from which on the limit is named as the reason for rewards that are all equal.
    Healthy runs began with 0.28 at most."""
    recent_steps: int = 5
    """Steps whose median stands for "now", and as many at the start for "at first": outlasts two odd steps."""
    windows: tuple[int, ...] = (10, 40, 160)
    """Steps over which rewards are averaged to find a fall: short ones see a collapse, long ones a slow decline."""
    fall_errors: float = 6.0
    """Standard errors of the difference of two windows. The best of many windows is compared, and flat noise of a
    thousand steps reached 4.9 (tests/test_observe_advice.py)."""
    fall_share: float = 0.25
    """Part of what the reward had gained that must be lost: less is a dip."""
    undone_steps: int = 20
    """RL steps from the warm start within which a loss is put down to the first updates."""
    undone_errors: float = 4.0
    """Standard errors of the difference between the warm start's reward and the present one. Up to twenty steps are
    looked at: 4 makes a false alarm one in thousands of runs."""
    undone_share: float = 0.1
    """Part of the warm start's reward that must be lost as well: less is no loss worth a hint."""
    reference_kl: float = 0.5
    """actor/kl, nats a token, that counts as run away. A healthy policy has 0.1 to 2.5 nats of entropy a token: half a
    nat from the reference in every token is another text, not another answer."""
    mismatch: float = 0.05
    """mismatch_kl, nats a token, that counts as run away. KL = variance / 2 of the log-ratio: deviation 0.32, so that a
    token in seventy exceeds algorithm.importance_cap at its default of 2. Healthy runs: below 0.001 in bfloat16."""
    growth: float = 3.0
    """Times the first value that a KL must have grown by, or a length without a gain in reward."""
    clip_rise: float = 0.25
    """Rise of the share of cut responses, to at least half of all, that counts as lengths running into the limit."""
    entropy_left: float = 0.1
    """Part of the first entropy that is left after a collapse. Healthy SmolLM2 came down to 0.03 of it, still learning,
    so it needs `equal_groups` as well."""
    equal_groups: float = 0.9
    """Share of groups without a spread of rewards. Healthy SmolLM2 had 0.88 at most, with entropy at 0.03."""
    solved: float = 0.9
    """Part of the full reward above which neither is a fault: the task is learned."""
    drift_kl: float = 0.003
    """mismatch_kl of rollouts a step old. In the quickstart such rollouts taught less than fresh ones at 0.005, and as
    much at half the learning rate, where it was 0.001 (docs/log.md)."""
    drafter_steps: int = 20
    """Steps by which a drafter should have begun to pay."""
    drafter_share: float = 0.03
    """Part of the time of these steps that is worth a hint, spent on the drafter's updates."""
    drafter_tokens: float = 0.02
    """Part of their tokens below which a drafter gives next to nothing."""


CONDITIONS = Conditions()


@dataclass(frozen=True, slots=True)
class Hint:
    kind: str
    step: int
    text: str
    needs_example: bool = False
    """Whether a completion of this step shows what the text says."""

    def lines(self, store: RunStore) -> list[str]:
        """The text, and the completion if it needs one."""
        head = f"hint after step {self.step}: {self.text}"
        if not self.needs_example:
            return [head]
        return [head, *example_lines(store.rollouts(step=self.step, kind="train", limit=1))]


class Detector(Protocol):
    def after_step(self, step: int, row: Row) -> Hint | None: ...


class Advice:
    """All detectors of a run."""

    def __init__(self, config: Config) -> None:
        full_reward = sum(max(0.0, function.weight) for function in config.reward.functions)
        limit = config.sampling.max_new_tokens
        self._signal = MissingSignal(
            full_reward,
            limit,
            compares_whole_steps=config.algorithm.compares_whole_steps,
            has_warmup=config.warmup is not None,
        )
        self._fall = FallingReward(config.train.lr)
        self._detectors: list[Detector] = [
            self._signal,
            self._fall,
            *([UndoneWarmStart(config.train.lr)] if config.warmup is not None else []),
            RunawayKL("actor/kl", CONDITIONS.reference_kl, _REFERENCE_WORDS),
            RunawayKL("mismatch_kl", CONDITIONS.mismatch, _MISMATCH_WORDS),
            RunawayLength(limit),
            EntropyCollapse(full_reward),
            Drift(),
            Lessons(config.draft.source),
        ]

    def after_step(self, step: int, row: Row) -> list[Hint]:
        """What to say of a step that is finished; step 0 is what was evaluated before the first."""
        known = {name: value for name, value in row.items() if math.isfinite(value)}
        found = (detector.after_step(step, known) for detector in self._detectors)
        return [hint for hint in found if hint is not None]

    def replay(self, metrics: Mapping[str, Mapping[int, float]]) -> list[Hint]:
        """Hints of recorded metrics, {name: {step: value}}; afterwards the next step follows on them."""
        rows: dict[int, dict[str, float]] = {}
        for name, series in metrics.items():
            for step, value in series.items():
                rows.setdefault(step, {})[name] = value
        return self.replay_rows(sorted(rows.items()))

    def replay_rows(self, rows: Iterable[tuple[int, Row]]) -> list[Hint]:
        """The same of (step, its metrics), steps ascending."""
        return [hint for step, row in rows for hint in self.after_step(step, row)]

    def verdict(self) -> list[str]:
        """What is wrong with the run as a whole, for its last lines; nothing for one that has learned."""
        return [text for text in (self._signal.verdict(), self._fall.verdict()) if text is not None]


def example_lines(rollouts: Sequence[StoredRollout], limit: int = 200) -> list[str]:
    """One completion with its prompt and reward, each shortened to `limit` characters."""
    if not rollouts:
        return []
    one = rollouts[0]
    worth = f"not scored ({one.fault})" if one.reward is None else f"reward {one.reward:g}"
    return [
        f"  for example, prompt: {_shortened(one.prompt_text, limit)}",
        f"  completion ({one.length} tokens, {one.finish_reason}, {_shortened(worth, limit)}): "
        f"{_shortened(one.text, limit)}",
    ]


def _shortened(text: str, limit: int) -> str:
    shown = repr(text if len(text) <= limit else text[:limit])[1:-1]
    return shown if len(text) <= limit else f"{shown} [... {len(text) - limit} more characters]"


class MissingSignal:
    """Steps in which no group has samples of different rewards, so that there is nothing to learn from."""

    def __init__(
        self, full_reward: float, max_new_tokens: int, *, compares_whole_steps: bool, has_warmup: bool
    ) -> None:
        """`full_reward`: what the reward functions give in all to a right answer, if each gives 1."""
        self._compares_whole_steps, self._full_reward = compares_whole_steps, full_reward
        self._max_new_tokens, self._has_warmup = max_new_tokens, has_warmup
        self._reasons: list[str] = []
        """Of the steps in a row that had no signal."""
        self._value = 0.0
        """The reward that all samples of the last of them had."""
        self._before: list[float] = []
        """The mean rewards of the steps that had a signal."""
        self._all_reasons = Counter[str]()
        self._num_steps = 0
        self._tell_at = CONDITIONS.silent_steps

    def after_step(self, step: int, row: Row) -> Hint | None:
        if "reward/unscored" not in row:
            return None
        self._num_steps += 1
        reason = self._reason(row)
        if reason is None:
            self._before.append(row["reward/mean"])
            self._reasons.clear()
            return None
        self._reasons.append(reason)
        self._all_reasons[reason] += 1
        self._value = row.get("reward/mean", 0.0)
        count = len(self._reasons)
        if count < self._tell_at:
            return None
        self._tell_at = 3 * count
        words = self._words(Counter(self._reasons).most_common(1)[0][0])
        return Hint("no signal", step, f"no group had a reward signal in the last {count} steps: {words}", True)

    def verdict(self) -> str | None:
        silent = sum(self._all_reasons.values())
        if not silent or 2 * silent < self._num_steps:
            return None
        words = self._words(self._all_reasons.most_common(1)[0][0])
        if silent == self._num_steps:
            return f"nothing was learned, because no group had a reward signal in any step: {words}"
        return f"in {silent} of {self._num_steps} steps no group had a reward signal: {words}"

    def _reason(self, row: Row) -> str | None:
        """None if there is a signal."""
        if any(name not in row for name in ("reward/mean", "reward/min", "reward/max")):
            return "unscored"
        low, high = row["reward/min"], row["reward/max"]
        if low < high:
            is_equal = not self._compares_whole_steps and row.get("reward/zero_spread_groups", 0.0) >= 1.0
            return "by prompt" if is_equal else None
        if self._full_reward > 0 and high >= self._full_reward - 1e-9:
            return "full"
        others = self._num_steps - 1 - len(self._reasons) - len(self._before)
        if len(self._before) > others and statistics.fmean(self._before) > high:
            return "lost"
        if row.get("response_length/clip_ratio", 0.0) >= CONDITIONS.cut_share:
            return "cut"
        return "zero" if high == 0 else "constant"

    def _words(self, reason: str) -> str:
        limit = self._max_new_tokens
        start = "a longer warm start (warmup.steps)" if self._has_warmup else "a warm start (warmup)"
        easier = f"easier problems (tasks.train), {start}, a model that is better at this, or a larger "
        easier += "train.samples_per_prompt"
        before = statistics.fmean(self._before) if self._before else 0.0
        return {
            "unscored": "no sample could be scored, since every reward function raised, hung or gave None. Look at the "
            "faults among the samples in report.html, and at reward.functions",
            "lost": f"every sample got the reward {self._value:g}, where the mean was {before:.3f} before. An update "
            "has broken the policy, or rewards are rare: lower train.lr and go back to an earlier checkpoint",
            "cut": f"nearly all responses were cut at sampling.max_new_tokens={limit}, before there was an answer, and "
            f"all got the same reward, {self._value:g}. Raise sampling.max_new_tokens, or ask for shorter answers "
            "(tasks.train.0.system or .template)",
            "full": "every sample got the full reward. The task is solved, or was too easy from the start: stop here, "
            "or train on harder problems (tasks.train)",
            "zero": "every sample got reward 0. The task is too hard for the model as it is, or its answers never have "
            f"the form that the reward looks for. Try {easier}; or ask for the form (tasks.train.0.system or "
            ".template)",
            "constant": f"every sample got the reward {self._value:g}, whatever it was. The reward does not tell "
            "answers apart, or none has the form that it looks for: check reward.functions on a completion; then try "
            f"{easier}",
            "by prompt": "samples of one prompt all got the same reward: each prompt is always solved or never. Train "
            "on problems in between (tasks.train, algorithm.dynamic_sampling=true leaves the others out), raise "
            "sampling.temperature, or use a larger train.samples_per_prompt",
        }[reason]


class FallingReward:
    """A mean reward that was clearly higher before, over windows of several lengths."""

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._sums = [0.0]
        """Of the rewards so far: prefix sums, so that a window's mean is one subtraction."""
        self._squares = 0.0
        """Of the differences between neighbouring steps: twice the variance of a step's noise, whatever the trend."""
        self._last: float | None = None
        self._steps: list[int] = []
        self._best: dict[int, tuple[float, int]] = {}
        """By window: its best mean so far, not reaching into the present one, and where that ended."""
        self._first: dict[int, float] = {}
        self._is_told = False
        self._fallen: str | None = None

    def after_step(self, step: int, row: Row) -> Hint | None:
        if "reward/mean" not in row:
            return None
        reward = row["reward/mean"]
        if self._last is not None:
            self._squares += (reward - self._last) ** 2
        self._last = reward
        self._steps.append(step)
        self._sums.append(self._sums[-1] + reward)
        found = [words for window in CONDITIONS.windows if (words := self._fall(window)) is not None]
        self._fallen = found[0] if found else None
        if self._is_told or not found:
            return None
        self._is_told = True
        return Hint(
            "falling reward",
            step,
            f"{found[0]}. Go back to an earlier checkpoint with a lower train.lr (now {self._lr:g}), "
            "train.lr_schedule=linear, or a pull towards the first model (algorithm.kl_coef=0.01)",
        )

    def verdict(self) -> str | None:
        return self._fallen

    def _fall(self, window: int) -> str | None:
        """Whether the last steps are below the best earlier ones."""
        count = len(self._steps)
        if count < 2 * window:
            return None
        end = count - window  # the newest window that does not overlap the present one
        earlier, now = ((self._sums[place] - self._sums[place - window]) / window for place in (end, count))
        first = self._first.setdefault(window, earlier)
        if earlier > self._best.get(window, (-math.inf, 0))[0]:
            self._best[window] = earlier, end
        best, best_end = self._best[window]
        error = math.sqrt(self._squares / (2 * (count - 1)) * 2 / window)
        drop = best - now
        if drop <= max(CONDITIONS.fall_errors * error, CONDITIONS.fall_share * (best - first), 1e-9):
            return None
        then, here = (f"{self._steps[place - window]}-{self._steps[place - 1]}" for place in (best_end, count))
        return f"the reward has fallen, from {best:.3f} over steps {then} to {now:.3f} over steps {here}"


class UndoneWarmStart:
    """A reward or an evaluation that falls below where the warm start ended, within the first steps of RL."""

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._start: dict[str, tuple[float, float]] = {}
        """By what is measured: its value before the first update, and the standard error of that."""
        self._recent = deque[tuple[float, float]](maxlen=3)
        self._is_told = False

    def after_step(self, step: int, row: Row) -> Hint | None:
        if self._is_told or step > CONDITIONS.undone_steps:
            return None
        found: list[tuple[str, float, float]] = []
        for name, value in row.items():
            matched = re.fullmatch(r"(eval/.+)/avg@\d+", name)
            if matched and f"{matched[1]}/stderr" in row:
                found.append((matched[1], value, row[f"{matched[1]}/stderr"]))
        if "reward/stderr" in row and "reward/mean" in row:
            # Rollouts of step 1 come from the warm start's own weights.
            self._recent.append((row["reward/mean"], row["reward/stderr"]))
            if step == 1:
                found.append(("reward", *self._recent[0]))
            elif len(self._recent) == 3 and step > 3:
                mean = statistics.fmean(value for value, _ in self._recent)
                error = math.sqrt(sum(error**2 for _, error in self._recent)) / 3
                found.append(("reward", mean, error))
        for name, value, error in found:
            if name not in self._start:
                if step <= (1 if name == "reward" else 0):
                    self._start[name] = value, error
                continue
            began, began_error = self._start[name]
            lost = began - value
            least = max(CONDITIONS.undone_errors * math.hypot(error, began_error), CONDITIONS.undone_share * abs(began))
            if lost > least:
                self._is_told = True
                return Hint(
                    "undone warm start",
                    step,
                    f"the first updates undo the warm start: {name} was {began:.3f} after it and is {value:.3f} now. "
                    f"Lower train.lr (now {self._lr:g}; a quarter of it is a good next try), raise "
                    "train.lr_warmup_steps, or hold on to the warm start with algorithm.kl_coef=0.01",
                )
        return None


_REFERENCE_WORDS = (
    "the policy is far from the model that RL started from and goes on moving away. Raise algorithm.kl_coef or lower "
    "train.lr"
)
_MISMATCH_WORDS = (
    "the trainer's probabilities are far from those that the rollouts were sampled with, and many importance weights "
    "are cut. Lower train.lr; with mode=async or rhyme try mode=sync; in bfloat16 try engine.dtype=float32 or "
    "train.precision=float32"
)


class RunawayKL:
    """A divergence that has reached a level and grows."""

    def __init__(self, name: str, level: float, words: str) -> None:
        self._name, self._level, self._words = name, level, words
        self._window = _FirstAndRecent()
        self._is_told = False

    def after_step(self, step: int, row: Row) -> Hint | None:
        if self._is_told or self._name not in row or not self._window.add(row[self._name]):
            return None
        if self._window.now < max(self._level, CONDITIONS.growth * self._window.first):
            return None
        self._is_told = True
        words = f"{self._name} has run away, from {self._window.first:.2g} to {self._window.now:.2g} nats a token"
        return Hint(self._name, step, f"{words}: {self._words}")


class RunawayLength:
    """Responses that grow into the length limit, or grow for nothing."""

    def __init__(self, max_new_tokens: int) -> None:
        self._limit = max_new_tokens
        self._lengths, self._cut, self._rewards = _FirstAndRecent(), _FirstAndRecent(), _FirstAndRecent()
        self._is_told = False

    def after_step(self, step: int, row: Row) -> Hint | None:
        names = ("response_length/mean", "response_length/clip_ratio", "reward/mean")
        if self._is_told or any(name not in row for name in names):
            return None
        windows = (self._lengths, self._cut, self._rewards)
        are_known = [window.add(row[name]) for window, name in zip(windows, names, strict=True)]
        if not all(are_known):
            return None
        length, cut, reward = windows
        if cut.now >= max(0.5, cut.first + CONDITIONS.clip_rise):
            what = f"{cut.now:.0%} of the responses are cut at sampling.max_new_tokens={self._limit}, at first "
            what += f"{cut.first:.0%}. Raise sampling.max_new_tokens"
        elif length.now >= CONDITIONS.growth * length.first and reward.now <= reward.first:
            what = f"responses have {length.now:.0f} tokens instead of {length.first:.0f}, for no more reward"
            what += f" ({reward.first:.3f} then, {reward.now:.3f} now)"
        else:
            return None
        self._is_told = True
        words = "; or let each token count alike, so that long wrong answers are not spared: "
        return Hint("length", step, f"{what}{words}algorithm.aggregation=token_mean or constant; or lower train.lr")


class EntropyCollapse:
    """A policy that gives nearly the same answer each time, before it has learned the task."""

    def __init__(self, full_reward: float) -> None:
        self._full_reward = full_reward
        self._entropy, self._equal, self._rewards = _FirstAndRecent(), _FirstAndRecent(), _FirstAndRecent()
        self._is_told = False

    def after_step(self, step: int, row: Row) -> Hint | None:
        names = ("actor/entropy", "reward/zero_spread_groups", "reward/mean")
        if self._is_told or any(name not in row for name in names):
            return None
        windows = (self._entropy, self._equal, self._rewards)
        are_known = [window.add(row[name]) for window, name in zip(windows, names, strict=True)]
        if not all(are_known):
            return None
        entropy, equal, reward = windows
        if (
            entropy.now > CONDITIONS.entropy_left * entropy.first
            or equal.now < CONDITIONS.equal_groups
            or reward.now >= CONDITIONS.solved * self._full_reward
        ):
            return None
        self._is_told = True
        return Hint(
            "entropy",
            step,
            f"the policy has collapsed: entropy {entropy.now:.2g} nats a token, at first {entropy.first:.2g}, and in "
            f"{equal.now:.0%} of the groups all samples get the same reward, {reward.now:.3f} on average. Go back to "
            "an earlier checkpoint with a lower train.lr or algorithm.kl_coef=0.01, or a higher sampling.temperature",
        )


class _FirstAndRecent:
    """The medians of the first and of the last values of a series."""

    def __init__(self) -> None:
        self._begin: list[float] = []
        self._recent = deque[float](maxlen=CONDITIONS.recent_steps)

    def add(self, value: float) -> bool:
        """Whether both are known, and of different steps."""
        if len(self._begin) < CONDITIONS.recent_steps:
            self._begin.append(value)
            return False
        self._recent.append(value)
        return len(self._recent) == CONDITIONS.recent_steps

    @property
    def first(self) -> float:
        return statistics.median(self._begin)

    @property
    def now(self) -> float:
        return statistics.median(self._recent)


class Drift:
    """Rollouts a step old that are too old to learn from."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=CONDITIONS.recent_steps)
        self._is_told = False

    def after_step(self, step: int, row: Row) -> Hint | None:
        if self._is_told or row.get("rollout/staleness", 0.0) <= 0 or "mismatch_kl" not in row:
            return None
        self._recent.append(row["mismatch_kl"])
        typical = statistics.median(self._recent)
        if len(self._recent) < CONDITIONS.recent_steps or typical < CONDITIONS.drift_kl:
            return None
        self._is_told = True
        return Hint(
            "drift",
            step,
            f"rollouts are a step old, and a step changes the policy much (mismatch_kl {typical:.3f} a token): a lower "
            "train.lr may learn faster, or mode=sync",
        )


class Lessons:
    """A learning drafter that takes time and gives next to nothing."""

    def __init__(self, source: str) -> None:
        """`source`: draft.source."""
        self._instead = {"both": "history", "drafter": "off"}.get(source)
        self._recent = deque[tuple[float, float, float, float]](maxlen=CONDITIONS.drafter_steps)
        """Of each step: seconds of teaching, and of all else; tokens of the drafter, and all."""

    def after_step(self, step: int, row: Row) -> Hint | None:
        if self._instead is None or "timing_s/update_drafter" not in row:
            return None
        teaching_s, num_tokens = row["timing_s/update_drafter"], row["rollout/tokens"]
        num_drafted = row.get(draft_share_name(MODEL_ORIGIN), 0.0) * num_tokens
        other_s = row["timing_s/gen"] + row.get("timing_s/update_actor", 0.0)
        self._recent.append((teaching_s, other_s, num_drafted, num_tokens))
        teaching_s, other_s, num_drafted, num_tokens = (sum(of_steps) for of_steps in zip(*self._recent, strict=True))
        share, given = teaching_s / (teaching_s + other_s), num_drafted / num_tokens
        if len(self._recent) < CONDITIONS.drafter_steps:
            return None
        if share < CONDITIONS.drafter_share or given > CONDITIONS.drafter_tokens:
            return None
        instead, self._instead = self._instead, None
        return Hint(
            "drafter",
            step,
            f"in the last {CONDITIONS.drafter_steps} steps teaching the drafter took {share:.0%} of sampling and "
            f"training, and {given:.1%} of the tokens were its drafts: draft.source={instead} does without it, and "
            "with a lower drafter.updates it learns less at a time; it may still learn",
        )
