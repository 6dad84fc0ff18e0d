"""An engine that does what messages say and reports what came of it. A plain class: it knows no process and no pipe.

Messages are obeyed in the order they come, between two steps of the engine, or between two pieces of what it does about
the drafter (`drafter_worker.py`), which comes before sampling: it is told to stop that where sampling has precedence.
Invariants: a rollout that was taken on is reported as ended or given back, once; weights that were asked for are there
before anything later is sampled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from transformers import PreTrainedModel

from slipstream.draft.selector import Selector
from slipstream.draft.shelves import Text
from slipstream.engine.engine import Engine
from slipstream.runtime.drafter_messages import ToMember
from slipstream.runtime.drafter_worker import DrafterWorker
from slipstream.runtime.drafting import draft_choices
from slipstream.runtime.rollout_messages import (
    Beat,
    DraftAs,
    Ended,
    FromRolloutWorker,
    GiveBack,
    GivenBack,
    GoOn,
    Grown,
    HasWeights,
    Leave,
    SampleGroup,
    Spent,
    TakeWeights,
    ToRolloutWorker,
    is_evaluation,
)
from slipstream.schedule.speeds import Paces, sum_paces
from slipstream.types import Request, WeightVersion

TELL_S = 0.5
"""Between two reports of tokens and of time."""


class WeightSource(Protocol):
    """Where weights come from."""

    def catch_up(self, model: PreTrainedModel, number: int) -> WeightVersion:
        """Make the model that of this version."""
        ...


class PastTexts:
    """What an engine's drafter may draft from, by prompt, as long as a rollout of that prompt is here."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, ...], tuple[Text, ...]] = {}
        self._num_here: Counter[tuple[int, ...]] = Counter()

    def of_prompt(self, prompt_ids: tuple[int, ...]) -> tuple[Text, ...]:
        return self._texts.get(prompt_ids, ())

    def take_in(self, request: Request, texts: tuple[Text, ...]) -> None:
        self._num_here[request.prompt_ids] += 1
        self._texts[request.prompt_ids] = texts

    def let_go(self, request: Request) -> None:
        self._num_here[request.prompt_ids] -= 1
        if not self._num_here[request.prompt_ids]:
            del self._num_here[request.prompt_ids], self._texts[request.prompt_ids]


