"""Models whose products the engine cannot keep the same in every batch are found, and named wherever a user looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_cli import call
from test_runtime import SETTINGS
from tiny_models import FAMILIES, build_family, family_config
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.config import build_config
from slipstream.models.exactness import products_out_of_reach, why_inexact
from slipstream.models.tiny import build_tiny_tokenizer
from slipstream.observe.report import write_report
from slipstream.observe.store import RunStore
from slipstream.runtime.local import run_training

OF_EXPERTS = {"gpt_oss": "GptOssExperts", "qwen3_moe": "Qwen3MoeExperts", "mixtral": "MixtralExperts"}


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_of_experts_are_found_and_dense_models_are_not(family: str) -> None:
    found = products_out_of_reach(build_family(family, "eager"))
    assert (OF_EXPERTS[family] in found) if family in OF_EXPERTS else not found


def test_experts_of_linear_layers_and_matrices_of_unknown_modules_are_found() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.zeros(3, 4))

    dense = nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 4), nn.LayerNorm(4))
    assert why_inexact(dense) is None
    assert products_out_of_reach(nn.Sequential(dense, Own())) == ("Own",)
    routed = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    assert products_out_of_reach(routed) == ("ModuleList",)


def small_mixture(folder: Path) -> Path:
    tokenizer = build_tiny_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = family_config("mixtral", vocab_size=len(tokenizer), num_hidden_layers=1, **special)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("exact", [True, False])
def test_a_run_its_report_and_check_say_that_a_mixture_of_experts_is_not_exact(
    exact: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the recipe asks for no exactness."""
    model, run_dir = small_mixture(tmp_path / "model"), tmp_path / "run"
    once = {
        "model": str(model),
        "run": {"dir": str(run_dir)},
        "tasks": {"train": SETTINGS["tasks"]["train"]},
        "warmup": None,
        "train": SETTINGS["train"] | {"steps": 1},
        "engine": SETTINGS["engine"] | {"exact": exact},
    }
    assert run_training(build_config(SETTINGS | once)).reason == "done"
    said = "rollouts are not the same in every batch: MixtralTopKRouter, MixtralExperts"
    assert (said in " ".join(capsys.readouterr().out.split())) == exact
    write_report(run_dir)
    assert (said in (run_dir / "report.html").read_text()) == exact
    with RunStore(run_dir, read_only=True) as store:
        assert len(store.events("NotExact")) == exact
    if exact:
        assert call("check", str(model), "--json") == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["not_exact"].startswith(said)
