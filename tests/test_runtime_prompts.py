"""Training prompts: the same ones in the same order as if all were rendered at the start, though few are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from slipstream.config import Config, build_config
from slipstream.models.prompt_bounds import PromptBound, PromptTwins, text_bound
from slipstream.models.rendering import render_prompt, render_prompts
from slipstream.models.tiny import build_tiny_tokenizer
from slipstream.observe.console import Console
from slipstream.rng import keyed_random
from slipstream.runtime import prompts as module
from slipstream.runtime.prompts import (
    TrainingSet,
    load_eval_problems,
    load_training_problems,
    open_training_problems,
)
from slipstream.schedule.order import PromptOrder
from slipstream.tasks.rows import problems_of
from slipstream.types import Problem, Prompt

RECORDED = [2, 4, 5, 6, 7, 9, 3, 0, 8, 1, 4, 5, 8, 7, 1, 6, 2, 9, 3, 0]
RECORDED_LARGE = "2916c7a66653c8ff"
"""Of the version that shuffled a list."""
TRIMMED = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}\n{% endfor %}<assistant>"
REPEATED = "{% for message in messages %}{{ message['content'] }}{{ message['content'] }}{% endfor %}"


def byte_level(template: str | None, normalizer: normalizers.Normalizer | None = None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, eos_token=alphabet[0])


def uncased() -> PreTrainedTokenizerFast:
    """As BERT's: without case and accents, and with one token for all that is not known."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?:<>"
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token=".")


TOKENIZERS = {
    "tiny": build_tiny_tokenizer,
    "bytes": lambda: byte_level(None),
    "bytes, trimmed": lambda: byte_level(TRIMMED, normalizers.NFC()),
    "bytes, repeated": lambda: byte_level(REPEATED, normalizers.NFD()),
    "uncased": uncased,
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]()


def config_of(folder: Path, rows: list[dict[str, Any]], held_out: Sequence[dict[str, Any]] = (), **more: Any) -> Config:
    tasks: dict[str, Any] = {"train": [{"source": str(folder / "train.jsonl")}]}
    for name, items in (("train", rows), ("eval", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items))
    if held_out:
        tasks["eval"] = {"held": {"source": str(folder / "eval.jsonl")}}
    tree: dict[str, Any] = {"model": "tiny", "run": {"dir": str(folder / "run")}, "tasks": tasks}
    return build_config(tree | {"train": {"prompts_per_step": 1}} | more)


def training_set(config: Config, tokenizer: PreTrainedTokenizerBase, eval_sets: dict[str, list[Prompt]]) -> TrainingSet:
    console = Console(1, quiet=True)
    training = TrainingSet(config, tokenizer, open_training_problems(config, console), eval_sets)
    assert [one.index for one in training.examined(console)] == list(range(len(load_training_problems(config))))
    return training


def rendered_eval(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Prompt]]:
    return {name: render_prompts(tokenizer, items, 10**6) for name, items in load_eval_problems(config).items()}


TEXTS = [
    *("What is 2 + 2?", "what is 2 + 2?", " What is 2 + 2?\n", "What is 2+2?", "caf", "café", "cafe", "cafe\u0301"),
    *(
        "漢字",
        "漢子",
        "漢字 ",
        "🧿",
        "ᚠ",
        "ﬁve",
        "five",
        "\uff21\uff22\uff23",
        "abc",
        "ABC",
        "?",
        "!",
        "é?",
        "e?",
        "Ω",
        "Ж 7",
        "ж 7",
    ),
]


