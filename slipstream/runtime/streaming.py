"""A run whose sampling and training have processes of their own: starts them, drives them, and ends them.

Every process begins from files: the trainer from a checkpoint, workers from the weights that the trainer published. So
any of them can be lost: workers are started again by the pool, the trainer with the whole run from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from transformers import PreTrainedTokenizerBase

from slipstream.config import Config
from slipstream.files import replacing
from slipstream.history.store import HistoryStore
from slipstream.observe.advice import Advice
from slipstream.observe.console import Console
from slipstream.observe.ledger import Ledger
from slipstream.observe.loggers import MetricLog
from slipstream.observe.reports import Reports
from slipstream.observe.store import RunStore
from slipstream.runtime.coats import sample_in_process, train_in_process
from slipstream.runtime.crew import TrainerCrew
from slipstream.runtime.drafter_session import DrafterSession
from slipstream.runtime.driver import drive
from slipstream.runtime.folder import LOGS_FOLDER, PROCESSES_FILE, VERSIONS_FOLDER, WEIGHTS_FOLDER
from slipstream.runtime.kept import Kept
from slipstream.runtime.placement import trainer_name
from slipstream.runtime.pool import Pool, WorkerLink
from slipstream.runtime.processes import Doorbell
from slipstream.runtime.rollouts import OpenGroups
from slipstream.runtime.runtimes import Runtime, trainer_threads, worker_threads
from slipstream.runtime.stream_world import StreamWorld
from slipstream.schedule.events import Action, Event, Item, RunBegan, StepTrained, to_record
from slipstream.schedule.pipeline import Pipeline
from slipstream.schedule.rules import MODES
from slipstream.tasks.grading import Grader
from slipstream.types import Prompt


@dataclass(frozen=True, slots=True)
class StreamParts:
    """What a run has by the time its processes start."""

    config: Config
    runtime: Runtime
    """Where they run."""
    num_parameters: int
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
    reports: Reports
    console: Console
    advice: Advice
    kept_state: dict[str, Any]
    """Goes into every checkpoint as it is."""
    kept: Kept
    """Rollouts of the run that this one goes on from."""
    drafting: Mapping[str, object]
    """What it knew of ways to draft."""
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
    config, runtime, run_dir = parts.config, parts.runtime, parts.config.run.dir
    weights_folder = run_dir / WEIGHTS_FOLDER
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
        pids, pids_lock = {"driver": os.getpid()}, Lock()
        workers: dict[str, WorkerLink] = {}

        def write_down(name: str, pid: int) -> None:
            """For whoever looks after the run."""
            with pids_lock:
                pids[name] = pid
                with replacing(run_dir / PROCESSES_FILE) as partial:
                    partial.write_text(json.dumps(pids))

        def start(name: str, num_threads: int, *work: Any) -> WorkerLink:
            log_file = run_dir / LOGS_FOLDER / f"{name}.log"
            return runtime.start(name, log_file, num_threads, *work, bell=bell, born=write_down)

        def note(item: Item) -> None:
            write(time.time(), item)

        drafter = None
        if parts.drafter_updates is not None:
            drafter = DrafterSession(
                run_dir / VERSIONS_FOLDER,
                lambda name, message: workers[name].send(message),
                updates=config.drafter.updates,
                samples=config.samples_per_step,
                num_updates=parts.drafter_updates,
                least_idle=config.drafter.least_idle,
                record=note,
                say=parts.console.note,
            )

        def start_worker(name: str) -> WorkerLink:
            most_bytes = runtime.worker_bytes(name, parts.num_parameters)
            work = (sample_in_process, config, weights_folder, name, most_bytes, ways)
            workers[name] = start(name, worker_threads(config), *work)
            return workers[name]

        rendezvous, ways = runtime.rendezvous(), runtime.weight_ways()
        trainers = []
        for rank in range(config.train.ranks):
            name = trainer_name(rank, config.train.ranks)
            work = (train_in_process, config, parts.checkpoint, weights_folder, rank, rendezvous, ways)
            trainers.append(start(name, trainer_threads(config), *work))
            stack.callback(trainers[-1].close)
            ledger.arrive(name, time.monotonic(), rest="start")
        groups = OpenGroups(parts.grader, parts.tokenizer, config.seed, bell.ring)
        pool = Pool(
            MODES[config.mode],
            config.rollout.workers,
            start_worker,
            silence_s=config.rollout.silence_s,
            ledger=ledger,
            note=note,
            is_grading=lambda: groups.num_in_grading > 0,
            say=parts.console.note,
            drafter=drafter,
            drafting=parts.drafting,
        )
        stack.callback(pool.close)
        world = StreamWorld(
            config,
            pool=pool,
            crew=TrainerCrew(trainers, config.train.silence_s),
            ledger=ledger,
            bell=bell,
            groups=groups,
            history=parts.history,
            prompts=parts.prompts,
            eval_sets=parts.eval_sets,
            stop_token_ids=parts.stop_token_ids,
            store=parts.store,
            log=parts.log,
            reports=parts.reports,
            console=parts.console,
            advice=parts.advice,
            rows={first.step: row},
            kept_state=parts.kept_state,
            kept=parts.kept,
            stop_reason=stop_reason,
            note=note,
        )
        stack.callback(world.close)
        return drive(Pipeline(config), world, first, time.time, write_events)
