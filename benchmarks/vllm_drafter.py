"""Does vLLM draft with an exported drafter what we draft with it?

    python benchmarks/vllm_drafter.py SOURCE [SOURCE ...] --vllm-python FILE --out FILE

SOURCE is what `slipstream export-drafter` takes: a run, a checkpoint, or a folder of `train-drafter`. It is exported in
float32, and vLLM, in an environment of its own (`vllm_serve.py`), answers prompts of the run greedily with it; all that
its drafter says is caught on the way. Ours is computed plainly from the tokens that were known, with the target's
features from its Hugging Face class and the weights as they were before the export; further drafts go on with the
tokens that vLLM drafted. Compared are the logits of every draft and which token is the likeliest, and, as a check of
the serving itself, whether the text is the target's own greedy one. Exit code 1 if a likeliest token differs, or a
logit by more than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from slipstream.config import load_config
from slipstream.draft.eagle import DraftModel, Features, build_draft
from slipstream.draft.export import FORMATS
from slipstream.models.attention import attend_causally
from slipstream.models.loading import load_model, load_tokenizer
from slipstream.models.packed import document_hidden, head_logits
from slipstream.models.rendering import stop_token_ids
from slipstream.runtime.drafters import SavedDrafter, export_from, find_drafter
from slipstream.runtime.offline import recorded_samples

DRAFTS = 4


def prompts_of(run: Path, target: Path, most: int) -> list[tuple[int, ...]]:
    """Of rollouts that `train-drafter` holds out."""
    _, held_out = recorded_samples(run, load_config(run / "config.yaml"), str(target))
    return list(dict.fromkeys(sample.ids[: sample.num_prompt] for sample in held_out))[:most]


def serve(python: str, drafter: SavedDrafter, folder: Path, told: dict[str, Any], new_tokens: int) -> Any:
    """What vLLM said."""
    method = next(name for name, kind in FORMATS.items() if kind == drafter.kind)
    (folder.parent / "prompts.json").write_text(json.dumps(told))
    out = folder.parent / "said.pt"
    subprocess.run(
        [
            *(python, str(Path(__file__).with_name("vllm_serve.py")), str(drafter.target), str(folder), method),
            *(str(folder.parent / "prompts.json"), str(out)),
            *("--drafts", str(DRAFTS), "--new-tokens", str(new_tokens)),
        ],
        check=True,
        stdout=sys.stderr,
    )
    return torch.load(out, weights_only=True)


@torch.inference_mode()
def our_logits(model: Any, features: Features, draft: DraftModel, known: Tensor, follow: Sequence[int]) -> list[Tensor]:
    """Of each draft after the known tokens, going on with those that were drafted."""
    document_hidden(model, known, [len(known)])
    embed, last = partial(embedding, weight=model.get_input_embeddings().weight), len(known) - 1
    hidden = draft.fuse(features.take()[:last])
    residual, query, keys, values = draft.begin(embed(known[1:]), hidden, torch.arange(last))
    hidden = draft.finish(residual, attend_causally(query, keys, values, draft.form))[-1:]
    said = [head_logits(model, draft.head_input(hidden))[0]]
    for place, token in enumerate(follow[:-1]):
        residual, query, key, value = draft.begin(embed(torch.tensor([token])), hidden, torch.tensor([last + place]))
        keys, values = torch.cat([keys, key]), torch.cat([values, value])
        hidden = draft.finish(residual, attend_causally(query, keys, values, draft.form))
        said.append(head_logits(model, draft.head_input(hidden))[0])
    return said


def compare(python: str, source: Path, num_prompts: int, new_tokens: int) -> dict[str, Any]:
    drafter = find_drafter(source)
    model: Any = load_model(str(drafter.target), dtype=torch.float32, device=torch.device("cpu"))
    run = drafter.target.parent.parent
    prompts = prompts_of(run, drafter.target, num_prompts)
    stop = stop_token_ids(model, load_tokenizer(str(drafter.target)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "drafter"
        export_from(source, folder, file_format=None, dtype="float32", target=None)
        served = serve(python, drafter, folder, {"prompts": prompts, "stop": stop}, new_tokens)
    draft = build_draft(model.config, drafter.kind).eval()
    draft.load_state_dict(drafter.state.weights)
    features = Features(model, drafter.kind)
    worst, largest, num_same, num_drafts = [0.0] * DRAFTS, 0.0, 0, 0
    num_greedy, num_tokens, num_steps = 0, 0, 0
    for prompt, answer in zip(prompts, served["texts"], strict=True):
        text = torch.tensor(answer["text"])
        with torch.inference_mode():
            own = head_logits(model, document_hidden(model, text, [len(text)])).argmax(-1)
        num_greedy += int((own[len(prompt) - 1 : -1] == text[len(prompt) :]).sum())
        num_tokens += len(text) - len(prompt)
        # The last step may have gone past the end, and drafted after tokens that are not in the text.
        num_steps += len(answer["said"])
        for said in answer["said"]:
            if said["known"] > len(text):
                continue
            ours = our_logits(model, features, draft, text[: said["known"]], said["tokens"])
            for place, (mine, theirs) in enumerate(zip(ours, said["logits"], strict=True)):
                worst[place] = max(worst[place], float((mine - theirs).abs().max()))
                largest = max(largest, float(mine.abs().max()))
                num_same += int(mine.argmax() == theirs.argmax())
                num_drafts += 1
    return {
        "source": source.name,
        "kind": drafter.kind,
        "updates": drafter.state.num_updates,
        "target_layers": model.config.num_hidden_layers,
        "target_hidden_size": model.config.hidden_size,
        "vllm": served["vllm"],
        "drafts": num_drafts,
        "same_likeliest_token": num_same,
        "largest_difference_by_place": worst,
        "largest_logit": largest,
        "tokens": num_tokens,
        "tokens_that_are_the_targets_greedy_ones": num_greedy,
        "tokens_a_step": num_tokens / num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--vllm-python", required=True, help="The Python of an environment that has vLLM.")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for source in options.sources:
        results.append(compare(options.vllm_python, source, options.prompts, options.new_tokens))
        print(json.dumps(results[-1], indent=1), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    for result in results:
        if result["same_likeliest_token"] < result["drafts"]:
            sys.exit(f"{result['source']}: another token is the likeliest")
        if not max(result["largest_difference_by_place"]) <= options.tolerance:
            sys.exit(f"{result['source']}: logits differ by more than {options.tolerance}")


if __name__ == "__main__":
    main()
