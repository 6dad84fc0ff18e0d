"""Who gets which GPU, how much of it, and whether a cluster has room: without either."""

from __future__ import annotations

import pytest

from slipstream.config import build_config
from slipstream.runtime.placement import Need, kv_tokens_in, place, seat, too_small, visible_gpu, worker_bytes

GB = 10**9


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "num_workers", "trainers", "workers"),
    [
        (1, 1, 2, [0], [0, 0]),  # all share one
        (2, 1, 1, [0], [1]),
        (2, 1, 3, [0], [1, 1, 1]),
        (4, 1, 3, [0], [1, 2, 3]),
        (4, 2, 3, [0, 1], [2, 3, 2]),  # the others in turn
        (2, 2, 3, [0, 1], [0, 1, 0]),  # no others: the trainers'
        (8, 1, 2, [0], [1, 2]),
    ],
)
def test_trainers_have_their_own_gpus_and_workers_the_others(
    num_gpus: int, num_ranks: int, num_workers: int, trainers: list[int], workers: list[int]
) -> None:
    placed = place(num_gpus, num_ranks, num_workers)
    assert [gpu for name, gpu in placed.items() if name.startswith("trainer")] == trainers
    assert [placed[f"rollout-{number}"] for number in range(num_workers)] == workers


def test_without_gpus_nobody_has_one_and_ranks_do_not_share() -> None:
    assert place(0, 2, 2) == {}
    with pytest.raises(ValueError, match=r"train.ranks=3, but there are 2 GPU.*write train.ranks=2, or device=cpu"):
        place(2, 3, 1)


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4])
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_who_shares_a_gpu_never_takes_more_than_is_free_on_it(num_gpus: int, num_workers: int) -> None:
    num_parameters, free = GB, 100 * GB
    placed = place(num_gpus, 1, num_workers)
    for gpu in range(num_gpus):
        workers = [name for name, where in placed.items() if where == gpu and name != "trainer"]
        taken = sum(worker_bytes(placed, name, free, num_parameters) for name in workers)
        trained = 16 * num_parameters if placed["trainer"] == gpu else 0
        assert taken + trained < free
        assert not workers or taken > (0.4 if trained else 0.8) * free, "what is free is used"


def test_a_worker_beside_a_trainer_that_needs_all_gets_nothing() -> None:
    assert worker_bytes(place(1, 1, 1), "rollout-0", 80 * GB, 7 * GB) == 0


def test_keys_and_values_take_what_they_need_or_what_there_is() -> None:
    assert kv_tokens_in(room_bytes=1000.0, token_bytes=2, wanted=400, max_length=100) == 400
    assert kv_tokens_in(room_bytes=600.0, token_bytes=2, wanted=400, max_length=100) == 300
    with pytest.raises(ValueError, match=r"one sequence of 100 tokens takes .*smaller rollout.workers"):
        kv_tokens_in(room_bytes=-5.0, token_bytes=2, wanted=400, max_length=100)


def test_gpus_are_counted_among_those_that_this_process_may_use() -> None:
    assert [visible_gpu(1, visible) for visible in (None, "", "2,3", "GPU-a, GPU-b")] == ["1", "1", "3", "GPU-b"]


def needs(num_ranks: int, num_workers: int, **each: float) -> list[Need]:
    names = [f"trainer-{rank}" for rank in range(num_ranks)] + [f"rollout-{number}" for number in range(num_workers)]
    return [Need(name, tuple(each.items())) for name in names]


def test_a_process_needs_a_node_with_room_for_all_of_it() -> None:
    nodes = {"a": {"GPU": 2.0, "CPU": 8.0}, "b": {"GPU": 1.0, "CPU": 1.0}}
    assert seat(needs(1, 2, GPU=1, CPU=1), nodes) == {"trainer-0": "a", "rollout-0": "a", "rollout-1": "b"}
    assert seat(needs(1, 3, GPU=1, CPU=1), nodes) is None, "three GPUs are there, not four"
    assert seat(needs(0, 2, CPU=6), nodes) is None, "nine CPUs are there, but no second node with six"
    assert nodes["a"]["GPU"] == 2.0, "what is free is not changed by asking"


def test_a_cluster_that_is_too_small_is_told_what_is_missing_and_what_to_write() -> None:
    said = too_small(needs(1, 2, GPU=1, CPU=1), {"10.0.0.1": {"GPU": 1.0, "CPU": 4.0}}, {"GPU": 2.0, "CPU": 4.0})
    assert "asks for 3 GPU, 3 CPU (trainer-0: 1 GPU, 1 CPU; rollout-0:" in said
    assert "free now: 10.0.0.1 has 1 GPU, 4 CPU (of 2 GPU, 4 CPU in all)" in said
    assert "a smaller rollout.workers or train.ranks, or runtime=local" in said
    assert "rollout.threads" in too_small(needs(1, 2, CPU=2), {"10.0.0.1": {"CPU": 2.0}}, {"CPU": 2.0})


def test_ray_without_processes_is_refused_with_what_to_write() -> None:
    tree = {"model": "tiny", "run": {"dir": "x"}, "tasks": {"train": [{"source": "gcd", "size": 4}]}, "runtime": "ray"}
    with pytest.raises(ValueError, match=r"mode=colocated has none: write mode=sync .* or runtime=local"):
        build_config(tree)
    assert build_config(tree | {"mode": "sync"}).runtime == "ray"
