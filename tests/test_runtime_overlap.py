"""Training prompts that evaluation sets have too: a run that would train on what is left is refused, with a way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import Config, build_config
from slipstream.recipe import apply_overrides
from slipstream.runtime.local import run_training
from slipstream.runtime.overlap import describe_left_out

CHAINS = {"source": "reasoning_gym/chain_sum", "params": {"min_terms": 2, "max_terms": 3}}
SUMS = {"source": "reasoning_gym/chain_sum", "params": {"max_terms": 2, "min_digits": 1, "max_digits": 1}}


def settings(folder: Path, train_set: dict[str, Any], eval_set: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "run": {"dir": str(folder / "run")},
        "tasks": {"train": [train_set], "eval": {"held": eval_set}},
        "sampling": {"max_new_tokens": 4},
        "engine": {"max_sequences": 4, "max_prompt_tokens": 256},
        "train": {"steps": 0, "prompts_per_step": 4, "samples_per_prompt": 2},
        "eval": {"before_train": False},
    }


def suggested(error: str) -> list[str]:
    return re.findall(r"tasks\.eval\.\w+\.seed=\d+", error)


def test_seeds_of_reasoning_gym_that_overlap_are_refused_with_one_that_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = settings(tmp_path, {**CHAINS, "size": 64, "seed": 1}, {**CHAINS, "size": 64, "seed": 2})
    with pytest.raises(ValueError, match=r"^63 of 64 training prompts \(98%\) are in evaluation sets") as caught:
        run_training(build_config(tree), quiet=True)
    assert "1 would remain" in str(caught.value) and "reasoning_gym draws problem i with seed + i" in str(caught.value)
    assert not (tmp_path / "run").exists()
    overrides = suggested(str(caught.value))
    assert overrides == ["tasks.eval.held.seed=65"]
    capsys.readouterr()
    assert run_training(build_config(apply_overrides(tree, overrides))).reason == "done"
    assert "left out" not in capsys.readouterr().out


def test_what_is_left_out_is_told_with_its_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = settings(tmp_path, {**CHAINS, "size": 64, "seed": 1}, {**CHAINS, "size": 16, "seed": 0})
    assert run_training(build_config(tree)).reason == "done"
    assert "15 of 64 training prompts (23%) are in evaluation sets: left out" in capsys.readouterr().out


def config_of(tmp_path: Path, train_set: dict[str, Any], eval_set: dict[str, Any]) -> Config:
    return build_config(settings(tmp_path, train_set, eval_set))


def test_a_step_needs_as_many_prompts_as_it_draws(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**CHAINS, "size": 6, "seed": 1}, {**CHAINS, "size": 3, "seed": 1})
    with pytest.raises(ValueError, match=r"3 of 6 .* 3 would remain, .*prompts_per_step=4") as caught:
        describe_left_out(config, 3, 6)
    assert suggested(str(caught.value)) == ["tasks.eval.held.seed=7"]
    assert describe_left_out(config, 4, 6) == "2 of 6 training prompts (33%) are in evaluation sets: left out"
    assert describe_left_out(config, 3, 3) is None, "a small set of which nothing is left out is the user's choice"


def test_where_no_seed_helps_none_is_suggested(tmp_path: Path) -> None:
    """Sums of two digits are a hundred or so problems: every seed has them all."""
    config = config_of(tmp_path, {**SUMS, "size": 3000, "seed": 1}, {**SUMS, "size": 1500, "seed": 1})
    with pytest.raises(ValueError, match="more varied") as caught:
        describe_left_out(config, 0, 3000)
    assert not suggested(str(caught.value))


def test_a_file_is_not_said_to_have_a_seed(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}?", "answer": "{n}"}}\n' for n in range(8)))
    config = config_of(tmp_path, {"source": str(rows)}, {"source": str(rows), "size": 7})
    with pytest.raises(ValueError, match="evaluate on other problems") as caught:
        describe_left_out(config, 1, 8)
    assert "seed" not in str(caught.value)
