"""The real world on one machine: carries out the scheduler's actions with one engine, one trainer and one grader.

Owns no decision. Training, evaluation and saving happen inside `perform`; generation goes on in `advance`.
Everything of a step is collected in one row of metrics, which `Record` writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from slipstream.config import Config
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.selector import Selector
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import DraftCounts
from slipstream.history.store import HistoryStore
from slipstream.models.weights import named_weights
from slipstream.observe.advice import Advice
from slipstream.observe.console import Advance, Console
from slipstream.observe.ledger import Ledger, split_decoding
from slipstream.observe.loggers import MetricLog
from slipstream.observe.reports import Reports
from slipstream.observe.store import RunStore
from slipstream.runtime.drafting import draft_choices, draft_metrics, remember
from slipstream.runtime.evaluation import Interrupted, evaluate_sets
from slipstream.runtime.learning import Learning
from slipstream.runtime.rollouts import GradedGroup, RolloutDesk, metrics_of, scored_fact, store_groups, train_samples
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
    to_record,
)
from slipstream.schedule.order import PromptOrder
from slipstream.tasks.grading import check_faults
from slipstream.train.trainer import Trainer
from slipstream.types import Prompt, Rollout, SamplingParams, TrainSample

MATCHED_ROLLOUTS = 4
"""With engine.exact off: rollouts a step that are sampled again alone, to say how many tokens depend on the batch."""
DEVICE = "local"
ACCOUNTS = {
    "update_weights": "weight sync",
    "sleep": "weight sync",
    "update_actor": "training",
    "update_drafter": "drafter training",
    "eval": "evaluation",
    "token_match": "evaluation",
    "save": "checkpoint",
}
"""By phase: the ledger's account of its seconds."""
SaveCheckpoint = Callable[[int, dict[str, Any]], object]


