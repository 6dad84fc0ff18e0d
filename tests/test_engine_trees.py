"""A step of trees samples what steps without drafts sample, whatever the tree; and its parts do what they say."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from reports import lines_of, log_kept_of
from test_draft_history import MAX_LENGTH, NUM_SLOTS, drafter_with, generate, groups, tiny
from test_draft_learned import SEED, plain_chain, rolled_out, sharp, target
from tiny_models import packed_rows
from torch import Tensor

from slipstream.draft.learned import ModelGuesser
from slipstream.engine.engine import Engine
from slipstream.engine.packing import DraftSizes, StepSizes, pack
from slipstream.engine.sampling import Samples
from slipstream.engine.slots import NO_TOKEN, read_report
from slipstream.engine.state import StepState
from slipstream.engine.strategy import Always, Strategy
from slipstream.engine.trees import branch, commit, tree_paths
from slipstream.models.attention import AttentionForm
from slipstream.models.cached import Branches, CachedRows, KVPages, attend_rows_plainly
from slipstream.types import Request, SamplingParams

TREES = [Strategy(8.0, 0, 3, 2), Strategy(6.0, 2, 4, 3), Strategy(12.0, 0, 2, 4)]


def tree_engine(strategy: Strategy, past: Any = (), **changes: Any) -> tuple[ModelGuesser, Engine]:
    drafter = drafter_with(past)
    drafter.guesser = ModelGuesser(num_slots=NUM_SLOTS)
    sizes = {"max_sequences": NUM_SLOTS, "max_length": MAX_LENGTH} | changes
    return drafter.guesser, Engine(tiny(), drafter=drafter, policy=Always(strategy), **sizes)


@pytest.mark.parametrize(
    ("strategy", "changes"), [(TREES[0], {}), (TREES[1], {"kv_tokens": 512}), (TREES[2], {"steps_ahead": 2})], ids=str
)
def test_trees_change_no_bit(strategy: Strategy, changes: dict[str, int]) -> None:
    plain, _ = generate(groups(3, 4))
    guesser, engine = tree_engine(strategy, list(plain.values())[::2], **changes)
    guesser.write(sharp("eagle3", 3).state_dict().items())
    drafted = rolled_out(engine)
    assert drafted == plain
    origins = {origin for rollout in drafted.values() for origin in rollout.origins}
    assert 4 in origins and (strategy.min_match > 0) == bool(origins & {1, 2, 3}), "some guesses are right by chance"


@torch.inference_mode()
def test_the_first_way_through_a_tree_is_the_chain() -> None:
    """The chain's drafts are in the tree, each after the one before; and no two that follow the same draft are equal.
    They are drawn with the same noise, from keys that only the tree's own places hold."""
    draft, model = sharp("eagle3", 3), target()
    guesser, engine = tree_engine(Strategy(24.0, 0, 4, 2))
    guesser.write(draft.state_dict().items())
    text = tuple(range(40, 60))
    request = Request("a", "a", (5, 6, 7), SEED, SamplingParams(max_new_tokens=len(text)), script_ids=text)
    engine.submit([request])
    seen: dict[int, tuple[list[int], list[int]]] = {}
    guess = guesser.guess_trees

    def watched(state: StepState, width_S: Tensor, found_S: Tensor, sizes: DraftSizes) -> Tensor:
        found = guess(state, width_S, found_S, sizes)
        if found[0]:
            count = int(found[0])
            seen[int(state["known"][0])] = tuple(state[name][0, :count].tolist() for name in ("drafts", "parents"))
        return found

    guesser.guess_trees = watched  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    ids = torch.tensor([*request.prompt_ids, *text])
    chains_found = 0
    for known, (drafts, parents) in seen.items():
        pairs = list(zip(parents, drafts, strict=True))
        assert len(set(pairs)) == len(pairs) and all(parent < place for place, parent in enumerate(parents))
        at = -1
        for token in plain_chain(model, "eagle3", draft, ids[:known]):
            if (at, token) not in pairs:
                break
            at = pairs.index((at, token))
        else:
            chains_found += 1
        assert at >= 0, "the likeliest first draft is always there"
    assert len(seen) > 8 and chains_found > len(seen) // 2


