"""What a drafter beside the policy's training learns from: what that shows it, and what teaches the policy nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_runtime_drafts import PER_STEP, SAMPLES, rows_of, settings

from slipstream.config import build_config
from slipstream.draft import online
from slipstream.draft.online import DrafterTrainer
from slipstream.observe.store import RunStore
from slipstream.runtime import learning
from slipstream.runtime.local import run_training


@pytest.fixture(autouse=True)
def short_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "LESSON_TOKENS", 256)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Responses that a drafter was shown, but for their last token."""
    texts: list[tuple[int, ...]] = []
    collect = DrafterTrainer.collect

    def look(self: DrafterTrainer, ids_T: torch.Tensor, lengths: list[int], responses: list[int], last: Any) -> None:
        parts = ids_T.split(lengths)
        texts.extend(tuple(part[-num + 1 :].tolist()) for part, num in zip(parts, responses, strict=True))
        collect(self, ids_T, lengths, responses, last)

    monkeypatch.setattr(DrafterTrainer, "collect", look)
    return texts


def reward_of(name: str) -> dict[str, Any]:
    return {"functions": [{"function": f"{Path(__file__).parent / 'data' / 'reward_functions.py'}:{name}"}]}


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize(("updates", "reads_all"), [(9, True), (1, False)])
def test_a_drafter_also_reads_what_teaches_the_policy_nothing(
    updates: int,
    reads_all: bool,
    is_dynamic: bool,
    shown: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all samples of all groups fail alike, the trainer computes no text but one that stands in, or none; of the
    others as many are read as updates can look at."""
    monkeypatch.setattr(learning, "LESSON_TOKENS", 128)
    changes: dict[str, Any] = {"reward": reward_of("always_half"), "warmup": None, "drafter": {"updates": updates}}
    if is_dynamic:
        changes |= {"algorithm": {"dynamic_sampling": True, "max_sampling_rounds": 1}, "engine": {"sleep": "all"}}
    recipe = settings(tmp_path / "run", draft={"source": "drafter"}, **changes)
    recipe["engine"] = settings(tmp_path)["engine"] | recipe["engine"]
    run_training(build_config(recipe | {"train": recipe["train"] | {"steps": 2}}), quiet=True)
    with RunStore(tmp_path / "run", read_only=True) as store:
        sampled = [one.token_ids[:-1] for one in store.rollouts(kind="train")]
    rows = rows_of(tmp_path / "run")[-2:]
    assert all(row["reward/std"] == 0.0 for row in rows) and len(sampled) == 2 * PER_STEP * SAMPLES
    num_standing_in = 0 if is_dynamic else 1
    assert sum(row["drafter/texts_read"] + num_standing_in for row in rows) == len(shown)
    assert len(set(shown)) == len(shown) and set(shown) <= set(sampled), "none of them twice"
    assert (len(shown) == len(sampled)) == reads_all and len(shown) > 2
    assert [row["drafter/updates"] for row in rows] == [updates, 2 * updates]


def test_what_the_policys_training_shows_is_not_read_again(shown: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Some groups have a signal, others none."""
    changes = {"drafter": {"updates": 30}, "warmup": None, "reward": reward_of("half_unless_short")}
    recipe = settings(tmp_path / "run", draft={"source": "drafter"}, **changes)
    run_training(build_config(recipe | {"train": recipe["train"] | {"steps": 2}}), quiet=True)
    with RunStore(tmp_path / "run", read_only=True) as store:
        sampled = [one.token_ids[:-1] for one in store.rollouts(kind="train")]
    rows = rows_of(tmp_path / "run")[-2:]
    alike = [row["reward/zero_spread_groups"] for row in rows]
    assert 0 < sum(alike) < 2, alike
    assert sum(row["drafter/texts_read"] for row in rows) == pytest.approx(sum(alike) * PER_STEP * SAMPLES)
    assert sorted(shown) == sorted(sampled)