class LocalWorld:
    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        selector: Selector,
        learner: DrafterTrainer | None,
        history: HistoryStore | None,
        trainer: Trainer,
        desk: RolloutDesk,
        prompts: Sequence[Prompt],
        eval_sets: Mapping[str, Sequence[Prompt]],
        stop_token_ids: tuple[int, ...],
        store: RunStore,
        log: MetricLog,
        reports: Reports,
        console: Console,
        advice: Advice,
        save_checkpoint: SaveCheckpoint,
        row: dict[str, float],
        stop_reason: Callable[[], str | None],
    ) -> None:
        """`row`: metrics of the current step that are known already (warm start, or a step that a stop cut short).
        `stop_reason`: not None once somebody wants the run to end with a checkpoint."""
        self._config = config
        self._engine, self._trainer, self._desk = engine, trainer, desk
        self._selector, self._history = selector, history
        self._learner = None if learner is None else Learning(learner, trainer, engine, config, self._note)
        self._ledger = Ledger()
        self._ledger.arrive(DEVICE, time.perf_counter())
        self._draft_s = 0.0
        self._facts = engine.facts()
        """As training rollouts began."""
        self._prompts, self._eval_sets = prompts, eval_sets
        self._order = PromptOrder(len(prompts), config.seed)
        self._sampling = SamplingParams(stop_token_ids=stop_token_ids, **config.sampling.model_dump())
        self._store, self._log, self._reports, self._console, self._advice = store, log, reports, console, advice
        self._save_checkpoint = save_checkpoint
        self._row = row
        self._groups: dict[int, GradedGroup] = {}
        self._step_began_s: float | None = None
        self._rollout_bar: tuple[ExitStack, Advance] | None = None
        self._stop_reason = stop_reason
        self._step = 0
        """The last that was trained, which is what events are filed under."""

    def perform(self, action: Action) -> list[Event]:
        if self._learner is not None:
            self._learner.make_way(for_sampling=isinstance(action, Generate))
        match action:
            case Generate():
                return self._generate(action)
            case Train():
                return self._train(action)
            case Feed():
                raise AssertionError("groups are fed where training has a process of its own")
            case PushWeights():
                with self._timed("update_weights"):
                    self._engine.apply_weights(named_weights(self._trainer.model), action.step)
                    if self._learner is not None:
                        self._learner.ensure_published()
                return [WeightsLive(action.step)]
            case Evaluate():
                return self._evaluate(action)
            case Record():
                return self._record(action)
            case Save():
                return self._save(action)
            case Finish():
                raise AssertionError("the driver ends the run")

    def advance(self) -> list[Event]:
        reason = self._stop_reason()
        if reason is not None:
            self._console.note("stopping: saving a checkpoint first (Ctrl-C again: stop at once)")
            return [StopAsked(reason)]
        facts: list[Event] = []
        for group in self._desk.advance(self._on_finished):
            fact = scored_fact(group)
            self._groups[fact.position] = group
            facts.append(fact)
        facts += draft_choices(self._selector)
        if self._learner is not None:
            engine, kind = self._engine.facts(), self._engine.last_kind
            self._learner.tail.after_step(engine.num_running, engine.num_waiting, engine.num_unread, kind)
        return facts

    def _note(self, item: Item) -> None:
        """Into the event log: what the scheduler need not know."""
        name, fields = to_record(item)
        self._store.add_event(self._step, time.time(), name, fields)

    def _generate(self, action: Generate) -> list[Event]:
        self._step = action.step - 1
        if self._step_began_s is None:
            self._step_began_s = time.perf_counter()
        if self._rollout_bar is None:
            stack = ExitStack()
            bar = self._console.phase(f"step {action.step} rollout", 0)
            self._rollout_bar = stack, stack.enter_context(bar)
        prompt = self._prompts[self._order.at(action.position)]
        samples = self._config.train.samples_per_prompt
        self._rollout_bar[1](0, more_total=samples)
        self._desk.ask(f"{action.step}/{action.position}", prompt, samples, self._sampling)
        return []

    def _on_finished(self, rollout: Rollout) -> None:
        if self._rollout_bar is not None:
            self._rollout_bar[1](1, tokens=len(rollout.token_ids))

    def _close_rollout_bar(self) -> None:
        if self._rollout_bar is not None:
            self._rollout_bar[0].close()
            self._rollout_bar = None

    def _train(self, action: Train) -> list[Event]:
        self._close_rollout_bar()
        by_position, self._groups = self._groups, {}
        groups = [by_position[position] for position in sorted(by_position)]
        store_groups(self._store, action.step, "train", "train", groups)
        if self._history is not None:
            with self._timed("history"):
                remember(self._history, action.step, groups)
        drafter, counts = self._engine.drafter, DraftCounts()
        if drafter is not None:
            counts, num_unserved, spent_s = self._engine.take_draft_counts(), drafter.num_unserved, drafter.spent_s
            counts.saved_s = self._selector.take_saved_s()
            self._row |= draft_metrics(counts, num_unserved, spent_s - self._draft_s)
            self._draft_s = spent_s
        if self._learner is not None:
            self._row |= self._learner.end_rollout()
        check_faults([result for group in groups for result in group.results], self._config.reward.max_fault_share)
        self._row |= metrics_of(groups, self._config.train.samples_per_prompt)
        self._row |= self._book_rollout(counts)
        if not self._config.engine.exact:
            asked = [group.results[0].rollout for group in groups[:MATCHED_ROLLOUTS]]
            with self._timed("token_match"):
                self._row["rollout/token_match"] = self._desk.token_match(asked)
        samples = train_samples([by_position[position] for position in action.positions], self._config.algorithm)
        self._row["train/groups"] = float(len(action.positions))
        if self._config.engine.sleep != "off" and (samples or self._learner is not None):
            with self._timed("sleep"):
                self._engine.sleep(weights=self._config.engine.sleep == "all")
        if self._learner is not None:
            self._learner.begin_training()
        if samples:
            self._update(action.step, samples)
        else:
            self._console.note(f"step {action.step}: no group with a reward signal; the weights stay as they are")
            self._trainer.skip_step()
        if self._learner is not None:
            with self._timed("update_drafter"):
                rollouts = (result.rollout for group in groups for result in group.results)
                self._row |= self._learner.end_training(action.step, rollouts)
        return [StepTrained(action.step)]

    def _update(self, step: int, samples: Sequence[TrainSample]) -> None:
        num_tokens = sum(len(sample.response_ids) for sample in samples)
        with self._timed("update_actor"), self._console.phase(f"step {step} training", num_tokens) as advance:
            done = 0

            def on_progress(tokens_done: int, _: int) -> None:
                nonlocal done
                advance(tokens_done - done)
                done = tokens_done

            self._row |= self._trainer.step(samples, on_progress)

    def _book_rollout(self, counts: DraftCounts) -> dict[str, float]:
        """Metrics of the time it took, which goes to its accounts."""
        gen_s, reward_s = self._desk.take_times()
        before, self._facts = self._facts, self._engine.facts()
        prefill_s, graph_s = self._facts.prefill_s - before.prefill_s, self._facts.graph_s - before.graph_s
        num_tokens = self._facts.decode_tokens - before.decode_tokens
        decoding = split_decoding(
            max(0.0, gen_s - prefill_s - graph_s), num_tokens, counts.num_accepted, counts.num_drafted
        )
        for account, seconds in ({"prefill": prefill_s, "graphs": graph_s, "reward wait": reward_s} | decoding).items():
            self._ledger.book(DEVICE, account, seconds)
        metrics = {"timing_s/gen": gen_s, "timing_s/reward": reward_s}
        if self._engine.device.type == "cuda":
            metrics["timing_s/graphs"] = graph_s  # a part of gen
            metrics["engine/graphs"] = float(self._facts.num_graphs)
            metrics["engine/graph_mb"] = self._facts.graph_bytes / 1e6
        return metrics

    def _evaluate(self, action: Evaluate) -> list[Event]:
        try:
            with self._timed("eval"):
                evaluated = evaluate_sets(
                    self._config,
                    self._desk,
                    self._eval_sets,
                    step=action.step,
                    stop_token_ids=self._sampling.stop_token_ids,
                    console=self._console,
                    should_stop=lambda: self._stop_reason() is not None,
                )
        except Interrupted:
            return []  # the next advance() reports the stop
        self._desk.take_times()
        self._facts = self._engine.facts()
        self._engine.take_draft_counts()  # as the times: of training rollouts only
        self._draft_s = self._engine.drafter.spent_s if self._engine.drafter is not None else 0.0
        self._selector.take_saved_s()
        for one in evaluated:
            store_groups(self._store, action.step, "eval", one.name, one.groups)
            self._row |= one.metrics
        self._console.eval_line(action.step, self._row)
        return [Evaluated(action.step)]

    def _record(self, action: Record) -> list[Event]:
        if self._step_began_s is not None:
            step_s = time.perf_counter() - self._step_began_s
            self._row["timing_s/step"] = step_s
            training_s = step_s - self._row.get("timing_s/eval", 0.0)
            self._row["perf/throughput"] = self._row.get("rollout/tokens", 0.0) / training_s
            gen_s = self._row.get("timing_s/gen", 0.0)
            if gen_s > 0:
                self._row["rollout/tokens_per_s"] = self._row["rollout/tokens"] / gen_s
            self._step_began_s = None
        self._store.add_metrics(action.step, self._row)
        self._store.add_ledger(self._ledger.close(action.step, time.perf_counter()))
        self._log.write(action.step, self._row)
        if action.step > 0:
            self._console.step_line(action.step, self._row)
        for hint in self._advice.after_step(action.step, self._row):
            for line in hint.lines(self._store):
                self._console.note(line)
        self._row = {}
        return []

    def _save(self, action: Save) -> list[Event]:
        self._close_rollout_bar()
        # The store first: after a power cut a checkpoint must not know more than the store does.
        self._store.sync()
        row = dict(self._row)
        with self._timed("save"):  # counts in the row of the step that follows
            self._save_checkpoint(action.step, {"position": action.position, "concluded": action.concluded, "row": row})
            self._reports.refresh()
        return [Saved(action.step)]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds of a with-block to a metric, and to the phase's account."""
        row, name, started = self._row, f"timing_s/{phase}", time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            row[name] = row.get(name, 0.0) + seconds
            if phase in ACCOUNTS:
                self._ledger.book(DEVICE, ACCOUNTS[phase], seconds)
