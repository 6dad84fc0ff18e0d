"""A run in this process: puts the parts together, goes through the warm start and the loop, and cleans up.

Owns the order in which things are checked, opened and closed, and the signals. The folder's life is in `folder.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.config import Config, Draft, Warmup
from slipstream.draft import versions
from slipstream.draft.eagle import check_draftable
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.saved import DrafterSaver, DrafterState
from slipstream.engine.engine import Engine
from slipstream.history.store import HistoryStore
from slipstream.models.exactness import why_inexact
from slipstream.models.loading import check_model, load_model, load_shape, load_tokenizer
from slipstream.models.precision import use_batch_invariant_products
from slipstream.models.rendering import render_prompts, stop_token_ids
from slipstream.models.threads import threads
from slipstream.models.weights import fingerprint
from slipstream.observe.advice import Advice
from slipstream.observe.console import Console
from slipstream.observe.curve import draw_run
from slipstream.observe.loggers import MetricLog
from slipstream.observe.reports import Reports
from slipstream.observe.store import RunStore
from slipstream.runtime.capacity import check_start
from slipstream.runtime.control import CONTROL_FILE
from slipstream.runtime.crew import TrainerLost
from slipstream.runtime.drafters import SavedDrafter
from slipstream.runtime.drafting import (
    build_selector,
    check_kind,
    check_warm_history,
    drafter_trainer_for,
    fixed_way,
    known_ways,
    learns,
    open_history,
    past_texts,
    remembers,
    restore_drafter,
    settle_source,
    unread_settings,
    warm_drafter,
)
from slipstream.runtime.driver import drive
from slipstream.runtime.engines import build_engine, choose_device
from slipstream.runtime.evaluation import Interrupted
from slipstream.runtime.folder import LESSONS_FOLDER, REFERENCE_FOLDER, VERSIONS_FOLDER, RunFolder
from slipstream.runtime.heap import give_back, still_heap
from slipstream.runtime.kept import Kept, recall
from slipstream.runtime.pool import WorkerBroke
from slipstream.runtime.prompts import TrainingSet, check_length, load_eval_problems, open_training_problems
from slipstream.runtime.rollouts import RolloutDesk
from slipstream.runtime.runtimes import Runtime, open_runtime
from slipstream.runtime.stopping import StopFlag, stop_on_signals
from slipstream.runtime.streaming import StreamParts, stream
from slipstream.runtime.warmup import Progress, RewardSampler, warm_up
from slipstream.runtime.world import LocalWorld
from slipstream.schedule.events import Action, Event, NotExact, RunBegan, StepTrained, UnderWay, to_record
from slipstream.schedule.scheduler import Scheduler
from slipstream.tasks.grading import Grader
from slipstream.train.checkpoint import Checkpoint, latest_checkpoint, load_trainer_state, save_checkpoint
from slipstream.train.trainer import Trainer
from slipstream.types import Prompt

MAX_TRAINER_LOSSES = 3
"""Without a new checkpoint in between: then something else is wrong."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    reason: str
    """"done", or why it stopped early."""
    run_dir: Path
    step: int
    advice: tuple[str, ...] = ()
    """What is wrong with the run as a whole, e.g. that it had nothing to learn from; empty if it has learned."""


def run_training(
    config: Config, *, resume: bool | Path = False, overwrite: bool = False, quiet: bool = False
) -> Outcome:
    """Train to the end of the recipe, from the start or from a checkpoint. ValueError for what the user can fix.

    `overwrite`: delete the run that is in the folder; with a checkpoint to resume from, what came after that."""
    check_start(config)
    with RunFolder.opened(config.run.dir) as folder:
        return _train_on(config, folder, resume=resume, overwrite=overwrite, quiet=quiet)


def _train_on(config: Config, folder: RunFolder, *, resume: bool | Path, overwrite: bool, quiet: bool) -> Outcome:
    """Whatever becomes of the process that trains."""
    losses, flag, lost = 0, StopFlag(), None
    while True:
        before = latest_checkpoint(config.run.dir)
        try:
            return _train_once(config, folder, flag, resume=resume, overwrite=overwrite, quiet=quiet, lost=lost)
        except TrainerLost as loss:
            after = latest_checkpoint(config.run.dir)
            losses = losses + 1 if after == before else 1
            if after is None or losses > MAX_TRAINER_LOSSES:
                raise WorkerBroke(f"the process that trains was lost {losses} times at {after}; {loss}") from None
            if flag.reason is not None:  # it was told to stop, and so was the trainer
                return Outcome(flag.reason, config.run.dir, int(after.name.removeprefix("step_")))
            if not quiet:
                print(f"{loss}\nthe run goes on from {after}", flush=True)
            resume, overwrite, lost = True, False, Kept(loss.under_way)
        give_back()  # what the lost one had, before it is loaded again


