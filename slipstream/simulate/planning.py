"""Which GPUs to rent and how to split them: plans found by simulating our own system on what is on offer. Pure.

One kind of GPU for both, or one kind that samples and another that trains, in another datacenter if need be. With a
target the plan is the cheapest that reaches it, else the fastest. Large steps are simulated at a smaller scale, with as
many rollouts for each GPU.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from slipstream.simulate.costs import BYTES, GPUS, costs_of
from slipstream.simulate.study import best_result
from slipstream.simulate.systems import SYSTEMS
from slipstream.simulate.workloads import LongTail, SimulatedStep
from slipstream.simulate.world import simulate

OUR_SYSTEM = "Slipstream"
STEPS = 8
MOST_ROLLOUTS = 512
"""Of a simulated step: larger ones are simulated in part."""
SEEDS = (0, 1, 2)
"""The plan's time is the mean over so many workloads; the search looks at the first."""
FAR_BYTES_S = 10e9
"""At which weights go to another datacenter."""


@dataclass(frozen=True, slots=True)
class Offer:
    gpu: str
    count: int
    price: float | None
    """Of a GPU and hour."""

    @staticmethod
    def parse(text: str) -> Offer:
        """h100:64 or h100:64@2.5; ValueError says what to write."""
        kind, _, rest = text.strip().partition(":")
        number, _, price = rest.partition("@")
        if kind not in GPUS:
            raise ValueError(f"unknown GPU '{kind}' in '{text}'; known: {', '.join(GPUS)}")
        try:
            offer = Offer(kind, int(number), float(price) if price else None)
        except ValueError:
            raise ValueError(f"'{text}' is not like h100:64 or h100:64@2.5 (kind:count@price an hour)") from None
        if offer.count < 1 or (offer.price is not None and offer.price <= 0):
            raise ValueError(f"'{text}': at least one GPU, and a price above 0")
        return offer


@dataclass(frozen=True, slots=True)
class Need:
    billions: float
    lengths: LongTail
    prompts: int
    samples: int
    training: str = "grpo"
    target: float | None = None
    """Rollouts a second."""


@dataclass(frozen=True, slots=True)
class Plan:
    sampling: Offer
    """So many of these sample."""
    training: Offer
    step_s: float
    spread_s: float
    """Half of the range over workloads: how sure that is."""
    idle_share: float
    rollouts_a_s: float

    @property
    def num_gpus(self) -> int:
        return self.sampling.count + self.training.count

    @property
    def cost(self) -> float | None:
        """Of a step."""
        if self.sampling.price is None or self.training.price is None:
            return None
        hourly = self.sampling.count * self.sampling.price + self.training.count * self.training.price
        return hourly * self.step_s / 3600

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"cost": self.cost, "num_gpus": self.num_gpus}


def make_plans(
    offers: Sequence[Offer], need: Need, on_try: Callable[[str], None] = lambda what: None
) -> tuple[list[Plan], bool]:
    """The best first, at most one for each way to use the offers; and whether the best reaches the target."""
    plans = []
    for offer in offers:
        on_try(f"{offer.gpu} for both")
        plans += _of_one_kind(offer, need)
    for sampling in offers:
        for training in offers:
            if sampling.gpu != training.gpu:
                on_try(f"{sampling.gpu} samples, {training.gpu} trains")
                plans += _of_two_kinds(sampling, training, need)
    if not plans:
        raise ValueError(
            f"no offer can hold a worker for {need.billions:g} billion weights and a trainer: offer more GPUs"
        )
    reaching = [plan for plan in plans if need.target is None or plan.rollouts_a_s >= need.target]
    has_prices = all(plan.cost is not None for plan in plans)
    if need.target is not None and reaching:
        others = sorted((plan for plan in plans if plan not in reaching), key=lambda plan: plan.step_s)
        by_price = sorted(reaching, key=lambda plan: (plan.cost if has_prices else plan.num_gpus) or 0.0)
        return by_price + others, True
    return sorted(plans, key=lambda plan: plan.step_s), need.target is None


