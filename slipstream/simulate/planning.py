"""Which GPUs to rent and how to split them: plans found by simulating our own system on what is on offer. Pure.

One kind of GPU for both, or one kind that samples and another that trains, in another datacenter if need be. With a
target the plan is the cheapest that reaches it, by the cost of a step or by the rent of an hour; else the fastest.
Large steps are simulated at a smaller scale, with as many rollouts for each GPU.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from slipstream.simulate.costs import BYTES, GPUS, Gpu, check_billions, check_count, costs_of, gpus_a_worker
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
UNEVEN = 0.06
"""By this share a plan with more GPUs may be slower all the same: steps that overlap fall differently. The search for
the cheapest plan allows for it."""
FINE, ROUGH, NEAR = 16, 4, 1.4
"""Up to FINE workers and trainers every number is tried. With more, numbers a quarter apart (ROUGH) are, and then those
a sixteenth apart within NEAR times of the best."""

CHEAPEST = ("step", "hour")
"""Which plan of those that reach the target is the cheapest: by what a step costs, or by what an hour's rent does."""


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
        check_count(offer.count, f"'{text}'")
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
    cheapest: str = "step"
    """One of CHEAPEST."""

    def __post_init__(self) -> None:
        check_billions(self.billions)
        if self.target is not None and not 0 < self.target < math.inf:
            raise ValueError(f"--target {self.target:g}: rollouts a second are above 0, e.g. --target 10")
        if self.cheapest not in CHEAPEST:
            raise ValueError(f"--cheapest {self.cheapest}: write one of {', '.join(CHEAPEST)}")


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
    def rent(self) -> float | None:
        """Of an hour."""
        if self.sampling.price is None or self.training.price is None:
            return None
        return self.sampling.count * self.sampling.price + self.training.count * self.training.price

    @property
    def cost(self) -> float | None:
        """Of a step."""
        return None if self.rent is None else self.rent * self.step_s / 3600

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"cost": self.cost, "rent": self.rent, "num_gpus": self.num_gpus}


def make_plans(
    offers: Sequence[Offer], need: Need, on_try: Callable[[str], None] = lambda what: None
) -> tuple[list[Plan], bool]:
    """The best first, at most one for each way to use the offers; and whether the best reaches the target."""
    has_prices = all(offer.price is not None for offer in offers)
    plans = []
    for sampling, training in product(offers, offers):
        is_one = sampling.gpu == training.gpu
        if is_one and sampling is not training:
            continue  # two offers of one kind
        on_try(f"{sampling.gpu} for both" if is_one else f"{sampling.gpu} samples, {training.gpu} trains")
        found = _cheapest_plan(sampling, training, need, has_prices) if need.target is not None else None
        if found is None:
            found = _fastest_of_one_kind(sampling, need) if is_one else _fastest_of_two_kinds(sampling, training, need)
        plans += [found] if found is not None else []
    if not plans:
        raise ValueError(
            f"no offer can hold a worker for {need.billions:g} billion weights and what trains them: offer more GPUs"
        )
    target = need.target
    reaching = [plan for plan in plans if target is not None and plan.rollouts_a_s >= target]
    others = sorted((plan for plan in plans if plan not in reaching), key=lambda plan: plan.step_s)
    return sorted(reaching, key=lambda plan: _cost(plan, need, has_prices)) + others, target is None or bool(reaching)


def _cost(plan: Plan, need: Need, has_prices: bool) -> float:
    """What the cheapest plan has least of; without prices every GPU costs the same."""
    hourly = (plan.rent or 0.0) if has_prices else float(plan.num_gpus)
    return hourly * (plan.step_s if need.cheapest == "step" else 1.0)


def _fewest_trainers(need: Need, gpu: Gpu) -> int:
    """That hold the weights and what training adds to them."""
    return math.ceil(TRAINED_BYTES * need.billions / (MEMORY_TO_TRAIN * gpu.gigabytes))


def _bounds(sampling: Offer, training: Offer, need: Need) -> tuple[int, int, int, int] | None:
    """GPUs of a worker, and at most how many workers; GPUs that train, at least and at most. None: too few of them."""
    unit = gpus_a_worker(need.billions, GPUS[sampling.gpu])
    trainers = _fewest_trainers(need, GPUS[training.gpu])
    is_one = sampling.gpu == training.gpu
    workers = (sampling.count - trainers if is_one else sampling.count) // unit
    most_trainers = training.count - unit if is_one else training.count
    return (unit, workers, trainers, most_trainers) if workers > 0 and most_trainers >= trainers else None


