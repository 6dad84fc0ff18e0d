"""Model folders that are none, damaged, or of two models: one sentence that says what to do, before any work."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_models import family_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from slipstream.cli import main
from slipstream.models.loading import check_model, load_model, load_tokenizer
from slipstream.models.model_folder import is_folder

CPU = torch.device("cpu")
GCD = {"source": "gcd", "size": 8, "seed": 1, "params": {"wording": "terse"}}
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    load_model("tiny", dtype=torch.float32, device=CPU).save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_folder, tmp_path / "mine"))


def configured(**values: Any) -> Damage:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def reweighted(change_weights: Callable[[dict[str, Tensor]], object]) -> Damage:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change_weights(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


def cut(name: str, share: float = 0.6) -> Damage:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return change


def written(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def with_tokens(*tokens: str) -> Damage:
    def change(folder: Path) -> None:
        tokenizer: PreTrainedTokenizerBase = load_tokenizer("tiny")
        tokenizer.add_tokens(list(tokens))
        tokenizer.save_pretrained(folder)

    return change


SHARD = "model-00001-of-00002.safetensors"
BILLIONS = struct.pack("<Q", 1 << 40)
# What is found out before any weight is read.
DAMAGED_FILES: dict[str, tuple[Damage, str]] = {
    "no config": (without("config.json"), r"is no model folder: it has no config.json; give a folder"),
    "a config cut off": (cut("config.json"), r"config.json: not valid JSON: .*: copy the folder again"),
    "a config that is a list": (
        written("config.json", "[1]"),
        r"config.json holds a list in place of settings",
    ),
    "a config not in UTF-8": (
        lambda folder: (folder / "config.json").write_bytes(b'{"model_type": "\xff"}'),
        r"config.json, line 1: byte 0xff is not UTF-8",
    ),
    "a config of no model": (written("config.json", "{}"), r"does not say which model it is \(no model_type\)"),
    "an unknown family": (configured(model_type="nonesuch"), r"config .* could not be loaded: .*nonesuch"),
    "no causal model": (configured(model_type="t5"), r"\(t5\) is no causal language model .* choose another"),
    "a size in words": (configured(hidden_size="many"), r"config .* could not be loaded: .*hidden_size"),
    "heads that do not divide": (configured(num_attention_heads=5), r"config .* could not be loaded: .*multiple"),
    "quantized": (configured(quantization_config={"quant_method": "gptq"}), r"are quantized \(gptq\).*made from"),
    "no weights": (without("model.safetensors"), r"has no weights \(model.safetensors\); copy the folder again"),
    "weights cut off": (cut("model.safetensors"), r"model.safetensors is damaged or cut off at \d+ bytes .*copy"),
    "weights of no byte": (cut("model.safetensors", 0), r"model.safetensors is damaged or cut off at 0 bytes"),
    "a pointer to weights": (written("model.safetensors", "version https://git-lfs.github.com/spec/v1"), r"damaged"),
    "a header of a terabyte": (
        lambda folder: (folder / "model.safetensors").write_bytes(BILLIONS + b"{}"),
        r"model.safetensors is damaged",
    ),
    "a missing shard": (
        both(
            without("model.safetensors"),
            written("model.safetensors.index.json", json.dumps({"weight_map": {"a": SHARD}})),
        ),
        rf"lacks 1 of 1 files of its weights \({SHARD}\)",
    ),
    "a damaged generation config": (written("generation_config.json", "{"), r"generation_config.json: not valid JSON"),
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
DAMAGED_TOKENIZERS: dict[str, tuple[Damage, str]] = {
    "no tokenizer": (without(*TOKENIZER), r"has no tokenizer; save the model's own beside it"),
    "no vocabulary": (without("tokenizer.json"), r"could not be loaded: it has no tokenizer.json.*save it again"),
    "a vocabulary cut off": (cut("tokenizer.json"), r"the tokenizer .* could not be loaded: .*save it again"),
    "tokenizer settings cut off": (cut("tokenizer_config.json"), r"the tokenizer .* could not be loaded"),
    "more tokens than embeddings": (
        with_tokens("<x>", "<y>"),
        r"has 2 tokens \('<[xy]>'\) beyond the \d+ that .*resize_token_embeddings",
    ),
}
OTHER_WEIGHTS: dict[str, tuple[Damage, str]] = {
    "another width": (configured(hidden_size=64, head_dim=16), r"is \(102, 128\) instead of \(102, 64\), and \d+ more"),
    "more layers": (configured(num_hidden_layers=5), r"model.layers.3.*is missing, and \d+ more"),
    "fewer layers": (configured(num_hidden_layers=2), r"model.layers.2.* has no place in the model, and 8 more"),
    "biases": (configured(attention_bias=True), r"_proj.bias is missing"),
    "a head of its own": (configured(tie_word_embeddings=False), r"lm_head.weight is missing"),
    "a weight too few": (
        reweighted(lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")),
        r"model.layers.1.mlp.up_proj.weight is missing; give it the config.json that it was saved with",
    ),
    "a bias too many": (
        reweighted(lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)})),
        r"model.layers.0.self_attn.q_proj.bias has no place in the model",
    ),
    "a norm too many": (
        reweighted(lambda weights: weights.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(32)})),
        r"model.layers.0.self_attn.q_norm.weight has no place in the model",
    ),
    "pickled weights cut off": (
        both(without("model.safetensors"), written("pytorch_model.bin", "PK")),
        r"could not be loaded",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_damaged_folders_are_refused_before_weights_are_read(name: str, folder: Path) -> None:
    damage, sentence = DAMAGED_FILES[name]
    damage(folder)
    with pytest.raises(ValueError, match=sentence):
        check_model(str(folder))
    with pytest.raises(ValueError, match=sentence):
        load_model(str(folder), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", DAMAGED_TOKENIZERS)
def test_tokenizers_that_are_not_the_models_are_refused(name: str, folder: Path) -> None:
    damage, sentence = DAMAGED_TOKENIZERS[name]
    damage(folder)
    with pytest.raises(ValueError, match=sentence):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_weights_that_do_not_fit_the_config_are_refused(name: str, folder: Path) -> None:
    """Transformers would go on, with what is missing drawn by chance and what is left over dropped."""
    damage, sentence = OTHER_WEIGHTS[name]
    damage(folder)
    with pytest.raises(ValueError, match=sentence):
        load_model(str(folder), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    "change",
    [
        reweighted(lambda weights: weights.update({"v_head.summary.weight": torch.zeros(128)})),
        reweighted(lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)})),
        reweighted(lambda weights: weights.update({"model.vision_tower.proj.weight": torch.zeros(8, 8)})),
    ],
    ids=["a value head", "frequencies", "a vision tower"],
)
def test_what_lies_beside_a_model_is_left_out(change: Damage, folder: Path) -> None:
    change(folder)
    check_model(str(folder))
    load_model(str(folder), dtype=torch.float32, device=CPU)


def test_a_token_for_padding_may_lie_beyond_the_embeddings(folder: Path) -> None:
    tokenizer = load_tokenizer("tiny")
    tokenizer.add_special_tokens({"pad_token": "<another>"})
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder)).pad_token == "<another>"


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gemma2", "qwen3_moe", "phi3", "opt"])
def test_saved_models_of_other_families_fit_their_configs(family: str, tmp_path: Path) -> None:
    """Also those whose weights have other names or shapes on the disk than in the module."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2} if family == "gpt2" else {}
    sizes |= {"word_embed_proj_dim": 32, "ffn_dim": 48} if family == "opt" else {}
    AutoModelForCausalLM.from_config(family_config(family, **sizes)).save_pretrained(tmp_path)
    load_model(str(tmp_path), dtype=torch.float32, device=CPU)