def _scale(need: Need) -> int:
    return max(1, need.prompts * need.samples // MOST_ROLLOUTS)


def _draw(need: Need, scale: int, seed: int) -> list[SimulatedStep]:
    prompts = max(1, need.prompts // scale)
    return need.lengths.draw(
        num_prompts=4 * prompts, prompts_per_step=prompts, samples=need.samples, steps=STEPS, seed=seed
    )


def _of_one_kind(offer: Offer, need: Need) -> list[Plan]:
    """As many of the offer as are needed for the target, or all."""
    steps = _draw(need, 1 if need.prompts * need.samples <= MOST_ROLLOUTS else _scale(need), SEEDS[0])
    costs = costs_of(need.billions, GPUS[offer.gpu], steps, training=need.training)

    @cache
    def split(num_gpus: int) -> tuple[float, int]:
        """(seconds a step, how many train)."""
        scale = min(_scale(need), max(1, num_gpus // (2 * costs.gpus_a_worker)))
        work = steps if scale == _scale(need) else _draw(need, scale, SEEDS[0])
        found = best_result("", SYSTEMS[OUR_SYSTEM], costs, work, max(num_gpus // scale, costs.gpus_a_worker + 1))
        return found.step_s, max(1, round(found.train_gpus * num_gpus / found.outcome.num_gpus))

    least = costs.gpus_a_worker + 1
    if offer.count < least:
        return []
    num_gpus = offer.count
    num_rollouts = need.prompts * need.samples
    if need.target is not None and num_rollouts / split(num_gpus)[0] >= need.target:
        low = least
        while num_gpus - low > max(1, num_gpus // 16):
            middle = (low + num_gpus) // 2
            if num_rollouts / split(middle)[0] >= need.target:
                num_gpus = middle
            else:
                low = middle
    train_gpus = split(num_gpus)[1]
    return [_timed(offer, num_gpus - train_gpus, offer, train_gpus, need)]


def _of_two_kinds(sampling: Offer, training: Offer, need: Need) -> list[Plan]:
    """All of the side that is slower; of the other as few as do not slow it down."""
    steps = _draw(need, _scale(need), SEEDS[0])
    costs = costs_of(need.billions, GPUS[sampling.gpu], steps, training=need.training)
    workers = sampling.count // costs.gpus_a_worker
    if not workers:
        return []

    @cache
    def step_s(num_workers: int, train_gpus: int) -> float:
        return _timed(sampling, num_workers * costs.gpus_a_worker, training, train_gpus, need, SEEDS[:1]).step_s

    fastest = step_s(workers, training.count)
    train_gpus = _fewest(lambda count: step_s(workers, count) <= 1.02 * fastest, training.count)
    num_workers = _fewest(lambda count: step_s(count, train_gpus) <= 1.04 * fastest, workers)
    return [_timed(sampling, num_workers * costs.gpus_a_worker, training, train_gpus, need)]


def _fewest(is_enough: Callable[[int], bool], most: int) -> int:
    low, high = 0, most
    while high - low > max(1, most // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _timed(
    sampling: Offer, sampling_gpus: int, training: Offer, train_gpus: int, need: Need, seeds: Sequence[int] = SEEDS
) -> Plan:
    """Simulated with the split as it is, at a scale at which one worker and one trainer are left at least."""
    times, idle = [], []
    for seed in seeds:
        steps = _draw(need, _scale(need), seed)
        costs = costs_of(need.billions, GPUS[sampling.gpu], steps, training=need.training)
        scale = min(_scale(need), max(1, sampling_gpus // costs.gpus_a_worker), train_gpus)
        if scale != _scale(need):
            steps = _draw(need, scale, seed)
        trainer = costs_of(need.billions, GPUS[training.gpu], steps, training=need.training)
        is_far = sampling.gpu != training.gpu
        weights_s = BYTES * need.billions * 1e9 / FAR_BYTES_S if is_far else costs.weights_s
        costs = dataclasses.replace(costs, train_gpu_s=trainer.train_gpu_s, weights_s=weights_s)
        workers = max(1, round(sampling_gpus / scale / costs.gpus_a_worker))
        # What rounding to whole workers takes or adds is made up for by the trainers' number.
        trainers = max(1, round(train_gpus * workers * costs.gpus_a_worker / sampling_gpus))
        outcome = simulate(
            SYSTEMS[OUR_SYSTEM],
            costs,
            steps,
            num_gpus=workers * costs.gpus_a_worker + trainers,
            train_gpus=trainers,
        )
        ratio = workers * costs.gpus_a_worker * scale / sampling_gpus
        times.append(outcome.step_s * ratio)
        idle.append(outcome.idle_share)
    step_s = statistics.fmean(times)
    return Plan(
        dataclasses.replace(sampling, count=sampling_gpus),
        dataclasses.replace(training, count=train_gpus),
        step_s,
        (max(times) - min(times)) / 2,
        statistics.fmean(idle),
        need.prompts * need.samples / step_s,
    )


def lengths_from(median: float, limit: float) -> LongTail:
    if not 0 < median < limit or not math.isfinite(limit):
        raise ValueError(f"a median of {median:g} tokens and a limit of {limit:g}: the limit must be above the median")
    return LongTail(median=median, limit=limit)
