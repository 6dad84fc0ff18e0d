"""Broadcast trees: everybody once, nobody overloaded, shallow, each far site entered once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.stream.fanout import Node, Tree, plan_tree

ROOT = Node("trainer", 10e9, "home")


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Node], int]:
    sites = draw(st.lists(st.sampled_from(["home", "east", "west", "north"]), max_size=40))
    speeds = draw(st.lists(st.sampled_from([1e9, 2e9, 10e9]), min_size=len(sites), max_size=len(sites)))
    workers = [Node(f"w{i}", speed, site) for i, (site, speed) in enumerate(zip(sites, speeds, strict=True))]
    return workers, draw(st.integers(1, 4))


def check(tree: Tree, workers: list[Node], degree: int) -> None:
    by_name = {node.name: node for node in [ROOT, *workers]}
    assert set(tree.parents) == {node.name for node in workers}, "everybody exactly once"
    assert all(tree.depth(node.name) > 0 for node in workers), "and reached from the root"
    assert all(len(tree.children(name)) <= degree for name in by_name)
    crossings = [c for c, parent in tree.parents.items() if by_name[c].site != by_name[parent].site]
    assert len(crossings) == len({node.site for node in workers} - {ROOT.site}), "a far site is entered once"


def slowest_link(tree: Tree, nodes: list[Node]) -> float:
    """Bytes a second that flow through the whole tree once it is full."""
    speed = {node.name: node.bytes_per_s for node in nodes}
    served = [speed[name] / len(tree.children(name)) for name in speed if tree.children(name)]
    return min([*(speed[name] for name in tree.parents), *served])


def depth_bound(num_workers: int, degree: int) -> int:
    """Of a tree that serves so many with so many at each node, one place of the root apart being taken."""
    return num_workers if degree == 1 else math.ceil(math.log(num_workers * (degree - 1) + 1, degree)) + 1


@settings(max_examples=150)
@given(fleet=fleets())
def test_everybody_once_nobody_overloaded_each_far_site_entered_once(fleet: tuple[list[Node], int]) -> None:
    workers, degree = fleet
    tree = plan_tree(ROOT, workers, degree)
    check(tree, workers, degree)
    seen = {ROOT.name}
    for child, parent in tree.parents.items():
        assert parent in seen, "parents come before their children"
        seen.add(child)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_workers", [1, 2, 7, 64, 500])
def test_the_depth_is_logarithmic(num_workers: int, degree: int) -> None:
    workers = [Node(f"w{i}", 1e9, "home") for i in range(num_workers)]
    tree = plan_tree(ROOT, workers, degree)
    assert max(tree.depth(worker.name) for worker in workers) <= depth_bound(num_workers, degree)
    far = plan_tree(ROOT, [Node(worker.name, 1e9, "east") for worker in workers], degree)
    assert max(far.depth(worker.name) for worker in workers) <= 1 + depth_bound(num_workers, degree)


def test_the_fast_serve_and_the_slow_do_not() -> None:
    slow, fast = [Node(f"slow{i}", 1e9, "home") for i in range(6)], [Node(f"fast{i}", 10e9, "home") for i in range(3)]
    tree = plan_tree(ROOT, [*slow, *fast], 3)
    assert tree.children(ROOT.name) == ["fast0", "fast1", "fast2"]
    assert all(tree.children(node.name) == [] for node in slow)
    assert [len(tree.children(node.name)) for node in fast] == [2, 2, 2], "equally many"
    assert slowest_link(tree, [ROOT, *slow, *fast]) == 1e9, "no link is slower than the slowest worker"
    by_hand = Tree("trainer", {"slow0": "trainer", "fast0": "slow0", "fast1": "slow0"})
    assert slowest_link(by_hand, [ROOT, *slow, *fast]) == 0.5e9, "two share what slow0 sends"


def test_a_far_site_receives_through_its_fastest_worker() -> None:
    workers = [Node("h0", 1e9, "home"), Node("e0", 1e9, "east"), Node("e1", 5e9, "east"), Node("e2", 1e9, "east")]
    tree = plan_tree(ROOT, workers, 2)
    assert tree.parents == {"e1": "trainer", "h0": "trainer", "e0": "e1", "e2": "e1"}


def test_what_cannot_be_planned_is_told() -> None:
    with pytest.raises(ValueError, match="degree"):
        plan_tree(ROOT, [], 0)
    with pytest.raises(ValueError, match="twice: a"):
        plan_tree(ROOT, [Node("a", 1.0), Node("a", 2.0)], 2)
    assert plan_tree(ROOT, [], 2).parents == {}
