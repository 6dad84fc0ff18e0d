"""What came of a simulation: when steps were done, and what GPUs did meanwhile. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FILLING = 2
"""Steps at the beginning in which pipelines fill."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    sampled_s: float
    """When it was known what it is trained on."""
    trained_s: float
    ready_s: float
    """When its weights were on the workers."""
    rollouts: tuple[str, ...]
    busy_gpu_s: float
    """GPU-time spent decoding or training until it was trained."""
    had_gpu_s: float
    """GPU-time that there was until then."""
    lent_gpu_s: float
    """GPU-time for which workers without work were lent until then."""
    num_workers: int


@dataclass(frozen=True, slots=True)
class Outcome:
    steps: list[StepTimes]
    staleness: int
    num_moved: int
    """Rollouts taken from one worker and given to another."""
    num_events: int
    forecasts: list[dict[str, float]]
    """Of each step: how good the forecasts of lengths were."""
    decoding: list[tuple[float, int]]
    """(time, GPUs of workers with something to decode from then on)."""

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next, once pipelines are full and as long as there is a next step to sample."""
        first, last, num_steps = self._steady()
        return (last.trained_s - first.trained_s) / num_steps

    @property
    def idle_share(self) -> float:
        """GPU-time in which nothing was decoded or trained, in the same steps."""
        first, last, _ = self._steady()
        return 1 - (last.busy_gpu_s - first.busy_gpu_s) / (last.had_gpu_s - first.had_gpu_s)

    @property
    def gpu_s(self) -> float:
        """GPU-seconds that a step has, in the same steps."""
        first, last, num_steps = self._steady()
        return (last.had_gpu_s - first.had_gpu_s) / num_steps

    @property
    def lent_share(self) -> float:
        """GPU-time for which workers were lent, in the same steps."""
        first, last, _ = self._steady()
        return (last.lent_gpu_s - first.lent_gpu_s) / (last.had_gpu_s - first.had_gpu_s)

    def forecast_metrics(self) -> dict[str, float]:
        """On average over the second half of the steps; none if lengths were known."""
        steady = self.forecasts[len(self.forecasts) // 2 :]
        names = steady[0] if steady else ()
        return {name: sum(one[name] for one in steady) / len(steady) for name in names}

    def decoding_over(self, num_points: int) -> dict[float, float]:
        """{seconds since pipelines were full: GPUs that decode}, until there was no next step to sample."""
        first, last = (step.trained_s for step in self._steady()[:2])
        times = [first + (last - first) * point / (num_points - 1) for point in range(num_points)]
        found: dict[float, float] = {}
        place = 0
        for at_s in times:
            while place + 1 < len(self.decoding) and self.decoding[place + 1][0] <= at_s:
                place += 1
            found[round(at_s - first, 3)] = float(self.decoding[place][1])
        return found

    def _steady(self) -> tuple[StepTimes, StepTimes, int]:
        """From which step to which, and how many that is: steps that may overlap come in turns, a long and a short one,
        so whole turns count."""
        least = least_steps(self.staleness)
        if len(self.steps) < least:
            raise ValueError(f"at least {least} steps are needed to tell the time of one, not {len(self.steps)}")
        num_steps = len(self.steps) - FILLING - 1 - self.staleness
        num_steps -= num_steps % (self.staleness + 1)
        return self.steps[FILLING], self.steps[FILLING + num_steps], num_steps


def least_steps(staleness: int, turns: int = 1) -> int:
    """Steps to simulate, so that so many turns of steady ones are among them."""
    return FILLING + 1 + staleness + turns * (staleness + 1)