def _train_once(
    config: Config,
    folder: RunFolder,
    flag: StopFlag,
    *,
    resume: bool | Path,
    overwrite: bool,
    quiet: bool,
    lost: Kept | None,
) -> Outcome:
    """`lost`: it goes on because the trainer was lost, not because somebody asked, and this was under way."""
    with ExitStack() as stack:
        console = stack.enter_context(Console(config.train.steps, quiet=quiet))
        checkpoint = folder.checkpoint_to_resume(config, resume, overwrite)
        stack.enter_context(threads(config.train.threads))
        device = choose_device(config.device)
        recipe, config = config, settle_source(config, device)
        if device.type == "cuda" and config.engine.exact:
            use_batch_invariant_products()  # before the warm start multiplies
        source = config.model if checkpoint is None else str(checkpoint.path)
        check_model(source)
        tokenizer = load_tokenizer(source)
        problems, eval_problems = open_training_problems(config, console), load_eval_problems(config)
        longest = config.engine.max_prompt_tokens
        eval_sets = {name: render_prompts(tokenizer, items, longest) for name, items in eval_problems.items()}
        training = TrainingSet(config, tokenizer, problems, eval_sets)
        every_problem = chain(training.examined(console), *eval_problems.values())
        grader = stack.enter_context(Grader(config.reward, every_problem, config.train.steps))
        prompts = training.prompts
        pairs = training.pairs if config.warmup else ()
        if checkpoint is not None and _is_trained_elsewhere(config, checkpoint):
            model = load_shape(checkpoint.path)
        else:
            model = load_model(source, dtype=torch.float32, device=device, seed=config.seed)
        check_length(config, model)
        trainer = Trainer(
            model,
            config.train,
            config.algorithm,
            temperature=config.sampling.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
        )
        fixed_way(config)  # which says what is wrong with it
        check_warm_history(config)
        if learns(config):
            check_draftable(model, config.drafter.kind)
        warm = warm_drafter(config, model.config) if checkpoint is None else None
        if checkpoint is not None:
            check_kind(config, checkpoint.path)
        runtime = stack.enter_context(open_runtime(config)) if config.mode != "colocated" else None
        kept = Kept()
        if checkpoint is not None and config.mode != "colocated":
            latest = latest_checkpoint(folder.path)
            is_latest = latest is not None and latest.resolve() == checkpoint.path.resolve()
            kept = recall(folder.path, checkpoint.path, checkpoint.step, is_latest, config, lost or kept)
        # From here on the folder changes: everything that the user can get wrong has been looked at.
        folder.begin(recipe, checkpoint, overwrite)
        store = stack.enter_context(RunStore(folder.path))
        log = stack.enter_context(MetricLog(folder.path, config.run.loggers, config.model_dump(mode="json")))
        if lost is None:
            (folder.path / CONTROL_FILE).unlink(missing_ok=True)  # what an earlier run was asked for
        stack.enter_context(stop_on_signals(flag))
        reports = stack.enter_context(Reports(folder.path, console.note))
        run = _Run(config, tokenizer, model, trainer, store, log, reports, console, flag)
        stack.callback(run.close)
        run.begin(checkpoint, device)
        if not run.warm_up(pairs, prompts, grader):
            return Outcome("interrupted", folder.path, 0)
        reference = run.keep_reference()
        stop_ids = stop_token_ids(model, tokenizer)
        history = None
        if remembers(config):
            history = stack.enter_context(open_history(config, folder.path, run.step))
        if runtime is not None:
            run.prepare_drafter(checkpoint, warm)
            reason = run.stream(runtime, checkpoint, kept, history, grader, prompts, eval_sets, stop_ids)
            return run.ended(reason)
        if reference is not None:
            trainer.reference = load_model(str(reference), dtype=torch.float32, device=device).eval()
        past = None if history is None else partial(past_texts, history)
        if device.type == "cuda":
            console.note("loading the engine's kernels; on a new machine they are compiled first, for some seconds")
        engine = build_engine(config, model, tokenizer, device, past, run.selector)
        run.prepare_drafter(checkpoint, warm)
        reason = run.loop(engine, history, grader, prompts, eval_sets, stop_ids)
        return run.ended(reason)