def test_a_folder_is_told_from_a_name(tmp_path: Path) -> None:
    assert is_folder(str(tmp_path)) and is_folder("./nowhere") and is_folder("~/nowhere")
    assert not any(is_folder(name) for name in ("tiny", "smollm2", "Qwen/Qwen2.5-0.5B"))


def recipe_for(model: Path, folder: Path) -> str:
    tree = {
        "model": str(model),
        "run": {"dir": str(folder / "run")},
        "tasks": {"train": [GCD], "eval": {"held": GCD | {"seed": 2}}},
        "sampling": {"max_new_tokens": 8},
        "engine": {"max_sequences": 8, "max_prompt_tokens": 32},
        "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "recipe.yaml")


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "train": lambda model, folder: ["train", recipe_for(model, folder)],
    "dry run": lambda model, folder: ["train", recipe_for(model, folder), "--dry-run"],
    "eval": lambda model, folder: ["eval", recipe_for(model, folder)],
    "check": lambda model, folder: ["check", str(model)],
    "bench engine": lambda model, folder: ["bench", "engine", "--shapes", str(model), "--batches", "1"],
    "bench history": lambda model, folder: ["bench", "history", "--shape", str(model), "--batches", "1"],
}
ALL_DAMAGES = DAMAGED_FILES | DAMAGED_TOKENIZERS
SHOWN = ("no config", "weights cut off", "no tokenizer", "more tokens than embeddings")
NEEDS_NO_TOKENIZER = ("bench engine", "bench history")


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", SHOWN)
def test_every_command_that_takes_a_model_says_what_is_wrong_with_it(
    command: str, name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command in NEEDS_NO_TOKENIZER and name in DAMAGED_TOKENIZERS:
        pytest.skip("it takes no tokenizer")
    damage, sentence = ALL_DAMAGES[name]
    damage(folder)
    assert call(*COMMANDS[command](folder, tmp_path)) == 2
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    assert any(re.search(sentence, line) for line in said.splitlines()), said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["weights cut off", "no tokenizer"])
def test_a_checkpoint_that_was_damaged_is_named_by_what_takes_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_for(Path("tiny"), tmp_path)
    assert call("train", recipe, "--quiet") == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    ALL_DAMAGES[name][0](checkpoint)
    missing = "tokenizer.json is missing" if name == "no tokenizer" else "model.safetensors has "
    run = str(tmp_path / "run")
    for words in (
        ["train", recipe, "--resume"],
        ["eval", run],
        ["eval", str(checkpoint)],
        ["train-drafter", run, "--out", str(tmp_path / "new")],
        ["export-drafter", run, str(tmp_path / "new")],
        ["check", str(checkpoint)],
        ["train", recipe, f"model={checkpoint}", f"run.dir={tmp_path / 'other'}"],
    ):
        assert call(*words) == 2, words
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said, words
        assert str(checkpoint) in said and (missing in said or words[0] == "export-drafter" or "step_1" in said), words
    assert not (tmp_path / "new").exists() and not (tmp_path / "other").exists()


def test_texts_longer_than_a_model_has_positions_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "max_position_embeddings": 64}
    AutoModelForCausalLM.from_config(family_config("gpt2", **sizes)).save_pretrained(tmp_path)
    for words in (["engine", "--shapes"], ["history", "--shape"]):
        assert call("bench", *words, str(tmp_path), "--batches", "1", "--new-tokens", "100") == 2
        assert re.search(r"\d+ tokens are more than .* takes \(64\): lower --new-tokens", capsys.readouterr().err)
