"""A first recipe for one's own data: its text, from what was found in the file.

Owns the settings that `slipstream init` chooses and the comments that say why. Invariant: what it writes has been read
back as a recipe, and its problems checked against its reward, as the start of a run does. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from slipstream.config import build_config
from slipstream.tasks.columns import TEMPLATE_TOKENS, DataLook, count_repeated, estimate_tokens, look_at
from slipstream.tasks.rewards import check_rewards
from slipstream.tasks.sources import FILE_SUFFIXES, open_problems

SAMPLES, MOST_PROMPTS = 8, 16
"""Of a step."""
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 128
ROUND_TO = 64
LINE = 1_000_000
"""Characters: values stay on one line."""
NEW_TOKENS, MOST_NEW_TOKENS = 512, 2048
TEMPLATES = {
    "math_verify": "{prompt}\nPut the final answer in \\boxed{}.",
    "exact_match": "{prompt}\nEnd with #### and then the answer alone.",
}
LEARNING_RATES = {"smollm2": 2e-5, "tiny": 4e-4}
USUAL_LEARNING_RATE = 1e-6
"""For models of a billion weights and more."""

EXAMPLE = '''"""The reward of {recipe}: what a response is worth.

This is an example that runs: it rewards responses of about fifty words. Write what an answer is worth to you in its
place. A column of the data reaches the function if it has an argument of that name; None leaves a sample unscored.
"""


def score(completions, **columns):
    """One number for each completion of a group, higher for better; 1.0 counts as solved in pass@k."""
    return [1.0 - min(1.0, abs(len(text_of(one).split()) - 50) / 50) for one in completions]


def text_of(completion):
    """A completion is a text, or a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''


@dataclass(frozen=True, slots=True)
class NewRecipe:
    """What was written, and what was found."""

    path: Path
    reward_file: Path | None
    """A file with an example of a reward, where none of the built-in ones fits."""
    lines: list[str]
    """What to tell the user."""


def write_recipe(
    data: Path, out: Path | None = None, *, model: str = "smollm2", prompt: str | None = None, answer: str | None = None
) -> NewRecipe:
    """Look at a data file and write a recipe that trains on it. ValueError for what the user can fix; then nothing is
    written."""
    out = out or Path(f"{data.stem}.yaml")
    reward_file = out.with_name(f"{out.stem}_reward.py")
    if out.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--out {out}: a recipe ends in .yaml")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if data.suffix not in FILE_SUFFIXES:
        raise ValueError(f"cannot read {data}: give a file ending in {', '.join(FILE_SUFFIXES)}")
    if not data.is_file():
        raise ValueError(f"no file {data}: give one of your data, ending in {', '.join(FILE_SUFFIXES)}")
    look = look_at(data, prompt=prompt, answer=answer)
    written = [out, reward_file] if look.reward == "own" else [out]
    for path in written:
        if path.exists():
            raise ValueError(f"{path} is already there and is not overwritten: give another name with --out")
    text = recipe_text(look, out.stem, model, reward_file if look.reward == "own" else None)
    if look.reward == "own":
        reward_file.write_text(EXAMPLE.replace("{recipe}", out.name), encoding="utf-8")
    try:
        _check(text, out)
    except ValueError:
        if look.reward == "own":
            reward_file.unlink()
        raise
    out.write_text(text, encoding="utf-8")
    return NewRecipe(out, reward_file if look.reward == "own" else None, _told(look, out, reward_file))


