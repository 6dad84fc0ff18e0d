"""Learned drafters for policies of any shape: heads of their own width, hidden sizes that heads do not divide."""

from __future__ import annotations

import copy
import json
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_cli import call
from test_draft_history import MAX_LENGTH, NUM_SLOTS, drafter_with, groups
from test_draft_learned import DEPTH, drafted_by_hand, rolled_out, scripted, watch
from tiny_models import family_config
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slipstream.config import Config, build_config
from slipstream.draft.eagle import KINDS, build_draft, check_draftable, draft_config
from slipstream.draft.learned import ModelGuesser
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import Always, Strategy
from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.loading import load_tokenizer
from slipstream.runtime.engines import kv_token_bytes
from slipstream.runtime.local import run_training

VOCABULARY = len(load_tokenizer("tiny"))
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16},
    "llama": {},
}
HEADS = {"qwen3": (6, 2, 16), "gemma2": (5, 1, 16), "llama": (4, 2, 8)}
"""Of the drafter: queries, keys, their size."""


def shape(family: str) -> PretrainedConfig:
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "max_position_embeddings": 512, "initializer_range": 0.3}
    config: PretrainedConfig = family_config(family, **sizes | SHAPES[family], layer_types=None)
    return config


@cache
def policy(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shape(family), dtype=torch.float32)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval().requires_grad_(False)


def recipe(run: Path, model: Path, source: str) -> Config:
    """Two steps on texts that repeat. Random weights get no reward: rewards say nothing here."""
    return build_config(
        {
            "model": str(model),
            "run": {"dir": str(run)},
            "tasks": {"train": [{"source": "gcd", "size": 24, "seed": 1, "params": {"wording": "terse"}}]},
            "sampling": {"max_new_tokens": 24},
            "engine": {"max_sequences": 8, "max_prompt_tokens": 32},
            "train": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 2},
            "draft": {"source": source},
            **({"drafter": {"updates": 2}} if source == "drafter" else {}),
        }
    )


def rollouts(run: Path) -> list[Any]:
    with sqlite3.connect(run / "run.db") as store:
        return store.execute("SELECT uid, token_ids, logprobs FROM rollouts ORDER BY uid").fetchall()


@pytest.mark.parametrize("family", SHAPES)
def test_a_drafter_has_as_many_heads_as_divide_its_hidden_size(family: str) -> None:
    config = draft_config(shape(family))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == HEADS[family]
    assert config.hidden_size % config.num_attention_heads == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@torch.inference_mode()
def test_it_drafts_as_by_hand_and_changes_no_bit(family: str, kind: str) -> None:
    sizes = {"max_sequences": NUM_SLOTS, "max_length": MAX_LENGTH}
    plain = rolled_out(Engine(copy.deepcopy(policy(family)), **sizes))
    drafter = drafter_with([])
    drafter.guesser = guesser = ModelGuesser(num_slots=NUM_SLOTS, kind=kind)
    engine = Engine(copy.deepcopy(policy(family)), drafter=drafter, policy=Always(Strategy(4.0, 0, DEPTH)), **sizes)
    assert rolled_out(engine) == plain and len(plain) == sum(map(len, groups(3, 4)))

    draft = build_draft(policy(family).config, kind, 3)
    guesser.write(draft.state_dict().items())
    request = scripted("a", range(40, 60))
    engine.submit([request])
    seen = watch(guesser)
    while engine.has_work:
        engine.step()
    assert len(seen) > 10 and seen == drafted_by_hand(kind, draft, request, seen, policy(family))


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    policy("qwen3").save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return folder


def test_a_run_teaches_it_samples_the_same_and_exports_it(qwen3_folder: Path, tmp_path: Path) -> None:
    runs = {}
    for source in ("off", "drafter"):
        run = tmp_path / source
        run_training(recipe(run, qwen3_folder, source), quiet=True)
        runs[source] = rollouts(run)
    assert runs["off"] == runs["drafter"] and runs["off"]
    rows = [json.loads(line) for line in (tmp_path / "drafter" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("drafter/updates", 0) > 0 for row in rows)

    out = tmp_path / "out"
    assert call("export-drafter", str(tmp_path / "drafter"), str(out)) == 0
    config = AutoConfig.from_pretrained(out)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == HEADS["qwen3"]
    weights = load_file(out / "model.safetensors")
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (6 * 16, 2 * 36)
    assert weights["midlayer.self_attn.o_proj.weight"].shape == (36, 6 * 16)
    assert weights["midlayer.self_attn.k_proj.weight"].shape == (2 * 16, 2 * 36)


def test_the_memory_of_its_keys_is_that_of_its_own_heads(qwen3_folder: Path, tmp_path: Path) -> None:
    with_drafter, without = (recipe(tmp_path, qwen3_folder, source) for source in ("drafter", "off"))
    for family in ("qwen3", "gemma2"):
        _, num_heads, size = HEADS[family]
        more = kv_token_bytes(with_drafter, policy(family)) - kv_token_bytes(without, policy(family))
        assert more == 2 * num_heads * size * 4


def test_policies_without_a_list_of_layers_are_refused_for_one_kind() -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2}
    model = AutoModelForCausalLM.from_config(family_config("gpt2", **sizes))
    check_draftable(model, "eagle1")
    build_draft(model.config, "eagle1")
    with pytest.raises(ValueError, match=r"write drafter\.kind=eagle1, or draft\.source=history"):
        check_draftable(model, "eagle3")


def test_policies_with_narrower_embeddings_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(family_config("opt", word_embed_proj_dim=16, ffn_dim=48))
    with pytest.raises(ValueError, match="embeddings of 16 numbers and hidden states of 32"):
        check_draftable(model, "eagle1")
