"""The real world where sampling and training have processes of their own: carries out the actions of
`schedule.pipeline.Pipeline` with a pool of rollout workers, a process that trains, and a grader.

Owns no decision, and computes nothing that takes long: it waits for whoever has something to say. Of each step that is
under way there is a row of metrics, which `Record` writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from slipstream.config import Config
from slipstream.history.store import HistoryStore
from slipstream.observe.console import Advance, Console
from slipstream.observe.ledger import Ledger
from slipstream.observe.loggers import MetricLog
from slipstream.observe.report import write_report
from slipstream.observe.store import RunStore
from slipstream.observe.timeline import write_trace
from slipstream.runtime.control import workers_asked_for
from slipstream.runtime.drafting import draft_metrics, past_texts, remember
from slipstream.runtime.evaluation import EvaluationRound
from slipstream.runtime.pool import Pool, WorkerBroke, WorkerLink
from slipstream.runtime.processes import Doorbell
from slipstream.runtime.rollout_messages import EVALUATION
from slipstream.runtime.rollouts import GradedGroup, OpenGroups, metrics_of, scored_fact, store_groups, train_samples
from slipstream.runtime.trainer_messages import (
    FeedSamples,
    FinishStep,
    PublishWeights,
    SaveState,
    StateSaved,
    StepFinished,
    TookPart,
    ToTrainer,
    TrainerBroke,
    TrainerReady,
    WeightsPublished,
)
from slipstream.schedule.allocation import Allocator, StepSeen, times_as_long
from slipstream.schedule.events import (
    Action,
    Evaluate,
    Evaluated,
    Event,
    Feed,
    Finish,
    Generate,
    Item,
    PushWeights,
    Record,
    Save,
    Saved,
    StepTrained,
    StopAsked,
    Train,
    WeightsLive,
    WorkersPaced,
    WorkersWanted,
)
from slipstream.schedule.order import PromptOrder
from slipstream.schedule.rules import MODES
from slipstream.schedule.speeds import Paces, curve_of_paces
from slipstream.tasks.grading import check_faults
from slipstream.types import Prompt, Rollout, SamplingParams

WAIT_S = 0.2
"""For somebody to say something."""
LOOK_S = 1.0
"""Between two looks at what the run was asked to change."""


class TrainerLost(Exception):
    """The process that trains was killed: the run goes on from its last checkpoint."""


class StreamWorld:
    def __init__(
        self,
        config: Config,
        *,
        pool: Pool,
        trainers: Sequence[WorkerLink],
        ledger: Ledger,
        bell: Doorbell,
        groups: OpenGroups,
        history: HistoryStore | None,
        prompts: Sequence[Prompt],
        eval_sets: Mapping[str, Sequence[Prompt]],
        stop_token_ids: tuple[int, ...],
        store: RunStore,
        log: MetricLog,
        console: Console,
        rows: dict[int, dict[str, float]],
        kept_state: dict[str, Any],
        stop_reason: Callable[[], str | None],
        note: Callable[[Item], None],
    ) -> None:
        """`trainers`: by rank. `rows`: metrics that are known already, by step. `kept_state`: goes into every
        checkpoint as it is. `note`: into the event log."""
        self._config = config
        self._pool, self._trainers, self._groups, self._history = pool, trainers, groups, history
        self._ledger, self._bell, self._began_s = ledger, bell, time.monotonic()
        self._wish: int | None = None
        """How many workers were asked for last."""
        scale = config.rollout.scale
        self._allocator = Allocator(scale.min, scale.max) if scale is not None else None
        self._note = note
        self._prompts, self._eval_sets = prompts, eval_sets
        self._order = PromptOrder(len(prompts), config.seed)
        self._sampling = SamplingParams(stop_token_ids=stop_token_ids, **config.sampling.model_dump())
        self._store, self._log, self._console = store, log, console
        self._rows, self._kept_state, self._stop_reason = rows, kept_state, stop_reason
        self._scored: dict[int, dict[int, GradedGroup]] = {}
        """By step that is not trained, by position."""
        self._fed: set[int] = set()
        """Positions of the step in training."""
        self._evaluation: EvaluationRound | None = None
        self._pushed: tuple[int, float] | None = None
        """The version that is on its way to the workers, and since when."""
        self._asked_s: dict[int, float] = {}
        self._sampled_s: dict[int, float] = {}
        """By step: when its last rollout so far ended."""
        self._graded_s: dict[int, float] = {}
        """And when its last grades so far were there."""
        self._recorded_s: float | None = None
        self._evaluate_s = 0.0
        self._bars: dict[str, tuple[ExitStack, Advance]] = {}
        self._num_trained_on = 0
        self._told_stop = False
        self._looked_s = 0.0

    def perform(self, action: Action) -> list[Event]:
        match action:
            case Generate():
                self._generate(action)
            case Feed():
                self._feed(action.step, [action.position])
            case Train():
                self._train(action)
            case PushWeights():
                self._pushed = action.step, time.perf_counter()
                self._tell_trainers(PublishWeights(action.step))
            case Evaluate():
                self._evaluate(action)
            case Record():
                self._record(action)
            case Save():
                self._save(action)
            case Finish():
                raise AssertionError("the driver ends the run")
        return []

    def advance(self) -> list[Event]:
        reason = self._stop_reason()
        if reason is not None and not self._told_stop:
            self._told_stop = True
            self._console.note("stopping: saving a checkpoint first (Ctrl-C again: stop at once)")
            return [StopAsked(reason)]
        self._look_at_wishes()
        self._bell.wait(WAIT_S)
        facts = self._hear_trainers()
        for rollout in self._pool.advance():
            self._collect(rollout)
        facts += [fact for group in self._groups.graded(0.0) for fact in self._hear_grades(group)]
        self._pool.note_waits()  # who waited for these grades waits for something else
        if self._pushed is not None and self._pool.live == self._pushed[0]:
            step, since_s = self._pushed
            self._pushed = None
            self._row(step)["timing_s/update_weights"] = time.perf_counter() - since_s
            facts.append(WeightsLive(step))
        return facts

    def _look_at_wishes(self) -> None:
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        wanted = workers_asked_for(self._config.run.dir)
        if wanted is not None and wanted != self._wish:
            self._wish = wanted
            self._allocator = None  # who asks knows better, from then on
            self._resize(wanted, "as was asked for")

    def _resize(self, num_workers: int, reason: str) -> None:
        self._console.note(f"rollout workers: {num_workers} instead of {self._pool.num_workers}, {reason}")
        self._note(WorkersWanted(num_workers, reason))
        self._pool.resize(num_workers)

    def close(self) -> None:
        for name in list(self._bars):
            self._close_bar(name)

    # Sampling.

    def _generate(self, action: Generate) -> None:
        self._asked_s.setdefault(action.step, time.perf_counter())
        prompt, num_samples = self._prompts[self._order.at(action.position)], self._config.train.samples_per_prompt
        self._bar(f"step {action.step} rollout")(0, more_total=num_samples)
        self._ask(action.step, f"{action.step}/{action.position}", prompt, num_samples, self._sampling)

    def _ask(self, step: int, name: str, prompt: Prompt, num_samples: int, sampling: SamplingParams) -> None:
        past = past_texts(self._history, prompt.token_ids) if self._history is not None else ()
        self._pool.ask(step, prompt.key, self._groups.open(name, prompt, num_samples, sampling), past)

    def _collect(self, rollout: Rollout) -> None:
        name = rollout.request.group
        if name.startswith(EVALUATION):
            self._bar("evaluation")(1, tokens=len(rollout.token_ids))
        else:
            step = int(name.partition("/")[0])
            self._sampled_s[step] = time.perf_counter()
            self._bar(f"step {step} rollout")(1, tokens=len(rollout.token_ids))
        self._groups.collect(rollout)

    def _hear_grades(self, group: GradedGroup) -> list[Event]:
        if group.name.startswith(EVALUATION):
            if self._evaluation is not None:
                self._evaluation.take(group)
                return self._evaluated() if self._evaluation.is_done else []
            return []
        fact = scored_fact(group)
        self._graded_s[fact.step] = time.perf_counter()
        self._scored.setdefault(fact.step, {})[fact.position] = group
        return [fact]

    # Evaluation, beside whatever is being sampled.

    def _evaluate(self, action: Evaluate) -> None:
        stop_ids = self._sampling.stop_token_ids
        evaluation = EvaluationRound(self._config, self._eval_sets, step=action.step, stop_token_ids=stop_ids)
        self._evaluation, self._evaluate_s = evaluation, time.perf_counter()
        self._bar("evaluation")(0, more_total=evaluation.num_samples)
        for name, prompt in evaluation.prompts.items():
            # To the fleet it is work for the step that follows: nothing older is in its way.
            self._ask(action.step + 1, name, prompt, evaluation.samples_per_prompt, evaluation.sampling)

    def _evaluated(self) -> list[Event]:
        evaluation, self._evaluation = self._evaluation, None
        assert evaluation is not None
        self._close_bar("evaluation")
        row = self._row(evaluation.step)
        row["timing_s/eval"] = time.perf_counter() - self._evaluate_s
        for one in evaluation.results():
            store_groups(self._store, evaluation.step, "eval", one.name, one.groups)
            row |= one.metrics
        self._console.eval_line(evaluation.step, row)
        return [Evaluated(evaluation.step)]

    # Training.

    def _feed(self, step: int, positions: Sequence[int]) -> None:
        samples = train_samples([self._scored[step][position] for position in positions], self._config.algorithm)
        self._fed.update(positions)
        if samples:
            self._tell_trainers(FeedSamples(step, tuple(samples)))
            self._num_trained_on += len(samples)

    def _train(self, action: Train) -> None:
        step = action.step
        self._close_bar(f"step {step} rollout")
        by_position = self._scored[step]
        groups = [by_position[position] for position in sorted(by_position)]
        results = [result for group in groups for result in group.results]
        check_faults(results, self._config.reward.max_fault_share)
        store_groups(self._store, step, "train", "train", groups)
        row = self._row(step)
        if self._history is not None:
            started = time.perf_counter()
            remember(self._history, step, groups)
            row["timing_s/history"] = time.perf_counter() - started
        row |= metrics_of(groups, self._config.train.samples_per_prompt)
        row |= draft_metrics(self._pool.take_drafts())
        sampled_s = self._sampled_s.pop(step)
        row["timing_s/gen"] = sampled_s - self._asked_s.pop(step)
        grading_s = row["timing_s/reward"] = self._graded_s.pop(step) - sampled_s
        behind = [step - 1 - result.rollout.first_version for result in results]
        row["rollout/staleness"] = sum(behind) / len(behind)
        row["train/groups"] = float(len(action.positions))
        left = [position for position in action.positions if position not in self._fed]
        self._feed(step, left)
        if not self._num_trained_on:
            self._console.note(f"step {step}: no group with a reward signal; the weights stay as they are")
        self._tell_trainers(FinishStep(step, grading_s))
        del self._scored[step]
        self._fed, self._num_trained_on = set(), 0

    def _tell_trainers(self, message: ToTrainer) -> None:
        for trainer in self._trainers:
            trainer.send(message)

    def _hear_trainers(self) -> list[Event]:
        gone = [trainer for trainer in self._trainers if trainer.is_gone]
        heard = {trainer.name: trainer.receive() for trainer in self._trainers}
        for trainer in gone:  # without a word; if there are others, they may complain of it
            if not any(isinstance(message, TrainerBroke) for message in heard[trainer.name]):
                raise TrainerLost(trainer.how_it_ended())
        return [
            fact for trainer in self._trainers for one in heard[trainer.name] for fact in self._take_in(trainer, one)
        ]

    def _take_in(self, trainer: WorkerLink, message: Any) -> list[Event]:
        match message:
            case TrainerReady():
                self._ledger.book(trainer.name, "start", time.monotonic() - self._began_s)
                return []
            case StepFinished():
                self._ledger.book(trainer.name, "training", message.busy_s)
                self._ledger.book(trainer.name, "reward wait", message.reward_wait_s)
                if trainer is not self._trainers[0]:
                    return []  # what it computed is in what the first says
                self._row(message.step).update(message.metrics)
                self._row(message.step)["timing_s/update_actor"] = message.busy_s
                return [StepTrained(message.step)]
            case WeightsPublished():
                self._pool.give_weights(message.version)
                self._ledger.book(trainer.name, "weight sync", message.seconds)
                return []
            case StateSaved():
                self._console.note(f"saved {message.path}")
                self._row(message.step + 1)["timing_s/save"] = message.seconds
                self._ledger.book(trainer.name, "checkpoint", message.seconds)
                write_report(self._config.run.dir)
                write_trace(self._config.run.dir)
                return [Saved(message.step)]
            case TookPart():
                self._ledger.book(trainer.name, message.account, message.seconds)
                return []
            case TrainerBroke():
                raise WorkerBroke(f"training: {message.kind}: {message.reason}\n{trainer.how_it_ended()}")
            case _:
                raise AssertionError(f"the trainer said {message!r}")

    # Records.

    def _record(self, action: Record) -> None:
        row, now_s = self._rows.pop(action.step, {}), time.perf_counter()
        if self._recorded_s is not None and action.step > 0:
            step_s = row["timing_s/step"] = now_s - self._recorded_s
            tokens = row.get("rollout/tokens", 0.0)
            row["perf/throughput"] = tokens / max(1e-9, step_s - row.get("timing_s/eval", 0.0))
            if row.get("timing_s/gen", 0.0) > 0:
                row["rollout/tokens_per_s"] = tokens / row["timing_s/gen"]
        self._recorded_s = now_s
        spent = self._pool.take_spent()
        row |= {
            "workers/prefill_s": spent.prefill_s,
            "workers/decode_s": spent.decode_s,
            "workers/evaluation_s": spent.evaluation_s,
            "workers/weights_s": spent.weights_s,
            "workers/idle_s": spent.idle_s,
            "workers/count": float(self._pool.num_workers),
            "workers/lost": float(self._pool.num_lost),
        }
        row |= self._pool.take_forecasts()
        paces = self._pool.take_paces()
        if paces:
            self._note(WorkersPaced(action.step, paces))
        self._store.add_metrics(action.step, row)
        self._store.add_ledger(self._ledger.close(action.step, time.monotonic()))
        self._log.write(action.step, row)
        if action.step > 0:
            self._console.step_line(action.step, row)
            self._allocate(row, spent.prefill_s + spent.decode_s, paces)

    def _allocate(self, row: Mapping[str, float], busy_s: float, paces: Paces) -> None:
        """After a step: a worker more or one fewer, if the run may choose."""
        if self._allocator is None or "timing_s/step" not in row or not paces or not self._pool.num_joined:
            return
        num_workers = self._pool.num_joined
        seen = StepSeen(
            step_s=row["timing_s/step"] - row.get("timing_s/eval", 0.0),
            num_tokens=row["rollout/tokens"],
            busy_s=busy_s,
            train_s=row.get("timing_s/update_actor", 0.0),
            num_workers=num_workers,
            num_wanted=self._pool.num_workers,
        )
        curve, batch = curve_of_paces(paces), sum(one[1] for one in paces) / sum(one[0] for one in paces)

        ahead = 1 + MODES[self._config.mode].staleness
        sizes = {"slots": self._config.engine.max_sequences, "num_rollouts": ahead * self._config.samples_per_step}
        wish = self._allocator.observe(seen, lambda other: times_as_long(curve, batch, num_workers, other, **sizes))
        if wish is not None:
            self._resize(wish.num_workers, wish.reason)

    def _save(self, action: Save) -> None:
        # The store first: after a power cut a checkpoint must not know more than the store does.
        self._store.sync()
        state = {
            "position": action.position,
            "concluded": action.concluded,
            "row": dict(self._rows.get(action.step, {})),
            "under_way": action.under_way,
        }
        self._tell_trainers(SaveState(action.step, self._kept_state | state))

    def _row(self, step: int) -> dict[str, float]:
        return self._rows.setdefault(step, {})

    def _bar(self, name: str) -> Advance:
        if name not in self._bars:
            stack = ExitStack()
            self._bars[name] = stack, stack.enter_context(self._console.phase(name, 0))
        return self._bars[name][1]

    def _close_bar(self, name: str) -> None:
        if name in self._bars:
            self._bars.pop(name)[0].close()