def _fastest_of_one_kind(offer: Offer, need: Need) -> Plan | None:
    """With all of the offer, split by a search at a smaller scale; and then as it is."""
    gpu, bounds = GPUS[offer.gpu], _bounds(offer, offer, need)
    if bounds is None:
        return None
    unit, _, trainers, _ = bounds
    scale = _scale(need, offer.count // (unit + trainers))
    steps, _ = _draw(need, scale, SEEDS[0])
    costs = costs_of(need.billions, gpu, steps, training=need.training)
    found = best_result("", SYSTEMS[OUR_SYSTEM], costs, steps, offer.count // scale)
    train_gpus = max(trainers, round(found.train_gpus * offer.count / (offer.count // scale)))
    workers = max(1, (offer.count - train_gpus) // unit)
    return time_plan(offer, workers * unit, offer, max(trainers, offer.count - workers * unit), need)


def _fastest_of_two_kinds(sampling: Offer, training: Offer, need: Need) -> Plan | None:
    """As few of each side as do not slow the other down."""
    bounds = _bounds(sampling, training, need)
    if bounds is None:
        return None
    unit, workers, trainers, most_trainers = bounds

    @cache
    def timed(num_workers: int, train_gpus: int) -> Plan:
        return time_plan(sampling, num_workers * unit, training, train_gpus, need)

    fastest_s = timed(workers, most_trainers).step_s
    train_gpus = _fewest(lambda count: timed(workers, count).step_s <= 1.02 * fastest_s, trainers, most_trainers)
    num_workers = _fewest(lambda count: timed(count, train_gpus).step_s <= 1.04 * fastest_s, 1, workers)
    return timed(num_workers, train_gpus)


@dataclass(frozen=True, slots=True, order=True)
class _Box:
    """Ranges of the numbers of workers and of training GPUs, as indices into the numbers that are tried."""

    at_least: float
    """What each of them costs."""
    workers: tuple[int, int]
    trainers: tuple[int, int]
    """First and last."""


def _cheapest_plan(sampling: Offer, training: Offer, need: Need, has_prices: bool) -> Plan | None:
    """The cheapest plan of these two kinds that reaches the target; None if none does.

    Of all plans, if the sides have up to FINE workers and trainers; else of those near the best of a rough choice.
    """
    bounds = _bounds(sampling, training, need)
    if bounds is None:
        return None
    unit, workers, trainers, most_trainers = bounds

    @cache
    def timed(num_workers: int, train_gpus: int) -> Plan:
        return time_plan(sampling, num_workers * unit, training, train_gpus, need)

    def is_offered(num_workers: int, train_gpus: int) -> bool:
        return sampling.gpu != training.gpu or num_workers * unit + train_gpus <= sampling.count

    def cost(plan: Plan) -> float:
        return _cost(plan, need, has_prices)

    assert need.target is not None
    search = partial(_branch_and_bound, timed, is_offered, cost, need.target)
    fine = _numbers(1, workers, FINE), _numbers(trainers, most_trainers, FINE)
    if max(workers, most_trainers) <= FINE:
        return search(*fine, UNEVEN)
    rough = search(_numbers(1, workers, ROUGH), _numbers(trainers, most_trainers, ROUGH), 0.0)
    if rough is None:
        return search(*fine, 0.0)
    places = rough.sampling.count // unit, rough.training.count
    near = [
        sorted({place, *(number for number in numbers if place / NEAR <= number <= place * NEAR)})
        for place, numbers in zip(places, fine, strict=True)
    ]
    return search(near[0], near[1], 0.0)


def _branch_and_bound(
    timed: Callable[[int, int], Plan],
    is_offered: Callable[[int, int], bool],
    cost: Callable[[Plan], float],
    target: float,
    workers: Sequence[int],
    trainers: Sequence[int],
    uneven: float,
) -> Plan | None:
    """The cheapest plan that reaches the target, of these numbers of workers and of GPUs that train.

    No plan of a box is faster than the one with its most workers and trainers, but for `uneven`, nor has a lower rent
    than the one with its fewest: a box is looked into only if what follows from the two is cheaper than the best.
    """
    best: list[Plan] = []

    def look_at(box_workers: tuple[int, int], box_trainers: tuple[int, int]) -> _Box | None:
        """None: no plan of the box can be the best."""
        (first_worker, last_worker), (first_trainer, last_trainer) = box_workers, box_trainers
        fewest = workers[first_worker], trainers[first_trainer]
        if not is_offered(*fewest):
            return None
        while not is_offered(workers[last_worker], fewest[1]):
            last_worker -= 1
        while not is_offered(fewest[0], trainers[last_trainer]):
            last_trainer -= 1
        most = workers[last_worker], trainers[last_trainer]
        fastest, slack = timed(*most), 0.0 if most == fewest else uneven
        if fastest.rollouts_a_s < target * (1 - slack):
            return None
        if fastest.rollouts_a_s >= target and is_offered(*most):
            best[:] = [min([*best, fastest], key=cost)]
        bound = dataclasses.replace(
            fastest,
            sampling=dataclasses.replace(fastest.sampling, count=fastest.sampling.count * fewest[0] // most[0]),
            training=dataclasses.replace(fastest.training, count=fewest[1]),
            step_s=fastest.step_s * (1 - slack),
        )
        return _Box(cost(bound), (first_worker, last_worker), (first_trainer, last_trainer))

    heap = [box for box in [look_at((0, len(workers) - 1), (0, len(trainers) - 1))] if box is not None]
    while heap and not (best and heap[0].at_least >= cost(best[0])):
        box = heapq.heappop(heap)
        for half in _halves(box.workers, box.trainers):
            inside = look_at(*half)
            if inside is not None:
                heapq.heappush(heap, inside)
    return best[0] if best else None


def _numbers(least: int, most: int, parts: int) -> list[int]:
    """From `least` to `most`, both included: all up to `parts`, then in steps of that part of a number."""
    found = [least]
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // parts)))
    return found


def _halves(workers: tuple[int, int], trainers: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """A box cut in two across its longer side; nothing for a box of one."""
    if workers[0] == workers[1] and trainers[0] == trainers[1]:
        return []
    if workers[1] - workers[0] >= trainers[1] - trainers[0]:
        middle = sum(workers) // 2
        return [((workers[0], middle), trainers), ((middle + 1, workers[1]), trainers)]
    middle = sum(trainers) // 2
    return [(workers, (trainers[0], middle)), (workers, (middle + 1, trainers[1]))]


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


def time_plan(sampling: Offer, sampling_gpus: int, training: Offer, train_gpus: int, need: Need) -> Plan:
    """The plan with these numbers of GPUs of each offer, simulated at a scale that leaves one worker and one trainer at
    least."""
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
