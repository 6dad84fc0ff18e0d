"""What steps of an engine gave and took, by way of drafting, as policies write it down: for benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slipstream.draft.selector import Selector
from slipstream.engine.engine import Engine
from slipstream.engine.sequences import StepPlan
from slipstream.engine.strategy import Always, StepDrafts, StepResult, Strategy, size_of


class Recorded(Always):
    """What each step of a way gave, and how long it took."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.steps: list[tuple[int, float, float]] = []

    def observe(self, step: StepResult) -> None:
        self.steps.append((step.batch, round(step.tokens_each, 3), round(step.seconds * 1e6, 1)))


class Account:
    """Where steps went, [steps, tokens, seconds]: by size, kind of text, way, and whether it was then the best. Steps
    with prompts, and those that needed a graph, are not told to a policy: what they took is what is missing here."""

    spent: dict[str, list[float]]

    def add(self, step: StepResult, is_best: bool) -> None:
        texts = f"{'repeated' if step.is_matching else 'new'} texts{'' if is_best else ', on trial'}"
        line = self.spent.setdefault(f"{size_of(step.batch)}, {texts}: {step.strategy}", [0.0] * 3)
        for place, value in enumerate((1, step.batch * step.tokens_each, step.seconds)):
            line[place] += value


class AccountedSelector(Selector, Account):
    def __init__(self, strategies: Sequence[Strategy]) -> None:
        # In full use from the start: what has to be prepared is prepared before anything is timed.
        super().__init__(strategies, has_price=torch.cuda.is_available(), preparing=math.inf)
        self.spent = {}

    def observe(self, step: StepResult) -> None:
        self.add(step, is_best=step.strategy == self.best(step.batch, step.is_matching))
        super().observe(step)


class AccountedAlways(Always, Account):
    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.spent = {}

    def observe(self, step: StepResult) -> None:
        self.add(step, is_best=True)


class Dry:
    """Of an engine's steps, those at whose launch the GPU had done all that it was given: it waited for the host."""

    def __init__(self, engine: Engine) -> None:
        self.num_steps = self.num_dry = 0
        run_step = engine._run_step

        def counting(plan: StepPlan, drafts: StepDrafts) -> bool:
            self.num_steps += 1
            done = engine._unread[-1].done if engine._unread else None
            self.num_dry += isinstance(done, torch.cuda.Event) and done.query()
            return run_step(plan, drafts)

        engine._run_step = counting  # type: ignore[method-assign]

    def take_share(self) -> float:
        """Since this was last asked."""
        share = self.num_dry / max(1, self.num_steps)
        self.num_steps = self.num_dry = 0
        return share
