"""Ranking groups: rollouts of about the same length together, so that a step ends on worker after worker. Pure.

RhymeRL's pipeline. Workers that get the short groups of one step get the long ones of the next (the fleet turns the
order round), so what a worker waits for in one step it makes good in the next. That leaves no gap if completion times
are linear in rank, since then the times of a group and of its mirror image add up to the same for all; with as many
workers for each group they are not, for lengths grow faster than linearly towards the tail. `two_tiers` gives long
groups more workers, as few as keep to a line from the first group's time to the last's, and looks for the lowest line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.schedule.dispatch import Plan, WorkerSpec, longest_first

MOST_GROUPS = 16


def equal_tiers(lengths: Mapping[str, float], workers: Sequence[WorkerSpec]) -> Plan:
    groups = _ranking_groups(lengths, min(len(workers), MOST_GROUPS))
    bounds = [len(workers) * number // len(groups) for number in range(len(groups) + 1)]
    return _deal_out(groups, [bounds[i + 1] - bounds[i] for i in range(len(groups))], lengths, workers)


def two_tiers(lengths: Mapping[str, float], workers: Sequence[WorkerSpec]) -> Plan:
    groups = _ranking_groups(lengths, max(1, min(len(workers) // 2, MOST_GROUPS)))
    return _deal_out(groups, tier_sizes(groups, lengths, workers), lengths, workers)


def tier_sizes(
    groups: Sequence[Sequence[str]], lengths: Mapping[str, float], workers: Sequence[WorkerSpec]
) -> list[int]:
    """Workers of each group, shortest first: together all of them."""
    spec = workers[0]

    def time_s(group: Sequence[str], size: int) -> float:
        each = -(-len(group) // size)
        waves = -(-each // spec.slots)
        return max(lengths[uid] for uid in group) * spec.curve.token_s(min(each, spec.slots)) * waves

    def sizes_for(last_s: float) -> list[int]:
        """As few as each group needs to keep to the line that ends at `last_s`."""
        first_s = min(time_s(groups[0], 1), last_s)
        sizes = []
        for number, group in enumerate(groups):
            due_s = first_s + (last_s - first_s) * number / max(1, len(groups) - 1)
            low, high = 1, len(workers)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if time_s(group, middle) <= due_s else (middle + 1, high)
            sizes.append(low)
        return sizes

    low_s, high_s = 0.0, time_s(groups[-1], 1) + time_s(groups[0], 1)
    for _ in range(30):
        if sum(sizes_for(high_s)) <= len(workers):
            break
        low_s, high_s = high_s, 2 * high_s
    for _ in range(30):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if sum(sizes_for(middle_s)) <= len(workers) else (middle_s, high_s)
    sizes = sizes_for(high_s)
    if sum(sizes) > len(workers):
        sizes = [1] * len(groups)
    while sum(sizes) < len(workers):  # who is left helps where it takes longest
        slowest = max(range(len(groups)), key=lambda number: time_s(groups[number], sizes[number]))
        sizes[slowest] += 1
    return sizes


def _ranking_groups(lengths: Mapping[str, float], num_groups: int) -> list[list[str]]:
    """Shortest first, as many rollouts in each."""
    order = longest_first(lengths)[::-1]
    num_groups = max(1, min(num_groups, len(order)))
    bounds = [len(order) * number // num_groups for number in range(num_groups + 1)]
    return [order[bounds[i] : bounds[i + 1]] for i in range(num_groups)]


def _deal_out(
    groups: Sequence[Sequence[str]], sizes: Sequence[int], lengths: Mapping[str, float], workers: Sequence[WorkerSpec]
) -> Plan:
    plan: Plan = {worker.name: [] for worker in workers}
    first = 0
    for group, size in zip(groups, sizes, strict=True):
        crew = workers[first : first + size]
        first += size
        for place, uid in enumerate(sorted(group, key=lambda uid: (-lengths[uid], uid))):
            plan[crew[place % len(crew)].name].append(uid)
    return plan