class RolloutWorker:
    def __init__(
        self,
        engine: Engine,
        weights: WeightSource,
        past: PastTexts,
        say: Callable[[FromRolloutWorker], None],
        clock: Callable[[], float] = time.monotonic,
        drafter: DrafterWorker | None = None,
        selector: Selector | None = None,
    ) -> None:
        """`drafter`: None where none learns. `selector`: who chooses how the engine drafts, if somebody does."""
        self._engine, self._weights, self._past, self._say, self._clock = engine, weights, past, say, clock
        self._drafter, self._selector = drafter, selector
        self._told: dict[str, int] = {}
        """By rollout that is here: tokens of it that were reported, with those it came with."""
        self._num_evaluated = 0
        """Of these, of held-out prompts."""
        self._spent = Spent()
        self._paces: Paces = ()
        self._counted_s = self._told_s = clock()
        engine.take_draft_counts()  # of whatever measured it before
        self._facts = self._told_facts = engine.facts()
        self.is_leaving = False

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or self._learns

    @property
    def _learns(self) -> bool:
        return self._drafter is not None and self._drafter.is_busy

    def obey(self, message: ToRolloutWorker) -> None:
        self._count_idle()
        if isinstance(message, SampleGroup | GoOn) and not self._engine.has_work:
            self._tell()  # so that a report is of waiting or of work
        match message:
            case SampleGroup():
                for request in message.requests:
                    self._take_in(request, message.past, 0)
                self._engine.submit(message.requests)
            case GoOn():
                self._take_in(message.partial.request, message.past, len(message.partial.token_ids))
                self._engine.import_sequence(message.partial)
            case GiveBack():
                if message.uid in self._told:
                    partial = self._engine.export_sequence(message.uid)
                    self._let_go(partial.request)
                    self._say(GivenBack(partial))
            case TakeWeights():
                if self._drafter is not None:
                    self._drafter.make_way()
                version = self._engine.change_weights(lambda model: self._weights.catch_up(model, message.number))
                if self._drafter is not None:
                    self._drafter.new_policy(version)
                self._spent += Spent(weights_s=self._lap())
                self._tell()
                self._say(HasWeights(version, self._selector.state_dict() if self._selector is not None else {}))
            case DraftAs():
                if self._selector is not None:  # the run may have been resumed without drafts
                    self._selector.load_state_dict(message.known)
            case Leave():
                self._tell()
                if self._drafter is not None:
                    self._drafter.close()
                self.is_leaving = True
            case _:
                self._obey_about_drafter(message)

    def _obey_about_drafter(self, message: ToMember) -> None:
        assert self._drafter is not None, f"told {message}, without a drafter that learns"
        self._drafter.obey(message)
        self._spent += Spent(drafter_s=self._lap())

    def step(self) -> None:
        """One of the engine, if there is something to sample and nothing to learn; and what is to be told by now."""
        self._count_idle()
        if self._drafter is not None and self._drafter.is_busy:
            self._drafter.advance()
            self._spent += Spent(drafter_s=self._lap())
        elif self._engine.has_work:
            ended = self._engine.step()
            self._book_step()
            for rollout in ended:
                self._let_go(rollout.request)
                if self._drafter is not None and not is_evaluation(rollout.request.group):
                    self._drafter.add_text(rollout)
                self._say(Ended(rollout))
            if not self._engine.has_work:
                self._tell()
        if self._clock() - self._told_s >= TELL_S:
            self._tell()

    def _book_step(self) -> None:
        step_s, before = self._lap(), self._facts
        self._facts = self._engine.facts()
        prefill_s, graph_s = self._facts.prefill_s - before.prefill_s, self._facts.graph_s - before.graph_s
        num_here = max(1, len(self._told))  # none: what a GPU still computes was given back
        trained_share = 1 - self._num_evaluated / num_here
        self._spent += Spent(
            prefill_s=prefill_s * trained_share,
            graph_s=graph_s,
            decode_s=(step_s - prefill_s - graph_s) * trained_share,
            evaluation_s=(step_s - graph_s) * (1 - trained_share),
        )
        self._paces = sum_paces((self._paces, ((1, num_here, step_s - graph_s),)))

    def _tell(self) -> None:
        self._told_s = self._clock()
        grown = self._engine.grown_since(self._told)
        if grown:
            for piece in grown:
                self._told[piece.request.uid] += len(piece.token_ids)
            self._say(Grown(tuple(grown)))
        drafts = self._engine.take_draft_counts() if self._engine.drafter is not None else None
        choices = draft_choices(self._selector) if self._selector is not None else ()
        if drafts is not None and self._selector is not None:
            drafts.saved_s = self._selector.take_saved_s()
        before, self._told_facts = self._told_facts, self._engine.facts()
        num_tokens = self._told_facts.decode_tokens - before.decode_tokens
        self._say(Beat(self._spent, num_tokens, drafts, self._paces, choices))
        self._spent, self._paces = Spent(), ()

    def _take_in(self, request: Request, past: tuple[Text, ...], num_tokens: int) -> None:
        self._past.take_in(request, past)
        self._told[request.uid] = num_tokens
        self._num_evaluated += is_evaluation(request.group)

    def _let_go(self, request: Request) -> None:
        self._num_evaluated -= is_evaluation(request.group)
        del self._told[request.uid]
        self._past.let_go(request)

    def _count_idle(self) -> None:
        if not self.has_work:
            self._spent += Spent(idle_s=self._lap())

    def _lap(self) -> float:
        """Seconds since this was last asked."""
        before, self._counted_s = self._counted_s, self._clock()
        return self._counted_s - before