def random_tree(dice: random.Random, num_drafts: int, depth: int) -> list[int]:
    parents: list[int] = []
    levels: list[int] = []
    for _ in range(num_drafts):
        parent = dice.choice([-1, *(place for place, level in enumerate(levels) if level + 1 < depth)])
        parents.append(parent)
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    return parents


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_of_a_tree_attends_as_if_its_path_were_the_text(seed: int) -> None:
    """Kernel and plain twin, against a text that holds the path alone; and keys that move are then found there."""
    dice, depth, known = random.Random(seed), 3, dice_length(seed)
    parents = random_tree(dice, 7, depth)
    level, path = tree_paths(torch.tensor([parents]), depth)
    form = AttentionForm(0.35, sliding_window=5 if seed % 2 else None)
    table = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 8, 8, 8]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)

    def random_heads(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, 8, generator=generator)

    num = known + len(parents)
    query, key, value = random_heads(num, 4), random_heads(num, 2), random_heads(num, 2)
    pages = KVPages(8, 16)
    CachedRows(pages, packed_rows([(0, 0, known)], table)).attend(0, query[:known], key[:known], value[:known], form)
    rows = packed_rows([(0, known + int(one), 1) for one in level[0]], table)
    branches = Branches(
        place_T=known + torch.arange(len(parents)),
        fork_T=torch.full((len(parents),), known, dtype=torch.int32),
        path_TD=(known + path[0]).int(),
    )
    object.__setattr__(rows, "branches", branches)
    attended = CachedRows(pages, rows).attend(0, query[known:], key[known:], value[known:], form)
    keys, values = pages.layers[0]
    assert torch.allclose(attended, attend_rows_plainly(query[known:], keys, values, rows, form), atol=1e-5)
    for place in range(len(parents)):
        way = [known + int(one) for one in path[0, place, : int(level[0, place]) + 1]]
        order = [*range(known), *way]
        text = CachedRows(KVPages(8, 16), packed_rows([(1, 0, len(order))], table))
        alone = text.attend(0, query[order], key[order], value[order], form)
        assert torch.equal(attended[place], alone[-1])
    deepest = int(level[0].argmax())
    way = path[0, deepest, : int(level[0, deepest]) + 1]
    pages.move(table, torch.tensor([0]), known + way.unsqueeze(0), known + torch.arange(len(way)).unsqueeze(0))
    last = packed_rows([(0, known + len(way) - 1, 1)], table)
    again = CachedRows(pages, last).read(query[known + deepest :][:1], keys, values, form)
    assert torch.equal(again[0], attended[deepest])


def dice_length(seed: int) -> int:
    return (9, 14, 15, 16)[seed]


def test_what_was_sampled_is_a_path_through_the_tree() -> None:
    """By hand. Slot 0: the second of two first drafts is right and one after it; slot 1 ends on its way; slot 2 has no
    draft that is right; slot 3 walks a script."""
    state = StepState(
        num_slots=4, max_length=20, num_table_pages=1, trash_page=1, device=torch.device("cpu"), max_drafts=4
    )
    for name, number in {"known": 5, "computed": 4, "limit": 20, "live": 1, "allotted": 5, "drafted": 4}.items():
        state[name][:4] = number
    state["stops"].fill_(NO_TOKEN)
    state["stops"][1, 0] = 21
    state["scripted"][3] = 1
    state["tokens"][3, 5:8] = torch.tensor([10, 20, 30])
    state["drafts"][:4] = torch.tensor([10, 11, 20, 21])
    state["parents"][:4] = torch.tensor([-1, -1, 0, 1])
    state["sources"][:4] = torch.tensor([1, 2, 3, 4])
    packed = pack(state, StepSizes(20, 4, 20, with_drafts=True, with_cuts=False))
    tree = branch(state, packed, 2)
    assert tree.rows.position_T[:5].tolist() == [4, 5, 5, 6, 6]
    assert tree.sampling.position_N[:5].tolist() == [5, 6, 6, 7, 7]
    sampled = torch.tensor([11, 0, 21, 0, 7, 11, 0, 21, 0, 9, 12, 0, 0, 0, 0, 8, 8, 8, 8, 8])
    kept = commit(state, packed, tree, Samples(sampled, torch.arange(20.0), -torch.arange(20.0)))
    report = lines_of(read_report(state.report.numpy()))
    assert report == {
        0: ([11, 21, 7], [0, 2, 4], [2, 4, 0], 4),
        1: ([11, 21], [5, 7], [2, 4], 4),
        2: ([12], [10], [0], 4),
        3: ([10, 20, 30], [15, 16, 18], [1, 3, 0], 4),
    }
    kept_masses = log_kept_of(read_report(state.report.numpy()))
    assert kept_masses == {0: [0, -2, -4], 1: [-5, -7], 2: [-10], 3: [-15, -16, -18]}
    assert state["known"][:4].tolist() == [8, 7, 6, 8] and state["computed"][:4].tolist() == [7, 6, 5, 7]
    assert state["live"][:4].tolist() == [1, 0, 1, 1] and state["tokens"][0, 5:8].tolist() == [11, 21, 7]
    moves = [
        [(s, t) for s, t in zip(one, other, strict=True) if s != t]
        for one, other in zip(kept.sources_RD.tolist(), kept.targets_RD.tolist(), strict=True)
    ]
    assert moves == [[(6, 5), (8, 6)], [(6, 5)], [], [(7, 6)]]
    assert kept.at_T.view(4, 3).tolist() == [[0, 2, 4], [5, 7, 0], [10, 0, 0], [15, 16, 18]]


def test_paths_of_every_small_tree() -> None:
    for parents in product((-1,), (-1, 0), (-1, 0, 1), (-1, 0, 1, 2)):
        levels, path = tree_paths(torch.tensor([parents]), 4)
        for place, level in enumerate(levels[0].tolist()):
            way = [place]
            while parents[way[-1]] >= 0:
                way.append(parents[way[-1]])
            assert level == len(way) - 1 and path[0, place, : level + 1].tolist() == way[::-1]


def test_a_drafter_whose_numbers_are_broken_changes_no_bit_either() -> None:
    """It says the same draft twice, and both may be what is sampled."""
    plain, _ = generate(groups(3, 4))
    guesser, engine = tree_engine(Strategy(8.0, 0, 3, 2))
    broken = {name: torch.full_like(one, torch.nan) for name, one in guesser.model.named_parameters()}
    guesser.write(broken.items())
    drafted = rolled_out(engine)
    assert drafted == plain and engine.take_draft_counts().num_drafted > 0
