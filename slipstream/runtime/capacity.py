"""Whether a run fits its machine: memory, cores, disk. Pure; asked by --dry-run and once more when a run starts.

Every figure is a lower bound of what the run may come to take. What is not refused may still not fit: what a step
computes depends on the model and on how long its responses become.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import MAX_INT, Config
from slipstream.files import check_output_folder, read_json, shown
from slipstream.observe.loggers import check_loggers

PROCESS_BYTES = 150 << 20
"""Of a process that has imported torch, beside what it shares with others."""
GRADER_BYTES = 10 << 20
PROBLEM_BYTES = 1 << 10
"""Of a problem in memory, generated or read, with its messages and its columns."""
ROLLOUT_BYTES = 1 << 10
"""Of a rollout in memory, from when it is asked for until its step is trained on."""
SLOT_BYTES_A_TOKEN = 9
"""Of the engine's record of a sequence, for each token that it may have: id, log-probability, origin."""
KV_BYTES_A_TOKEN = 512
"""Of keys and values, of a model of which nothing is known: one layer with one head of 64."""
TINY_KV_BYTES_A_TOKEN = 2 * 3 * 128 * 4
"""Of `model: tiny`."""
LIBRARY_BYTES_A_TOKEN = 4
THREADS_A_CORE, SMALL_MACHINE_THREADS = 8, 64
"""Threads of one process: some more than cores are of use to compute as a larger machine did, to the bit."""
PROCESSES_A_CORE, SMALL_MACHINE_PROCESSES = 4, 32
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Of NVIDIA's driver, of Windows' for Linux, of AMD's: torch sees a GPU only through one of these."""
RUN_DISK_BYTES = 10 << 20
"""Of the smallest run: a checkpoint, the store, the report."""


@dataclass(frozen=True, slots=True)
class Machine:
    num_cores: int
    memory_bytes: int
    has_gpu: bool
    """Then keys and values may lie in its memory, which is not known here."""


def this_machine() -> Machine:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        memory_bytes = min(memory_bytes, int(text))
    return Machine(len(os.sched_getaffinity(0)), memory_bytes, any(map(os.path.exists, GPU_DEVICES)))


def check_start(config: Config) -> None:
    """ValueError for what a run would fail of on this machine, as far as that is known before a model is loaded."""
    check_capacity(config, this_machine())
    check_output_folder(config.run.dir, "run.dir")
    check_loggers(config.run.loggers)
    check_disk(config)


def check_capacity(config: Config, machine: Machine) -> None:
    """ValueError names the setting that asks for more than the machine has, and a value that fits."""
    if config.device == "cuda" and not machine.has_gpu and config.runtime == "local":
        raise ValueError("device=cuda, but this machine has no GPU: write device=cpu or device=auto")
    _check_cores(config, machine)
    for setting, count, bytes_each in memory_of(config, machine):
        if count * bytes_each > machine.memory_bytes:
            raise ValueError(
                f"{setting}: {count:,} take at least {_size(count * bytes_each)}, and this machine has "
                f"{_size(machine.memory_bytes)} of memory: at most {machine.memory_bytes // bytes_each:,} fit"
            )


