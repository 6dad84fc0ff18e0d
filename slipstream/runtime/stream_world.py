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
from slipstream.engine.sequences import PartialRollout
from slipstream.history.store import HistoryStore
from slipstream.observe.advice import Advice
from slipstream.observe.console import Advance, Console
from slipstream.observe.ledger import Ledger
from slipstream.observe.loggers import MetricLog
from slipstream.observe.reports import Reports
from slipstream.observe.store import RunStore
from slipstream.runtime.crew import TrainerCrew, TrainerLost
from slipstream.runtime.drafting import draft_metrics, past_texts, remember
from slipstream.runtime.evaluation import EvaluationRound
from slipstream.runtime.kept import (
    KEPT_FILE,
    Kept,
    KeptRollout,
    keep_partial,
    keep_rollout,
    keep_scored,
    pack,
    settings_of,
)
from slipstream.runtime.pool import Pool, WorkerBroke, WorkerLink
from slipstream.runtime.processes import Doorbell
from slipstream.runtime.rollout_messages import is_evaluation
from slipstream.runtime.rollouts import GradedGroup, OpenGroups, metrics_of, scored_fact, store_groups, train_samples
from slipstream.runtime.sizing import Sizing
from slipstream.runtime.trainer_messages import (
    FeedSamples,
    FinishStep,
    PublishWeights,
    SaveState,
    StateSaved,
    StepFinished,
    TookPart,
    TrainerBroke,
    TrainerReady,
    WeightsPublished,
    Working,
)
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
)
from slipstream.schedule.order import PromptOrder
from slipstream.schedule.rules import MODES, oldest_version
from slipstream.tasks.grading import check_faults
from slipstream.types import Prompt, Request, Rollout, SamplingParams, Scored

WAIT_S = 0.2
"""For somebody to say something."""


