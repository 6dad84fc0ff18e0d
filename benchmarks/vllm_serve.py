"""What vLLM's drafter says while it serves; run by `vllm_drafter.py` with vLLM's own Python. Imports nothing of ours.

    python benchmarks/vllm_serve.py TARGET DRAFTER METHOD PROMPTS.json OUT.pt --drafts 4 --new-tokens 48

PROMPTS.json has "prompts", lists of token ids, and "stop", ids that end a text. They are served greedily in float32,
one at a time. Written are the vLLM version and for each prompt its text and what was said: after how many known
tokens, which tokens were drafted, and the logits of each.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "method", "prompts", "out"):
        parser.add_argument(name)
    parser.add_argument("--drafts", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the drafter is to be in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    llm = vllm.LLM(
        options.target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        speculative_config={
            "method": options.method,
            "model": options.drafter,
            "num_speculative_tokens": options.drafts,
        },
    )
    said = listen(llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter)
    with open(options.prompts) as file:
        told = json.load(file)
    asked = vllm.SamplingParams(
        temperature=0, max_tokens=options.new_tokens, stop_token_ids=told["stop"], detokenize=False
    )
    texts = []
    for prompt in told["prompts"]:
        said.clear()
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        texts.append({"text": [*prompt, *answer.outputs[0].token_ids], "said": list(said)})
    torch.save({"vllm": vllm.__version__, "texts": texts}, options.out)


def listen(drafter: Any) -> list[dict[str, Any]]:
    """A list to which the drafter adds as it drafts."""
    said: list[dict[str, Any]] = []
    propose, compute_logits = drafter.propose, drafter.model.compute_logits

    def listening(*args: Any, **values: Any) -> Any:
        at = values["token_indices_to_sample"]
        last = values["target_positions"][-1 if at is None else int(at[0])]
        # The last features are those of the last known token but one.
        said.append({"known": int(last) + 2, "logits": []})
        drafts = propose(*args, **values)
        said[-1]["tokens"] = drafts[0].tolist()
        return drafts

    def noting(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        said[-1]["logits"].append(logits[0].float().clone())
        return logits

    drafter.propose, drafter.model.compute_logits = listening, noting
    return said


if __name__ == "__main__":
    main()
