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

from slipstream.simulate.costs import BYTES, GPUS, Gpu, costs_of, gpus_a_worker
from slipstream.simulate.study import best_result
from slipstream.simulate.systems import SYSTEMS
from slipstream.simulate.workloads import LongTail, SimulatedStep
from slipstream.simulate.world import simulate

OUR_SYSTEM = "Slipstream"
TRAINED_BYTES = 16
"""Of a weight: the weight, its gradient and two moments in single precision, shared among the GPUs that train."""
MEMORY_TO_TRAIN = 0.7
"""Of a GPU: the rest is for activations."""
STEPS = 8
MOST_ROLLOUTS = 512
"""Of a simulated step: larger ones are simulated in part."""
SEEDS = (0, 1, 2)
"""A plan's time is the mean over so many workloads; where it is split, the first decides."""
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
        if offer.count < 1 or (offer.price is not None and not 0 < offer.price < math.inf):
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

    def __post_init__(self) -> None:
        if not 0 < self.billions < math.inf:
            raise ValueError(f"a model of {self.billions:g} billion weights cannot be: give its size, e.g. --size 7")
        if self.target is not None and not 0 < self.target < math.inf:
            raise ValueError(f"--target {self.target:g}: rollouts a second are above 0, e.g. --target 10")


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
            f"no offer can hold a worker for {need.billions:g} billion weights and what trains them: offer more GPUs"
        )
    reaching = [plan for plan in plans if need.target is None or plan.rollouts_a_s >= need.target]
    has_prices = all(plan.cost is not None for plan in plans)
    if need.target is not None and reaching:
        others = sorted((plan for plan in plans if plan not in reaching), key=lambda plan: plan.step_s)
        by_price = sorted(reaching, key=lambda plan: (plan.cost if has_prices else plan.num_gpus) or 0.0)
        return by_price + others, True
    return sorted(plans, key=lambda plan: plan.step_s), need.target is None


def _fewest_trainers(need: Need, gpu: Gpu) -> int:
    """That hold the weights and what training adds to them."""
    return math.ceil(TRAINED_BYTES * need.billions / (MEMORY_TO_TRAIN * gpu.gigabytes))


def _of_one_kind(offer: Offer, need: Need) -> list[Plan]:
    """As many of the offer as are needed for the target, or all."""
    gpu = GPUS[offer.gpu]
    unit, trainers = gpus_a_worker(need.billions, gpu), _fewest_trainers(need, gpu)
    if offer.count < unit + trainers:
        return []

    @cache
    def best(num_gpus: int) -> Plan:
        """Of this many: by a search at a smaller scale, and then as it is."""
        scale = _scale(need, num_gpus // (unit + trainers))
        steps, _ = _draw(need, scale, SEEDS[0])
        costs = costs_of(need.billions, gpu, steps, training=need.training)
        found = best_result("", SYSTEMS[OUR_SYSTEM], costs, steps, num_gpus // scale)
        train_gpus = max(trainers, round(found.train_gpus * num_gpus / (num_gpus // scale)))
        workers = max(1, (num_gpus - train_gpus) // unit)
        return _timed(offer, workers * unit, offer, max(trainers, num_gpus - workers * unit), need)

    target = need.target
    if target is None or best(offer.count).rollouts_a_s < target:
        return [best(offer.count)]
    return [best(_fewest(lambda count: best(count).rollouts_a_s >= target, unit + trainers, offer.count))]


def _of_two_kinds(sampling: Offer, training: Offer, need: Need) -> list[Plan]:
    """As few of each side as reach the target, or as do not slow the other down."""
    unit = gpus_a_worker(need.billions, GPUS[sampling.gpu])
    workers, trainers = sampling.count // unit, _fewest_trainers(need, GPUS[training.gpu])
    if not workers or training.count < trainers:
        return []

    @cache
    def timed(num_workers: int, train_gpus: int) -> Plan:
        return _timed(sampling, num_workers * unit, training, train_gpus, need)

    fastest = timed(workers, training.count)
    reaches = need.target is not None and fastest.rollouts_a_s >= need.target

    def is_enough(plan: Plan, slack: float) -> bool:
        if reaches:
            assert need.target is not None
            return plan.rollouts_a_s >= need.target
        return plan.step_s <= slack * fastest.step_s

    train_gpus = _fewest(lambda count: is_enough(timed(workers, count), 1.02), trainers, training.count)
    num_workers = _fewest(lambda count: is_enough(timed(count, train_gpus), 1.04), 1, workers)
    return [timed(num_workers, train_gpus)]


def _fewest(is_enough: Callable[[int], bool], least: int, most: int) -> int:
    """To a sixteenth; `most` is enough."""
    low, high = least - 1, most
    while high - low > max(1, high // 16):
        middle = (low + high + 1) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _scale(need: Need, most: int) -> int:
    """So many times smaller a step is simulated: at most `most`, and no smaller than a prompt."""
    return max(1, min(need.prompts * need.samples // MOST_ROLLOUTS, need.prompts, most))


def _draw(need: Need, scale: int, seed: int) -> tuple[list[SimulatedStep], float]:
    """A part of the steps, and how many times larger they are in truth than this part times `scale`."""
    prompts = max(1, round(need.prompts / scale))
    steps = need.lengths.draw(
        num_prompts=4 * prompts, prompts_per_step=prompts, samples=need.samples, steps=STEPS, seed=seed
    )
    return steps, need.prompts / (scale * prompts)


def _timed(sampling: Offer, sampling_gpus: int, training: Offer, train_gpus: int, need: Need) -> Plan:
    """Simulated with the split as it is, at a scale at which one worker and one trainer are left at least."""
    unit = gpus_a_worker(need.billions, GPUS[sampling.gpu])
    scale = _scale(need, min(sampling_gpus // unit, train_gpus))
    workers = max(1, round(sampling_gpus / scale / unit))
    trainers = max(1, round(train_gpus * workers * unit / sampling_gpus))
    times, idle = [], []
    for seed in SEEDS:
        steps, larger = _draw(need, scale, seed)
        costs = costs_of(need.billions, GPUS[sampling.gpu], steps, training=need.training)
        trainer = costs_of(need.billions, GPUS[training.gpu], steps, training=need.training)
        is_far = sampling.gpu != training.gpu
        weights_s = BYTES * need.billions * 1e9 / FAR_BYTES_S if is_far else costs.weights_s
        costs = dataclasses.replace(costs, train_gpu_s=trainer.train_gpu_s, weights_s=weights_s)
        outcome = simulate(SYSTEMS[OUR_SYSTEM], costs, steps, num_gpus=workers * unit + trainers, train_gpus=trainers)
        # What rounding to whole workers and prompts adds or takes is made up for.
        times.append(outcome.step_s * larger * workers * unit * scale / sampling_gpus)
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