class StreamWorld:
    def __init__(
        self,
        config: Config,
        *,
        pool: Pool,
        crew: TrainerCrew,
        ledger: Ledger,
        bell: Doorbell,
        groups: OpenGroups,
        history: HistoryStore | None,
        prompts: Sequence[Prompt],
        eval_sets: Mapping[str, Sequence[Prompt]],
        stop_token_ids: tuple[int, ...],
        store: RunStore,
        log: MetricLog,
        reports: Reports,
        console: Console,
        advice: Advice,
        rows: dict[int, dict[str, float]],
        kept_state: dict[str, Any],
        kept: Kept,
        stop_reason: Callable[[], str | None],
        note: Callable[[Item], None],
    ) -> None:
        """`rows`: metrics that are known already, by step. `kept_state`: goes into every checkpoint as it is. `kept`:
        rollouts of the run that this one goes on from. `note`: into the event log."""
        self._config = config
        self._pool, self._crew, self._groups, self._history = pool, crew, groups, history
        self._ledger, self._bell = ledger, bell
        self._note, self._sizing = note, Sizing(config, pool, note, console.note)
        self._prompts, self._eval_sets = prompts, eval_sets
        self._order = PromptOrder(len(prompts), config.seed)
        self._sampling = SamplingParams(stop_token_ids=stop_token_ids, **config.sampling.model_dump())
        self._store, self._log, self._reports, self._console, self._advice = store, log, reports, console, advice
        self._rows, self._kept_state, self._stop_reason = rows, kept_state, stop_reason
        self._kept = kept
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
        self._shown = 0, 0
        """Of the step in training: tokens that have given their gradient and tokens fed, as its bar has them."""
        self._told_stop = False

    def perform(self, action: Action) -> list[Event]:
        match action:
            case Generate():
                return self._generate(action)
            case Feed():
                self._feed(action.step, [action.position])
            case Train():
                self._train(action)
            case PushWeights():
                self._pushed = action.step, time.perf_counter()
                self._crew.tell(PublishWeights(action.step))
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
        self._sizing.look()
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

    def close(self) -> None:
        for name in list(self._bars):
            self._close_bar(name)

    # Sampling.

    def _generate(self, action: Generate) -> list[Event]:
        step, now_s = action.step, time.perf_counter()
        self._asked_s.setdefault(step, now_s)
        prompt, num_samples = self._prompts[self._order.at(action.position)], self._config.train.samples_per_prompt
        self._bar(f"step {step} rollout")(0, more_total=num_samples)
        name = f"{step}/{action.position}"
        requests = self._groups.open(name, prompt, num_samples, self._sampling)
        known = self._kept.take_up(requests, oldest_version(step, MODES[self._config.mode].staleness))
        if len(known) == num_samples and all(one.grade is not None for one in known.values()):
            results = [known[request.uid].as_scored(request) for request in requests]
            self._count_ended(step, sum(len(one.token_ids) for one in known.values()), num_samples)
            return self._hear_grades(self._groups.close(name, results))
        ended = {uid for uid, one in known.items() if one.finish_reason is not None}
        others = [request for request in requests if request.uid not in ended]
        self._ask(step, prompt, others, {one.uid: known[one.uid].as_partial(one) for one in others if one.uid in known})
        for request in requests:
            if request.uid in ended:
                self._collect(known[request.uid].as_rollout(request))
        return []

    def _ask(
        self, step: int, prompt: Prompt, requests: Sequence[Request], begun: Mapping[str, PartialRollout] = {}
    ) -> None:
        past = past_texts(self._history, prompt.token_ids) if self._history is not None else ()
        self._pool.ask(step, prompt.key, requests, past, begun)

    def under_way(self) -> list[KeptRollout]:
        """All that is known of rollouts of steps that are not trained, also of those that nobody has asked for yet."""
        found = [
            keep_scored(result) if isinstance(result, Scored) else keep_rollout(result.rollout)
            for groups in self._scored.values()
            for group in groups.values()
            for result in group.results
        ]
        found += [
            keep_rollout(rollout) for rollout in self._groups.collected() if not is_evaluation(rollout.request.group)
        ]
        partials, newest = self._pool.partials()
        return found + [
            keep_partial(partial, newest) for partial in partials if not is_evaluation(partial.request.group)
        ]

    def _collect(self, rollout: Rollout) -> None:
        name = rollout.request.group
        if is_evaluation(name):
            self._bar("evaluation")(1, tokens=len(rollout.token_ids))
        else:
            self._count_ended(int(name.partition("/")[0]), len(rollout.token_ids))
        self._groups.collect(rollout)

    def _count_ended(self, step: int, num_tokens: int, num_rollouts: int = 1) -> None:
        self._sampled_s[step] = time.perf_counter()
        self._bar(f"step {step} rollout")(num_rollouts, tokens=num_tokens)

    def _hear_grades(self, group: GradedGroup) -> list[Event]:
        if is_evaluation(group.name):
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
            requests = self._groups.open(name, prompt, evaluation.samples_per_prompt, evaluation.sampling)
            self._ask(action.step + 1, prompt, requests)

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
            self._crew.tell(FeedSamples(step, tuple(samples)))
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
        self._crew.tell(FinishStep(step, grading_s))
        del self._scored[step]

    def _hear_trainers(self) -> list[Event]:
        try:
            heard = self._crew.hear()
        except TrainerLost as loss:
            loss.under_way = self._kept.left(-1) + self.under_way()
            raise
        return [fact for trainer, message in heard for fact in self._take_in(trainer, message)]

    def _take_in(self, trainer: WorkerLink, message: Any) -> list[Event]:
        match message:
            case TrainerReady():
                self._ledger.rest_on(trainer.name, "rollout wait", time.monotonic())
                return []
            case Working():
                self._ledger.book(trainer.name, "training", message.busy_s)
                if trainer is self._crew.first and message.step is not None:
                    self._show_training(message)
                return []
            case StepFinished():
                self._ledger.book(trainer.name, "training", message.untold_s)
                self._ledger.book(trainer.name, "reward wait", message.reward_wait_s)
                if trainer is not self._crew.first:
                    return []  # what it computed is in what the first says
                self._close_bar(f"step {message.step} training")
                self._fed, self._num_trained_on, self._shown = set(), 0, (0, 0)
                self._row(message.step).update(message.metrics)
                self._row(message.step)["timing_s/update_actor"] = message.busy_s
                return [StepTrained(message.step)]
            case WeightsPublished():
                self._pool.give_weights(message.version)
                self._ledger.book(trainer.name, "weight sync", message.seconds)
                return []
            case StateSaved():
                if message.step:  # the driver has told of what the trainer began with
                    self._console.note(f"saved {message.path}")
                if message.problem:
                    self._console.note(message.problem)
                self._row(message.step + 1)["timing_s/save"] = message.seconds
                self._ledger.book(trainer.name, "checkpoint", message.seconds)
                self._reports.refresh()
                return [Saved(message.step)]
            case TookPart():
                self._ledger.book(trainer.name, message.account, message.seconds)
                return []
            case TrainerBroke():
                raise WorkerBroke(f"training: {message.kind}: {message.reason}\n{trainer.how_it_ended()}")
            case _:
                raise AssertionError(f"the trainer said {message!r}")

    def _show_training(self, working: Working) -> None:
        """Beside the bar of what is sampled: tokens that have given their gradient, of all that were fed."""
        bar, shown = self._bar(f"step {working.step} training"), self._shown
        bar(working.done_tokens - shown[0], more_total=working.fed_tokens - shown[1], groups=len(self._fed))
        self._shown = working.done_tokens, working.fed_tokens

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
            "workers/tokens": float(self._pool.take_sampled()),
            "workers/drafter_s": spent.drafter_s,
            "workers/count": float(self._pool.num_workers),
            "workers/lost": float(self._pool.num_lost),
        }
        row |= self._pool.take_forecasts()
        row |= self._pool.take_drafter_metrics()
        paces = self._pool.take_paces()
        if paces:
            self._note(WorkersPaced(action.step, paces))
        self._store.add_metrics(action.step, row)
        self._store.add_ledger(self._ledger.close(action.step, time.monotonic()))
        self._log.write(action.step, row)
        if action.step > 0:
            self._console.step_line(action.step, row)
            self._sizing.after_step(row, spent.prefill_s + spent.decode_s, paces)
        for hint in self._advice.after_step(action.step, row):
            for line in hint.lines(self._store):
                self._console.note(line)

    def _save(self, action: Save) -> None:
        # The store first: after a power cut a checkpoint must not know more than the store does.
        self._store.sync()
        state = {
            "position": action.position,
            "concluded": action.concluded,
            "row": dict(self._rows.get(action.step, {})),
            "under_way": action.under_way,
            "drafting": dict(self._pool.drafting),
        }
        rollouts = self._kept.left(action.step) + self.under_way()
        files = {KEPT_FILE: pack(settings_of(self._config), rollouts)} if rollouts else {}
        for trainer in self._crew.links:
            trainer.send(SaveState(action.step, self._kept_state | state, files if trainer is self._crew.first else {}))

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