def recipe_text(look: DataLook, name: str, model: str, reward_file: Path | None) -> str:
    """The recipe, with comments."""
    num_held_out, why_none = _held_out(look)
    prompts = max(1, min(MOST_PROMPTS, look.num_rows - num_held_out))
    task = _task_set(look)
    by_character = model == "tiny"
    longest = max(estimate_tokens(text, by_character=by_character) for text in look.prompt_texts)
    around = estimate_tokens(task.get("template", ""), by_character=by_character) + TEMPLATE_TOKENS
    new_tokens = NEW_TOKENS
    if look.has_solutions:
        of_solution = estimate_tokens(look.longest_solution, by_character=by_character)
        new_tokens = min(MOST_NEW_TOKENS, max(NEW_TOKENS, _rounded(of_solution)))
    lr = LEARNING_RATES.get(model, USUAL_LEARNING_RATE)
    kind = "messages" if look.prompts_are_messages else "text"
    lines = [
        _comment(
            f"{look.num_rows:,} rows of {look.path}; prompt: column {look.prompt_column} ({kind}); "
            f"answer: {look.answer_note}."
        ),
        f"model: {_quoted(model)}",
        f"run: {{dir: {_quoted(f'runs/{name}')}}}",
        "tasks:",
        "  train:",
        f"    - &data {_flow(task)}",
    ]
    if num_held_out:
        lines += [
            "  eval:",
            f"    # The first {num_held_out} rows: what an evaluation set has is left out of training. If the rows are",
            "    # sorted, shuffle the file first, or evaluate on a file of its own: {<<: *data, source: test.jsonl}",
            f"    heldout: {{<<: *data, size: {num_held_out}}}",
        ]
    else:
        lines += [f"  eval: {{}}  # {why_none}"]
    lines += ["reward:", "  functions:"]
    if reward_file is None:
        lines += [f"    - {{function: {look.reward}}}  {_comment(_what_it_does(look))}"]
    else:
        lines += [f"    - {{function: {_quoted(f'{reward_file}:score')}}}  # an example: write your own in that file"]
    lines += [
        "    # One of your own, beside it or in its place; a column of the data comes as the argument of its name:",
        "    # - {function: 'rewards.py:brief', weight: 0.1}",
        "    #   def brief(completions, **columns): return [float(len(str(one)) < 500) for one in completions]",
        f"sampling: {{max_new_tokens: {new_tokens}}}",
        f"engine: {{max_sequences: 64, max_prompt_tokens: {_rounded(longest + around)}}}"
        f"  # the longest prompt: about {longest} tokens, and what is put around it",
        f"train: {{steps: 100, prompts_per_step: {prompts}, samples_per_prompt: {SAMPLES}, lr: {lr:.1e}}}"
        + ("" if model in LEARNING_RATES else "  # models below a billion weights take up to 2e-5"),
        "eval: {every: 10}",
    ]
    if look.has_solutions:
        steps, warm_lr = (160, "1.0e-3") if by_character else (50, "1.0e-5")
        lines += [
            "# For a model that cannot do the task at all: first a supervised stage on the column solution.",
            f"# warmup: {{steps: {steps}, lr: {warm_lr}}}",
        ]
    return "\n".join(lines) + "\n"


def _held_out(look: DataLook) -> tuple[int, str]:
    """How many of the first rows are evaluated on, and why none are."""
    number = min(MOST_HELD_OUT, int(HELD_OUT_SHARE * look.num_rows))
    instead = "evaluate on a file of its own, {heldout: {<<: *data, source: test.jsonl}}"
    if not number:
        return 0, f"too few rows to hold some out: {instead}"
    left = look.num_rows - count_repeated(look.prompt_texts, look.prompt_texts[:number])
    if left < max(min(MOST_PROMPTS, look.num_rows), look.num_rows / 2):
        return 0, f"the first rows ask what most others do: {instead}"
    return number, ""


def _task_set(look: DataLook) -> dict[str, str]:
    task: dict[str, str] = {"source": str(look.path)}
    if look.prompt_column != "prompt":
        task["prompt_column"] = look.prompt_column
    if look.answer_column not in (None, "answer", "ground_truth"):
        task["answer_column"] = look.answer_column
    if look.reward in TEMPLATES and not look.says_format:
        task["template"] = TEMPLATES[look.reward]
    return task


def _what_it_does(look: DataLook) -> str:
    where = "after #### or in <answer> tags" if look.reward == "exact_match" else "as mathematics"
    return f"1 if the response's answer, {where}, is that of {look.answer_note}, else 0"


def _rounded(tokens: int) -> int:
    return -(-tokens // ROUND_TO) * ROUND_TO


def _flow(mapping: dict[str, str]) -> str:
    """On one line."""
    return "{" + ", ".join(f"{key}: {_quoted(value)}" for key, value in mapping.items()) + "}"


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=LINE).strip()


def _comment(text: str) -> str:
    """On one line, whatever a name has in it."""
    return f"# {' '.join(''.join(one if one.isprintable() else ' ' for one in text).split())}"


def _check(text: str, out: Path) -> None:
    """What the start of a run looks at before it loads a model."""
    config = build_config(yaml.safe_load(text), where=str(out))
    sets = {f"train/{number}": one for number, one in enumerate(config.tasks.train)}
    sets |= {f"eval/{name}": one for name, one in config.tasks.eval.items()}
    for name, task_set in sets.items():
        check_rewards(config.reward, open_problems(task_set, name))


def _told(look: DataLook, out: Path, reward_file: Path) -> list[str]:
    reward = f"{look.reward}: {_what_it_does(look)}"
    if look.reward == "own":
        reward = f"none of the built-in ones fits; {reward_file} holds an example: write what an answer is worth to you"
    return [
        f"{look.num_rows:,} rows; prompt: column {look.prompt_column}; answer: {look.answer_note}"
        + ("; worked solutions: column solution" if look.has_solutions else ""),
        f"reward: {reward}",
        f"written: {out}",
        f"look at what follows from it: slipstream train {out} --dry-run",
        f"start it, from this folder: slipstream train {out}",
    ]