def test_the_prompts_are_those_that_comparing_all_tokens_leaves(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    for case in range(12):
        dice = keyed_random("held out", case)
        rows: list[dict[str, Any]] = [{"prompt": text} for text in dice.choices(TEXTS, k=20)]
        rows += [{"prompt": f"only here {number}"} for number in range(30)]
        rows += [{"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXTS[case]}]}]
        held_out = [{"prompt": text} for text in dice.choices(TEXTS, k=6)]
        config = config_of(tmp_path, rows, held_out)
        eval_sets = rendered_eval(config, tokenizer)
        keys = {prompt.key for prompt in eval_sets["held"]}
        whole = render_prompts(tokenizer, load_training_problems(config), 10**6)
        training = training_set(config, tokenizer, eval_sets)
        assert list(training.prompts) == [prompt for prompt in whole if prompt.key not in keys]


def test_texts_with_the_same_tokens_are_twins_and_no_text_has_more_tokens_than_its_bound(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = [{"prompt": text + more} for text in TEXTS for more in ("", " and so on", "?")]
    problems = problems_of(rows, config_of_rows(), "train/0", "here")
    bound, prompts = PromptBound(tokenizer), [render_prompt(tokenizer, problem) for problem in problems]
    for one in prompts:
        assert len(one.token_ids) <= bound(one.problem)
        text = one.problem.messages[0]["content"]
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= text_bound(text) + 1
        twins = PromptTwins(tokenizer, [one.problem])
        assert all(other.problem in twins for other in prompts if other.key == one.key)


def config_of_rows() -> Any:
    return build_config(
        {"model": "tiny", "run": {"dir": "x"}, "tasks": {"train": [{"source": "x.jsonl"}]}}
    ).tasks.train[0]


def test_only_prompts_that_may_be_too_long_or_held_out_are_tokenized_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []
    render = module.render_short_prompt

    def counted(tokenizer: PreTrainedTokenizerBase, problem: Problem, limit: int) -> Prompt:
        rendered.append(problem.index)
        return render(tokenizer, problem, limit)

    monkeypatch.setattr(module, "render_short_prompt", counted)
    rows = [{"prompt": f"question {number}"} for number in range(2000)]
    rows[1500] = {"prompt": 500 * "long "}
    config = config_of(tmp_path, rows, [{"prompt": "question 7"}], engine={"max_prompt_tokens": 3000})
    tokenizer = build_tiny_tokenizer()
    training = training_set(config, tokenizer, rendered_eval(config, tokenizer))
    assert rendered == [7], "2,500 letters and the template fit into 3,000 tokens"
    config = config_of(tmp_path, rows, [{"prompt": "question 7"}], engine={"max_prompt_tokens": 2503})
    training = training_set(config, tokenizer, rendered_eval(config, tokenizer))
    assert rendered == [7, 7, 1500]
    assert len(training.prompts) == 1999 and training.prompts[1499].problem.index == 1500
    assert rendered == [7, 7, 1500, 1500], "a prompt is rendered when it is drawn"


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"prompt": 60 * "long "}, {}, "problem 3 of train/0 has a prompt of 302 tokens, more than"),
        ({"prompt": "  "}, {}, "row 3: the prompt is empty"),
        ({"question": "which?"}, {}, "row 3 has no column 'prompt'"),
        ({"prompt": "which?"}, {"warmup": {"steps": 1}}, "problem 3 of train/0 has no worked solution"),
        (
            {"prompt": "which?", "solution": 300 * "x"},
            {"warmup": {"steps": 1}, "sampling": {"max_new_tokens": 256}},
            "problem 3 of train/0 has a worked solution of 301 tokens, more than sampling.max_new_tokens=256",
        ),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named_at_the_start(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    rows = [{"prompt": f"question {number}", "solution": "thus"} for number in range(3)]
    config = config_of(tmp_path, [*rows, row], engine={"max_prompt_tokens": 300}, **settings)
    with pytest.raises(ValueError, match=words):
        training_set(config, build_tiny_tokenizer(), {})


def test_the_warm_start_learns_from_the_prompts_that_are_kept(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number}", "solution": str(number)} for number in range(4)]
    config = config_of(tmp_path, rows, [{"prompt": "question 2"}], warmup={"steps": 1})
    tokenizer = build_tiny_tokenizer()
    training = training_set(config, tokenizer, rendered_eval(config, tokenizer))
    texts = [(tokenizer.decode(prompt), tokenizer.decode(answer)) for prompt, answer in training.pairs]
    assert texts == [(f"<q>question {number}<a>", f"{number}</s>") for number in (0, 1, 3)]


def test_nothing_left_to_train_on_is_an_error(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"prompt": "only"}], [{"prompt": "only"}])
    tokenizer = build_tiny_tokenizer()
    with pytest.raises(ValueError, match="0 would remain"):
        training_set(config, tokenizer, rendered_eval(config, tokenizer))


def test_the_order_of_prompts_is_the_one_that_was_recorded() -> None:
    order = PromptOrder(10, 3)
    assert [order.at(position) for position in range(20)] == RECORDED
    order = PromptOrder(100_000, 0)
    text = ",".join(str(order.at(position)) for position in range(99_000, 101_000))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == RECORDED_LARGE