def memory_of(config: Config, machine: Machine) -> list[tuple[str, int, int]]:
    """(the setting in words, how many it asks for, bytes that each takes at least) of what memory has to hold."""
    engine, samples = config.engine, config.samples_per_step
    rounds = config.algorithm.max_sampling_rounds if config.algorithm.dynamic_sampling else 1
    sets = {f"tasks.train.{number}.size": one for number, one in enumerate(config.tasks.train)}
    sets |= {f"tasks.eval.{name}.size": one for name, one in config.tasks.eval.items()}
    # Of a file `size` keeps as many rows as there are; else it says how many problems are generated.
    sizes = {name: one.size for name, one in sets.items() if one.size is not None and not _is_file(one.source)}
    found = [(name, size, PROBLEM_BYTES) for name, size in sizes.items()]
    found += [
        ("train.prompts_per_step x train.samples_per_prompt", samples, ROLLOUT_BYTES),
        ("rollouts of a step, in algorithm.max_sampling_rounds", samples * rounds, ROLLOUT_BYTES),
        ("eval.samples_per_prompt", config.eval.samples_per_prompt, ROLLOUT_BYTES),
        ("reward.workers", config.reward.workers, GRADER_BYTES),
    ]
    if config.warmup is not None:
        found.append(("warmup.sequences_per_step", config.warmup.sequences_per_step, ROLLOUT_BYTES))
    if config.runtime == "ray":
        return found  # the rest is in the memory of the cluster's nodes
    if config.mode != "colocated":
        found.append(("processes, train.ranks + rollout.workers", _num_processes(config), PROCESS_BYTES))
    in_tokens = "engine.max_sequences x (engine.max_prompt_tokens + sampling.max_new_tokens), in tokens"
    num_tokens = engine.max_sequences * config.max_length
    found.append((in_tokens, num_tokens, SLOT_BYTES_A_TOKEN))
    if config.device != "cpu" and machine.has_gpu:
        return found
    name, num_tokens = (in_tokens, num_tokens) if engine.kv_tokens is None else ("engine.kv_tokens", engine.kv_tokens)
    found.append((name, num_tokens, _kv_bytes_a_token(config.model)))
    if config.draft.library_tokens is not None:
        found.append(("draft.library_tokens", config.draft.library_tokens, LIBRARY_BYTES_A_TOKEN))
    return found


def check_sequences(num_sequences: int, length: int, where: str) -> None:
    """ValueError if an engine for these sequences does not fit. `where`: the options that gave the numbers."""
    machine = this_machine()
    num_bytes = num_sequences * length * (SLOT_BYTES_A_TOKEN + (0 if machine.has_gpu else KV_BYTES_A_TOKEN))
    if max(num_sequences, length) > MAX_INT or num_bytes > machine.memory_bytes:
        raise ValueError(
            f"{where}: {num_sequences:,} sequences of {length:,} tokens take at least {_size(num_bytes)}, and this "
            f"machine has {_size(machine.memory_bytes)} of memory: write smaller numbers"
        )


def check_disk(config: Config) -> None:
    """ValueError if the disk of run.dir has no room for the smallest of runs."""
    folder = config.run.dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < RUN_DISK_BYTES:
        raise ValueError(
            f"run.dir={shown(config.run.dir)}: {free / 2**20:.1f} MiB are free there, and the smallest run takes "
            f"{RUN_DISK_BYTES / 2**20:.0f}: free some space, or choose another run.dir"
        )


def _check_cores(config: Config, machine: Machine) -> None:
    if config.runtime == "ray":
        return
    most = max(SMALL_MACHINE_THREADS, THREADS_A_CORE * machine.num_cores)
    for name, asked in (("train.threads", config.train.threads), ("rollout.threads", config.rollout.threads)):
        if asked is not None and asked > most:
            raise ValueError(
                f"{name}={asked:,}: this machine has {machine.num_cores} cores, and a process may have {most} threads "
                f"here at most; write {machine.num_cores}, or leave it out"
            )
    most = max(SMALL_MACHINE_PROCESSES, PROCESSES_A_CORE * machine.num_cores)
    if config.mode != "colocated" and _num_processes(config) > most:
        raise ValueError(
            f"train.ranks + rollout.workers = {_num_processes(config):,} processes: this machine has "
            f"{machine.num_cores} cores, and a run may have {most} processes here at most; write fewer"
        )


def _num_processes(config: Config) -> int:
    scale = config.rollout.scale
    return config.train.ranks + (config.rollout.workers if scale is None else scale.max)


def _kv_bytes_a_token(model: str) -> int:
    """From the config.json of a folder, read without loading the model; else a lower bound."""
    if model == "tiny":
        return TINY_KV_BYTES_A_TOKEN
    try:
        told = read_json(Path(model).expanduser() / "config.json", "give a model folder")
        heads = told.get("num_key_value_heads") or told["num_attention_heads"]
        head_size = told.get("head_dim") or told["hidden_size"] // told["num_attention_heads"]
        return max(KV_BYTES_A_TOKEN, int(2 * told["num_hidden_layers"] * heads * head_size * 2))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError):
        return KV_BYTES_A_TOKEN  # of another form: what is wrong with it is told where it is loaded


def _is_file(source: str) -> bool:
    return Path(source).suffix in (".json", ".jsonl", ".parquet")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