def _is_trained_elsewhere(config: Config, checkpoint: Checkpoint) -> bool:
    """Another process loads the weights from the checkpoint; this one does without. Not in the warm start, which is
    gone through here; and a drafter that goes on is compared with them."""
    return config.mode != "colocated" and checkpoint.step > 0 and not learns(config)


def _free_memory() -> None:
    """Returns what is not used any more to the system, and a GPU's to the device."""
    give_back()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _warm_start_of(run_state: dict[str, Any]) -> Progress:
    """Reads a checkpoint's progress. Before 0.2 it was the number of steps alone."""
    return Progress(*run_state["warm_start"]) if "warm_start" in run_state else Progress(run_state["warmup_done"])


class _Run:
    """One run's parts between its set-up and its end."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        trainer: Trainer,
        store: RunStore,
        log: MetricLog,
        reports: Reports,
        console: Console,
        flag: StopFlag,
    ) -> None:
        self.config, self.tokenizer, self.model, self.trainer = config, tokenizer, model, trainer
        self.store, self.log, self.reports, self.console, self.flag = store, log, reports, console, flag
        self.step = 0
        self.position = 0
        self.concluded = False
        self.warm_start = Progress()
        self.has_warmed_up = False
        """Here and now."""
        self.advice = Advice(config)
        self.selector = build_selector(config, choose_device(config.device))
        self.learner: DrafterTrainer | None = None
        self.drafter_saver = DrafterSaver()
        self.drafting: dict[str, object] = {}
        """What the checkpoint knows of ways to draft."""
        self.row: dict[str, float] = {}
        self.under_way: UnderWay = ()

    def begin(self, checkpoint: Checkpoint | None, device: torch.device) -> None:
        """Take over the checkpoint's state, and forget what the last run did after it."""
        if checkpoint is not None:
            state = checkpoint.run_state
            if not _is_trained_elsewhere(self.config, checkpoint):
                self.trainer.load_state_dict(load_trainer_state(checkpoint.path))
            self.step, self.warm_start = checkpoint.step, _warm_start_of(state)
            self.position, self.concluded, self.row = state["position"], state["concluded"], state["row"]
            self.under_way = tuple((rounds, tuple(positions)) for rounds, positions in state.get("under_way", ()))
        recorded = self.step if self.concluded else self.step - 1
        again = "" if checkpoint is None else self._computed_again()
        self.store.forget_after(self.step, recorded)
        self.log.resume_after(recorded)
        self.advice.replay(self.store.metrics_by_name())  # what was told before is not told again
        where = f"resumed from {checkpoint.path}{again}" if checkpoint else "from the start"
        num_parameters = sum(p.numel() for p in self.model.parameters())
        lines = [
            f"{self.config.run.dir}: {self.config.model} ({num_parameters / 1e6:.1f}M parameters) on {device}, {where}"
        ]
        lines += [f"  {name}: {value}" for name, value in self.config.arithmetic().items()]
        self.console.start_run(lines)
        reason = why_inexact(self.model) if self.config.engine.exact else None
        if reason is not None:
            self.console.note(reason)
            name, fields = to_record(NotExact(reason))
            self.store.add_event(self.step, time.time(), name, fields)
        if unread := ", ".join(unread_settings(self.config)):
            self.console.note(f"of no effect, since draft.source is {self.config.draft.source} here: {unread}")
        if (warning := self.config.cut_warning()) is not None and self.config.train.steps > 0:
            self.console.note(warning)
        if device.type == "cpu" and learns(self.config):
            self.console.note(
                "a step costs by the token on a CPU, so a drafter hardly ever pays there, and its updates take time "
                "after each step: draft.source=off is faster, and samples the same tokens"
            )

    def _computed_again(self) -> str:
        """What was recorded after the checkpoint, in words; empty if nothing was."""
        num_rollouts, last_step = self.store.num_rollouts_after(self.step), self.store.last_step()
        if not num_rollouts:
            return ""
        return (
            f"; {num_rollouts:,} rollouts of steps {self.step + 1} to {last_step}, recorded after it, are recorded anew"
        )

    def warm_up(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], prompts: Sequence[Prompt], grader: Grader
    ) -> bool:
        """False if it was interrupted; a checkpoint then holds how far it came."""
        warmup = self.config.warmup
        if warmup is None or self.step > 0 or self.warm_start.is_enough(warmup):
            return True

        def should_stop(progress: Progress) -> bool:
            self.warm_start = progress
            return self.flag.reason is not None

        sampler: RewardSampler | None = None

        def measure(step: int, number: int) -> float:
            nonlocal sampler
            if sampler is None:
                without_drafts = self.config.model_copy(update={"draft": Draft(source="off")})
                engine = build_engine(without_drafts, self.model, self.tokenizer, self.trainer.device)
                sampler = RewardSampler(without_drafts, engine, grader, self.tokenizer)
            return sampler.measure(
                self.model,
                step,
                number,
                prompts,
                stop_token_ids=stop_token_ids(self.model, self.tokenizer),
                console=self.console,
                should_stop=lambda: self.flag.reason is not None,
            )

        started = time.perf_counter()
        try:
            self.warm_start, metrics = warm_up(
                self.trainer,
                warmup,
                pairs,
                seed=self.config.seed,
                progress=self.warm_start,
                measure=measure,
                console=self.console,
                should_stop=should_stop,
            )
        except Interrupted:
            self.console.note("stopping: saving how far the warm start came")
            self.save(0, {"position": 0, "concluded": False, "row": self.row})
            return False
        if sampler is not None:
            sampler = None  # the run's own engine needs the memory of this one
            _free_memory()
        self.has_warmed_up = True
        seconds = time.perf_counter() - started
        self.row |= metrics | {"timing_s/warmup": seconds}
        self.console.note(self._warm_start_line(warmup, seconds))
        return True

    def _warm_start_line(self, warmup: Warmup, seconds: float) -> str:
        done, loss = self.warm_start, self.row.get("warmup/loss", float("nan"))
        line = f"warm start: {done.steps} supervised steps, loss {loss:.3f}, {seconds:.0f}s"
        if warmup.until_reward is None:
            return line
        if done.reward >= warmup.until_reward:
            return f"{line}; rollouts have a mean reward of {done.reward:.2f}"
        return (
            f"{line}; rollouts have a mean reward of {done.reward:.2f}, below warmup.until_reward="
            f"{warmup.until_reward}: give it more warmup.steps, or try another warmup.lr"
        )

    def keep_reference(self) -> Path | None:
        """Of the model that RL starts from, beside the checkpoints; only if the KL penalty needs it."""
        if self.config.algorithm.kl_coef == 0:
            return None
        folder = self.config.run.dir / REFERENCE_FOLDER
        if self.step == 0:
            self.model.save_pretrained(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is missing: algorithm.kl_coef > 0 needs the model that this run started from")
        return folder

    def prepare_drafter(self, checkpoint: Checkpoint | None, warm: SavedDrafter | None) -> None:
        """One that learns goes on from the checkpoint; a new run may take another's weights. So does what is known of
        ways to draft."""
        if learns(self.config):
            lessons = self.config.run.dir / LESSONS_FOLDER
            self.learner = drafter_trainer_for(self.config, self.trainer.model, lessons, self.config.seed)
            if checkpoint is not None:
                begin_with = partial(warm_drafter, self.config, self.model.config)
                restore_drafter(self.learner, checkpoint.path, fingerprint(self.model), begin_with)
            elif warm is not None:
                self.learner.model.load_state_dict(warm.state.weights)
        if checkpoint is not None:
            self.drafting = known_ways(checkpoint.run_state, self.learner)
            self.selector.load_state_dict(self.drafting)

    def ended(self, reason: str) -> Outcome:
        """Show the curves of the run, and say how it ended."""
        self.console.close()
        self.console.picture(partial(draw_run, self.store.metrics_by_name()))
        return Outcome(reason, self.config.run.dir, self.step, tuple(self.advice.verdict()))

    def close(self) -> None:
        self.drafter_saver.close()
        if self.learner is not None:
            self.learner.close()

    def save(self, step: int, run_state: dict[str, Any]) -> Path:
        self.drafter_saver.wait()  # it may be writing into a checkpoint that goes now
        path = save_checkpoint(
            self.config.run.dir,
            step,
            model=self.model,
            tokenizer=self.tokenizer,
            trainer_state=self.trainer.state_dict(),
            run_state=run_state | {"warm_start": astuple(self.warm_start), "drafting": self.selector.state_dict()},
            keep_last=self.config.run.keep_last,
        )
        if self.learner is not None:
            tensors, num_updates = self.learner.state_dict(), self.learner.num_updates
            self.drafter_saver.save(path, DrafterState(step, num_updates, fingerprint(self.model), tensors))
        self.console.note(f"saved {path}")
        return path

    def _first_position(self) -> int:
        """Without steps that are under way: where those begin that were, if nothing after that was trained on."""
        positions = sorted(position for _, step in self.under_way for position in step)
        if positions != list(range(self.position - len(positions), self.position)):
            raise ValueError(
                f"step {self.step} was saved with others under way, of prompts that do not follow each other "
                "(dynamic sampling in mode=async or rhyme): resume in that mode"
            )
        return self.position - len(positions)

    def let_go(self) -> None:
        """Of the model, which another process trains from the checkpoint on."""
        self.drafter_saver.wait()
        self.trainer.let_go()
        self.model.to(torch.device("meta"))  # type: ignore[arg-type]
        _free_memory()

    def publish_drafter(self) -> int | None:
        """The drafter that rollout workers begin with, which this process lets go of: the updates that it took."""
        learner = self.learner
        if learner is None:
            return None
        state = DrafterState(0, learner.num_updates, fingerprint(self.model), learner.state_dict())
        versions.publish_first(self.config.run.dir / VERSIONS_FOLDER, state, "driver")
        self.learner = None
        learner.close()
        return learner.num_updates

    def stream(
        self,
        runtime: Runtime,
        checkpoint: Checkpoint | None,
        kept: Kept,
        history: HistoryStore | None,
        grader: Grader,
        prompts: Sequence[Prompt],
        eval_sets: dict[str, list[Prompt]],
        stop_ids: tuple[int, ...],
    ) -> str:
        """As `loop`, with processes that sample and one that trains."""
        if kept:
            self.console.note(f"{len(kept)} rollouts that were sampled after the checkpoint's last step are used")
        begins = {"position": 0, "concluded": False, "row": self.row}
        path = self.save(self.step, begins) if checkpoint is None or self.has_warmed_up else checkpoint.path
        drafter_updates = self.publish_drafter()
        self.let_go()
        parts = StreamParts(
            config=self.config,
            runtime=runtime,
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            checkpoint=path,
            grader=grader,
            tokenizer=self.tokenizer,
            history=history,
            prompts=prompts,
            eval_sets=eval_sets,
            stop_token_ids=stop_ids,
            store=self.store,
            log=self.log,
            reports=self.reports,
            console=self.console,
            advice=self.advice,
            kept_state={"warm_start": astuple(self.warm_start)},
            kept=kept,
            drafting=self.drafting,
            drafter_updates=drafter_updates,
        )

        def on_trained(step: int) -> None:
            self.step = step

        first = RunBegan(self.step, self.position, self.concluded, self.under_way)
        return stream(parts, first, self.row, lambda: self.flag.reason, on_trained)

    def loop(
        self,
        engine: Engine,
        history: HistoryStore | None,
        grader: Grader,
        prompts: Sequence[Prompt],
        eval_sets: dict[str, list[Prompt]],
        stop_ids: tuple[int, ...],
    ) -> str:
        world = LocalWorld(
            self.config,
            engine=engine,
            selector=self.selector,
            learner=self.learner,
            history=history,
            trainer=self.trainer,
            desk=RolloutDesk(engine, grader, self.tokenizer, self.config.seed),
            prompts=prompts,
            eval_sets=eval_sets,
            stop_token_ids=stop_ids,
            store=self.store,
            log=self.log,
            reports=self.reports,
            console=self.console,
            advice=self.advice,
            save_checkpoint=self.save,
            row=self.row,
            stop_reason=lambda: self.flag.reason,
        )

        def write_events(now_s: float, event: Event, actions: list[Action]) -> None:
            if isinstance(event, StepTrained):
                self.step = event.step
            for item in (event, *actions):
                name, fields = to_record(item)
                self.store.add_event(self.step, now_s, name, fields)

        first = RunBegan(self.step, self._first_position(), self.concluded)
        with still_heap():
            return drive(Scheduler(self.config), world, first, time.time, write_events)
