"""A run whose sampling and training have processes of their own: starts them, drives them, and ends them.

Every process begins from files: the trainer from a checkpoint, workers from the weights that the trainer published. So
any of them can be lost: workers are started again by the pool, the trainer with the whole run from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from slipstream.config import Config
from slipstream.history.store import HistoryStore
from slipstream.observe.console import Console
from slipstream.observe.ledger import Ledger
from slipstream.observe.loggers import MetricLog
from slipstream.observe.store import RunStore
from slipstream.runtime.coats import sample_in_process, train_in_process
from slipstream.runtime.drafter_session import DrafterSession
from slipstream.runtime.driver import drive
from slipstream.runtime.folder import LESSONS_FOLDER, LOGS_FOLDER, PROCESSES_FILE, VERSIONS_FOLDER, WEIGHTS_FOLDER
from slipstream.runtime.pool import Pool
from slipstream.runtime.processes import Doorbell, Link
from slipstream.runtime.rollouts import OpenGroups
from slipstream.runtime.stream_world import StreamWorld
from slipstream.schedule.events import Action, Event, Item, RunBegan, StepTrained, to_record
from slipstream.schedule.pipeline import Pipeline
from slipstream.schedule.rules import MODES
from slipstream.tasks.grading import Grader
from slipstream.types import Prompt

RUNTIMES: dict[str, Callable[..., Link]] = {"local": Link}
"""By the recipe's runtime: how a process is started."""


@dataclass(frozen=True, slots=True)
class StreamParts:
    """What a run has by the time its processes start."""

    config: Config
    checkpoint: Path
    """Where the trainer begins."""
    grader: Grader
    tokenizer: PreTrainedTokenizerBase
    history: HistoryStore | None
    prompts: Sequence[Prompt]
    eval_sets: Mapping[str, Sequence[Prompt]]
    stop_token_ids: tuple[int, ...]
    store: RunStore
    log: MetricLog
    console: Console
    kept_state: dict[str, Any]
    """Goes into every checkpoint as it is."""
    drafter_updates: int | None = None
    """Of the drafter that is published for the workers to begin with; None: there is none that learns."""


def stream(
    parts: StreamParts,
    first: RunBegan,
    row: dict[str, float],
    stop_reason: Callable[[], str | None],
    on_trained: Callable[[int], None],
) -> str:
    """Run until there is nothing left to do; the reason why it ended. `row`: metrics of the step it begins with."""
    config, run_dir = parts.config, parts.config.run.dir
    weights_folder = run_dir / WEIGHTS_FOLDER
    shutil.rmtree(weights_folder, ignore_errors=True)  # of a run that was cut off: versions are numbered anew
    step = first.step

    def write(now_s: float, *items: Item) -> None:
        for item in items:
            name, fields = to_record(item)
            parts.store.add_event(step, now_s, name, fields)

    def write_events(now_s: float, event: Event, actions: list[Action]) -> None:
        nonlocal step
        if isinstance(event, StepTrained):
            step = event.step
            on_trained(step)
        write(now_s, event, *actions)

    with ExitStack() as stack:
        ledger, bell = Ledger(), Doorbell()
        pids = {"driver": os.getpid()}
        workers: dict[str, Link] = {}

        def start(name: str, *arguments: Any) -> Link:
            """Its number is written down, for whoever looks after the run."""
            link = RUNTIMES[config.runtime](name, *arguments, bell=bell)
            pids[name] = link.pid
            partial = run_dir / f".tmp-{PROCESSES_FILE}"
            partial.write_text(json.dumps(pids))
            os.replace(partial, run_dir / PROCESSES_FILE)
            return link

        def start_worker(name: str) -> Link:
            log_file = run_dir / LOGS_FOLDER / f"{name}.log"
            arguments = (sample_in_process, config, weights_folder, name)
            workers[name] = start(name, log_file, worker_threads(config), *arguments)
            return workers[name]

        drafter = None
        if parts.drafter_updates is not None:
            drafter = DrafterSession(
                run_dir / VERSIONS_FOLDER,
                lambda name, message: workers[name].send(message),
                updates=config.drafter.updates,
                samples=config.samples_per_step,
                num_updates=parts.drafter_updates,
                record=lambda item: write(time.time(), item),
                say=parts.console.note,
            )

        # How many threads it has is part of what a sum on a CPU comes out as: as many as this process would train with.
        num_threads = max(1, torch.get_num_threads() // config.train.ranks)
        rendezvous = f"file://{stack.enter_context(TemporaryDirectory())}/ranks"
        trainers = []
        for rank in range(config.train.ranks):
            name = "trainer" if config.train.ranks == 1 else f"trainer-{rank}"
            log_file = run_dir / LOGS_FOLDER / f"{name}.log"
            work = (train_in_process, config, parts.checkpoint, weights_folder, rank, rendezvous)
            trainers.append(start(name, log_file, num_threads, *work))
            stack.callback(trainers[-1].close)
            ledger.arrive(name, time.monotonic(), rest="rollout wait")
        pool = Pool(
            MODES[config.mode],
            config.rollout.workers,
            start_worker,
            silence_s=config.rollout.silence_s,
            ledger=ledger,
            note=lambda event: write(time.time(), event),
            say=parts.console.note,
            drafter=drafter,
        )
        stack.callback(shutil.rmtree, run_dir / LESSONS_FOLDER, ignore_errors=True)  # once all are gone
        stack.callback(pool.close)
        world = StreamWorld(
            config,
            pool=pool,
            trainers=trainers,
            ledger=ledger,
            bell=bell,
            groups=OpenGroups(parts.grader, parts.tokenizer, config.seed),
            history=parts.history,
            prompts=parts.prompts,
            eval_sets=parts.eval_sets,
            stop_token_ids=parts.stop_token_ids,
            store=parts.store,
            log=parts.log,
            console=parts.console,
            rows={first.step: row},
            kept_state=parts.kept_state,
            stop_reason=stop_reason,
        )
        stack.callback(world.close)
        return drive(Pipeline(config), world, first, time.time, write_events)


def worker_threads(config: Config) -> int:
    return config.rollout.threads or max(1, len(os.sched_getaffinity(0)) // config.rollout.workers)
