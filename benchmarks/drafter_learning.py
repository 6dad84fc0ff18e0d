"""How a drafter keeps up with a policy that changes: one that learns on against one that stopped, by step of a run.

    slipstream train smollm2-reasoner draft.source=drafter run.save_every=2 run.keep_last=100 ...
    python benchmarks/drafter_learning.py RUN --frozen 4 --out drafter_learning.json --plot drafter_learning.html

For each checkpoint, rollouts of the next step, which its policy sampled and its drafter has not seen, are walked as the
engine would walk them, four drafts a step (`draft/judge.py`): with the checkpoint's own drafter, with that of the
checkpoint before (what a policy update costs until the drafter has learned from it), and with a frozen one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from plots import write

from slipstream.config import Config, load_config
from slipstream.draft.eagle import build_draft, kind_of
from slipstream.draft.saved import DRAFTER_FILE, load_drafter_state
from slipstream.models.loading import load_model, load_tokenizer, width_of
from slipstream.models.precision import resolve_precision
from slipstream.models.rendering import render_prompts
from slipstream.observe.store import RunStore
from slipstream.rng import keyed_random
from slipstream.runtime.benches import describe_machine
from slipstream.runtime.engines import choose_device
from slipstream.runtime.offline import DEPTH, Judge, Sample, sample_of
from slipstream.runtime.prompts import load_training_problems

NAMES = {"adaptive": "learning on", "before": "as it was before the update", "frozen": "frozen"}


def read_rollouts(run: Path, config: Config, tokenizer_name: str) -> dict[int, list[Sample]]:
    """By step."""
    problems = load_training_problems(config)
    rendered = render_prompts(load_tokenizer(tokenizer_name), problems, config.engine.max_prompt_tokens)
    prompts = {prompt.key: prompt for prompt in rendered}
    by_step: dict[int, list[Sample]] = {}
    with RunStore(run, read_only=True) as store:
        for one in store.rollouts(kind="train"):
            if one.prompt_key in prompts and one.token_ids:
                by_step.setdefault(one.step, []).append(sample_of(prompts[one.prompt_key], one))
    return by_step


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    figure = go.Figure()
    for name, words in NAMES.items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        steps, values = zip(*points, strict=True) if points else ((), ())
        figure.add_scatter(x=steps, y=values, name=words, line_dash="dot" if name == "before" else "solid")
    write(
        figure,
        file,
        title="Tokens a step on rollouts not yet learned from",
        xaxis_title="step of RL",
        yaxis_title="tokens a step",
        yaxis_rangemode="tozero",
        legend={"x": 0.98, "y": 0.05, "xanchor": "right", "yanchor": "bottom"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--frozen", type=int, default=4, help="the step whose drafter stays as it is")
    parser.add_argument("--rollouts", type=int, default=48, help="of each step")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    run: Path = arguments.run
    config = load_config(run / "config.yaml")
    device = choose_device(config.device)
    folders = {int(one.name.partition("_")[2]): one for one in (run / "checkpoints").glob("step_*")}
    folders = {step: folders[step] for step in sorted(folders) if (folders[step] / DRAFTER_FILE).is_file()}
    if arguments.frozen not in folders:
        raise SystemExit(f"no checkpoint with a drafter at step {arguments.frozen}; there are {sorted(folders)}")
    rollouts = read_rollouts(run, config, str(folders[arguments.frozen]))
    width = width_of(str(folders[arguments.frozen]))
    record = describe_machine(device, resolve_precision(config.train.precision, device, width))
    record |= {"what": "benchmarks/drafter_learning.py", "frozen": arguments.frozen, "depth": DEPTH, "rows": []}
    weights = {step: load_drafter_state(folder).weights for step, folder in folders.items()}
    kind = kind_of(weights[arguments.frozen])
    before: int | None = None
    for step, folder in folders.items():
        if step + 1 in rollouts:
            model = load_model(str(folder), dtype=torch.float32, device=device).requires_grad_(False).eval()
            wanted = {"adaptive": step} | ({"before": before} if before is not None else {})
            if step >= arguments.frozen:
                wanted["frozen"] = arguments.frozen
            drafts = {}
            for name, taken in wanted.items():
                drafts[name] = build_draft(model.config, kind).to(device).eval().requires_grad_(False)
                drafts[name].load_state_dict(weights[taken])
            some = list(rollouts[step + 1])
            keyed_random("judged", step).shuffle(some)
            judge = Judge(config, model, kind, some[: arguments.rollouts])
            found = dict(zip(drafts, judge.tokens_a_step(*drafts.values()), strict=True))
            record["rows"].append({"step": step} | found)
            told = ", ".join(f"{NAMES[name]} {value:.2f}" for name, value in found.items())
            print(f"step {step}: {told}", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        before = step
    if arguments.plot:
        plot(record["rows"], arguments.plot)


if __name__ == "__main__":
    main()
