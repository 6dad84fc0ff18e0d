"""Ways of drafting side by side, with a run's own policy, drafter and history, and what the selector makes of them.

    python benchmarks/drafter_arms.py runs/smollm2 --batches 1,8,64 --out drafter_arms.json
    python benchmarks/drafter_arms.py runs/smollm2 --steps steps.json.gz  # for benchmarks/selector_replay.py
    python benchmarks/drafter_arms.py runs/smollm2 --only '8 drafts, 1+' '4 drafts, 8+ or model 4'

The run's prompts are sampled anew, with other seeds, by its last policy: the same tokens in every way, by construction
and checked. First each way alone: tokens/s while the batch is full, all tokens over all seconds, against an engine
without any drafter. Then in turns, round by round, so that a machine does to each what it does to others: no drafter,
the best of these ways ("best": as many as `--fixed` says, and the selector is compared with the one that is fastest in
turns, which favours that one a little), the selector among those that a run has, the selector with a drafter of random
weights ("poisoned") and the selector of an engine that has no such drafter ("history"), whom the poison is measured by.
Selectors have learned before that, on the same texts, for as long as some dozens of steps of a run would teach them,
and until a walk makes no graph. What one costs against another is told by all tokens over all seconds, and by rounds,
which differ; the texts are the same in each, so errors say nothing of others.

    python benchmarks/drafter_arms.py runs/smollm2 --turns 'no drafter' poisoned history --rounds 20

`--source drafter` does without texts, as `draft.source=drafter` does; poison is then measured by no drafter.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from accounts import AccountedAlways, AccountedSelector, Dry, Recorded
from transformers import PreTrainedModel

from slipstream.config import load_config
from slipstream.draft.eagle import build_draft
from slipstream.draft.history import HistoryDrafter
from slipstream.draft.learned import ModelGuesser
from slipstream.draft.selector import MIXED_STRATEGIES, MODEL_STRATEGIES, TREE_ROWS, Selector
from slipstream.draft.shelves import Text, shelf_tokens
from slipstream.draft.votes import texts_of
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import DraftPolicy, Strategy
from slipstream.history.format import FILE_NAME
from slipstream.history.store import HistoryStore
from slipstream.models.loading import load_model, load_tokenizer, width_of
from slipstream.models.precision import resolve_precision
from slipstream.models.rendering import prompt_key, render_prompts, stop_token_ids
from slipstream.rng import derive_seed
from slipstream.runtime.bench_history import FEW_GRAPHS, MOST_WARM_UPS, Walk, median_rates, timed_walk
from slipstream.runtime.benches import describe_machine
from slipstream.runtime.drafters import find_drafter
from slipstream.runtime.drafting import STRATEGIES, draft_with
from slipstream.runtime.engines import choose_device
from slipstream.runtime.heap import still_heap
from slipstream.runtime.prompts import load_training_problems
from slipstream.types import Request, SamplingParams

ALONE = (Strategy(1.0, 0, 1), Strategy(2.0, 0, 2), Strategy(4.0, 0, 4))
"""Of the model, whatever is known: a run that remembers texts has better."""
WAYS = {"both": (*MIXED_STRATEGIES, *ALONE), "drafter": MODEL_STRATEGIES}
"""By source: what is tried alone."""
SAMPLES, MAX_DRAFTS, TIMED_WALKS = 8, 32, 4
LEARNING_STEPS, MOST_LEARNING_WALKS = 5000, 40
"""That a selector has before it is timed: what one has of a size of batch within some dozens of steps of a run, which
it keeps; and no more walks than this."""
FIXED = 2
"""Ways that take turns, since who is best alone may have been lucky."""
TURNS = ("no drafter", "best", "selector", "poisoned", "history")


class Bench:
    def __init__(self, run: Path, source: str, new_tokens: int, waves: int) -> None:
        self.source, self.waves = source, waves
        config = load_config(run / "config.yaml")
        saved = find_drafter(run)
        device = choose_device("auto")
        self.dtype = resolve_precision("auto", device, width_of(str(saved.target)))
        self.model: PreTrainedModel = load_model(str(saved.target), dtype=self.dtype, device=device)
        tokenizer = load_tokenizer(str(saved.target))
        prompts = render_prompts(tokenizer, load_training_problems(config), config.engine.max_prompt_tokens)
        self.prompts = [prompt.token_ids for prompt in prompts]
        self.past: dict[tuple[int, ...], Sequence[Text]] = {}
        if source == "both":
            with HistoryStore(run / FILE_NAME, keep_per_prompt=SAMPLES, disk_bytes=1 << 40) as history:
                self.past = {ids: texts_of(history.of_prompt(prompt_key(ids))) for ids in self.prompts}
            self.prompts = [ids for ids in self.prompts if self.past[ids]]
        self.taught = saved.state.weights
        self.poisoned = build_draft(self.model.config, saved.kind, 7).state_dict()
        self.kind, self.new_tokens, self.temperature = saved.kind, new_tokens, config.sampling.temperature
        self.stops = stop_token_ids(self.model, tokenizer)
        self.longest = max(map(len, self.prompts))

    def engine(self, batch: int, policy: DraftPolicy | None, weights: dict[str, torch.Tensor] | None) -> Engine:
        """`weights`: of a learned drafter, if it has one."""
        drafter = None
        if policy is not None:
            shelf = shelf_tokens(self.longest, 2 * SAMPLES, self.new_tokens)
            guesser = None if weights is None else ModelGuesser(num_slots=batch, kind=self.kind)
            drafter = HistoryDrafter(
                num_slots=batch,
                max_drafts=MAX_DRAFTS,
                library_tokens=shelf * (batch // SAMPLES + 2) if self.source == "both" else 0,
                longest_shelf=shelf,
                device=self.model.device,
                past=lambda ids: self.past.get(ids, ()),
                guesser=guesser,
            )
        engine = Engine(
            self.model, max_sequences=batch, max_length=self.longest + self.new_tokens, drafter=drafter, policy=policy
        )
        if weights is not None:
            draft_with(engine, weights.items())
        return engine

    def walk(self, engine: Engine, batch: int, number: int) -> tuple[Walk, dict[str, tuple[int, ...]]]:
        """The same texts for the same number."""
        num_groups = max(1, self.waves * batch // SAMPLES)
        for group in range(num_groups):
            prompt = self.prompts[(number * num_groups + group) % len(self.prompts)]
            sampling = SamplingParams(
                max_new_tokens=self.new_tokens, temperature=self.temperature, stop_token_ids=self.stops
            )
            name = f"{number}/{group}"
            engine.submit(
                [
                    Request(f"{name}/{one}", name, prompt, derive_seed("arms", number, group, one), sampling)
                    for one in range(SAMPLES)
                ]
            )
        texts: dict[str, tuple[int, ...]] = {}
        step = engine.step

        def keeping() -> Any:
            finished = step()
            texts.update({rollout.request.uid: rollout.token_ids for rollout in finished})
            return finished

        engine.step = keeping  # type: ignore[method-assign]
        walk = timed_walk(engine, batch)
        engine.step = step  # type: ignore[method-assign]
        return walk, texts

    def measure(
        self, batch: int, policy: DraftPolicy | None, weights: dict[str, torch.Tensor] | None
    ) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        engine = self.engine(batch, policy, weights)
        self.prepare(engine, batch)
        if isinstance(policy, Recorded):
            policy.steps.clear()
        return self.timed(engine, batch)

    def prepare(self, engine: Engine, batch: int, selector: Selector | None = None) -> None:
        """Until hardly any graph is made; a selector until it has learned."""
        with still_heap():
            for number in range(MOST_LEARNING_WALKS if selector else 3 * MOST_WARM_UPS):
                num_graphs = engine.facts().num_graphs
                self.walk(engine, batch, number % TIMED_WALKS)
                is_prepared = engine.facts().num_graphs <= num_graphs + (0 if selector else FEW_GRAPHS)
                has_learned = selector is None or engine.facts().num_forwards >= LEARNING_STEPS
                if number and is_prepared and has_learned:
                    break

    def timed(self, engine: Engine, batch: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        engine.take_draft_counts()
        with still_heap():
            done = [self.walk(engine, batch, number) for number in range(TIMED_WALKS)]
        counts = engine.take_draft_counts()
        tokens = counts.num_tokens / counts.num_rows if counts.num_rows else 1.0
        walks = [walk for walk, _ in done]
        # By the sum: a walk of easy texts is short, and counts for what it takes.
        full = sum(walk.full_tokens for walk in walks), sum(walk.full_s for walk in walks)
        result = median_rates(walks) | {"rate": full[0] / full[1], "tokens_a_step": tokens, "full": full}
        return result, {uid: text for _, texts in done for uid, text in texts.items()}


def compare(
    bench: Bench, batch: int, ways: Sequence[Strategy], turns: Sequence[str], num_fixed: int, num_rounds: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """How fast each way was, and its steps; and those that take turns."""
    plain, texts = bench.measure(batch, None, None)
    ways = [way for way in ways if "best" in turns and (way.branches == 1 or batch <= TREE_ROWS)]
    arms: dict[str, dict[str, Any]] = {}
    recorded = [Recorded(way) for way in ways]
    for policy in recorded:
        arm, got = bench.measure(batch, policy, bench.taught)
        gain = arm["rate"] / plain["rate"]
        arms[str(policy.strategy)] = arm | {"gain": gain, "same_tokens": got == texts}
        print(f"batch {batch}, {policy.strategy}: {gain:.2f}, {arm['tokens_a_step']:.2f} tokens a step", flush=True)
    fixed = sorted(ways, key=lambda way: arms[str(way)]["gain"], reverse=True)[:num_fixed]
    steps = [{"way": astuple(policy.strategy), "steps": policy.steps} for policy in recorded]
    in_turns = take_turns(bench, batch, fixed, texts, turns, num_rounds)
    is_same = in_turns.pop("same_tokens") and all(arm["same_tokens"] for arm in arms.values())
    row = {
        "batch": batch,
        "off": plain,
        "arms": arms,
        "best": in_turns.pop("best"),
        "in_turns": in_turns,
        "same_tokens": is_same,
    }
    return row, {"batch": batch, "ways": steps}


def take_turns(
    bench: Bench,
    batch: int,
    fixed: Sequence[Strategy],
    texts: dict[str, tuple[int, ...]],
    turns: Sequence[str],
    num_rounds: int | None,
) -> dict[str, Any]:
    """What must hold, each against another in the same rounds."""
    strategies = STRATEGIES[bench.source]
    accounts: dict[str, AccountedAlways | AccountedSelector] = {
        "selector": AccountedSelector(strategies),
        "poisoned": AccountedSelector(strategies),
        "history": AccountedSelector([way for way in MIXED_STRATEGIES if not way.depth]),
    }
    ways = {str(way): AccountedAlways(way) for way in fixed}
    turns = [*ways, *(name for name in turns if name != "best")]
    num_rounds = num_rounds or max(2, len(turns))
    accounts |= ways
    accounts = {name: accounts[name] for name in turns if name != "no drafter"}
    selectors = {name: one for name, one in accounts.items() if isinstance(one, AccountedSelector)}
    weights = {**dict.fromkeys((*ways, "selector"), bench.taught), "poisoned": bench.poisoned}
    engines = {}
    for name in turns:
        engines[name] = bench.engine(batch, accounts.get(name), weights.get(name))
        bench.prepare(engines[name], batch, selectors.get(name))
    for account in accounts.values():
        account.spent.clear()
    dry = {name: Dry(engine) for name, engine in engines.items()}
    rounds: dict[str, list[Round]] = {name: [] for name in turns}
    is_same = True
    for number in range(num_rounds):
        first = number % len(turns)  # what a machine does to whoever comes first is done to each
        for name in (*turns[first:], *turns[:first]):
            engine = engines[name]
            started, graph_s = time.perf_counter(), engine.facts().graph_s
            result, got = bench.timed(engine, batch)
            making = (engine.facts().graph_s - graph_s) / (time.perf_counter() - started)
            tokens, seconds = result["full"]
            rounds[name].append(Round(tokens, seconds, making, dry[name].take_share()))
            is_same &= got == texts
    best = max(ways, key=lambda name: _all_rate(rounds[name]), default="")
    pairs = {
        "selector_share": ("selector", best),
        "selector_against_off": ("selector", "no drafter"),
        "poison_share": ("poisoned", "history"),
        "poisoned_against_off": ("poisoned", "no drafter"),
        "history_against_off": ("history", "no drafter"),
    }
    shares = {
        what: share_of(rounds[one], rounds[other])
        for what, (one, other) in pairs.items()
        if one in rounds and other in rounds
    }
    print(f"batch {batch}, {num_rounds} rounds in turns, best {best}:")
    for what, share in shares.items():
        in_all = f"{share['all']:.3f} +- {share['all_error']:.3f} in all"
        print(f"  {what}: {in_all}, {_line(share['rounds'])}, without graphs {_line(share['made'])}")
    if bench.model.device.type == "cuda":
        dry_shares = {name: f"{statistics.fmean(one.dry for one in of_one):.1%}" for name, of_one in rounds.items()}
        print(f"  the GPU waited for the host in so many steps: {dry_shares}")
    chosen = {
        name: {kind: str(one.best(batch, kind == "repeated")) for kind in ("new", "repeated")}
        for name, one in selectors.items()
    }
    print(f"  chosen {chosen}; tokens the same: {is_same}", flush=True)
    return {
        "best": best,
        "rounds": {name: [astuple(one) for one in of_one] for name, of_one in rounds.items()},
        "shares": shares,
        "spent": {name: account.spent for name, account in accounts.items()},
        "chosen": chosen,
        "reasons": {name: [choice.reason for choice in one.take_choices()] for name, one in selectors.items()},
        "same_tokens": is_same,
    }


@dataclass(frozen=True)
class Round:
    tokens: float
    """While the batch was full."""
    seconds: float
    making: float
    """Of all its time, the share in which graphs were made."""
    dry: float
    """Of its steps, the share for which the GPU waited for the host."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def share_of(rounds: Sequence[Round], of: Sequence[Round]) -> dict[str, Any]:
    """All tokens over all seconds, against those of another; and by rounds, also as if graphs had been there."""
    made = [[one.rate / (1 - one.making) for one in both] for both in (rounds, of)]
    in_all = _all_rate(rounds) / _all_rate(of)
    return {
        "all": in_all,
        "all_error": _jackknife_error(rounds, of, in_all),
        "rounds": _ratios([one.rate for one in rounds], [one.rate for one in of]),
        "made": _ratios(*made),
    }


def _all_rate(rounds: Sequence[Round]) -> float:
    return sum(one.tokens for one in rounds) / sum(one.seconds for one in rounds)


def _jackknife_error(rounds: Sequence[Round], of: Sequence[Round], in_all: float) -> float:
    """The standard error of a ratio of sums, by what it is without each round."""
    count = len(rounds)
    without = [
        _all_rate([*rounds[:left_out], *rounds[left_out + 1 :]]) / _all_rate([*of[:left_out], *of[left_out + 1 :]])
        for left_out in range(count)
    ]
    return math.sqrt((count - 1) / count * sum((one - in_all) ** 2 for one in without))


def _ratios(rates: Sequence[float], others: Sequence[float]) -> list[float]:
    """The median, the mean and its standard error, and the lowest and highest."""
    ratios = [one / two for one, two in zip(rates, others, strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return [statistics.median(ratios), statistics.fmean(ratios), error, min(ratios), max(ratios)]


def _line(ratios: list[float]) -> str:
    median, mean, error, lowest, highest = ratios
    return f"{median:.3f} (mean {mean:.3f} +- {error:.3f}, {lowest:.3f}-{highest:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--waves", type=int, default=3, help="sequences for each place in the batch, one after another")
    parser.add_argument(
        "--source", choices=list(WAYS), default="both", help="what there is to draft from; by default texts and a model"
    )
    parser.add_argument("--only", nargs="+", metavar="WAY", help="ways to try alone, by their names")
    parser.add_argument("--turns", nargs="+", choices=TURNS, help="who take turns; by default all that the source has")
    parser.add_argument("--fixed", type=int, help=f"how many of the best ways take turns, if not {FIXED}")
    parser.add_argument(
        "--rounds", type=int, help="of turns; by default as many as take them, so that each is once the first"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=Path, help="write the steps of every way here, gzipped")
    arguments = parser.parse_args()
    has = [name for name in TURNS if name != "history" or arguments.source == "both"]
    turns = list(dict.fromkeys(arguments.turns or has))
    if not set(turns) <= set(has):
        parser.error(f"a drafter alone remembers no texts: --turns can have {', '.join(has)}")
    known = {str(way): way for way in WAYS[arguments.source]}
    if unknown := sorted(set(arguments.only or ()) - set(known)):
        parser.error(f"--only {unknown[0]!r}: there are {', '.join(map(repr, known))}")
    if arguments.only and arguments.steps:
        parser.error("a replay needs the steps of all ways: leave out --only, or --steps")
    if (arguments.only or arguments.steps) and "best" not in turns:
        parser.error("ways are tried alone to find the best: add it to --turns, or leave out --only and --steps")
    ways = [way for name, way in known.items() if arguments.only is None or name in arguments.only]
    if all(way.branches > 1 for way in ways) and max(map(int, arguments.batches.split(","))) > TREE_ROWS:
        parser.error(f"trees are for up to {TREE_ROWS} sequences: name another way as well, or smaller batches")
    if arguments.fixed is not None and (arguments.fixed < 1 or "best" not in turns):
        parser.error('--fixed says how many ways take turns as the best: at least 1, and with "best" in --turns')
    if arguments.rounds is not None and arguments.rounds < 2:
        parser.error("one round says nothing about the next: at least 2 --rounds")
    bench = Bench(arguments.run, arguments.source, arguments.new_tokens, arguments.waves)
    record = describe_machine(bench.model.device, bench.dtype)
    record |= {"what": "benchmarks/drafter_arms.py", "source": bench.source, "kind": bench.kind}
    record |= {"prompts": len(bench.prompts), "new_tokens": bench.new_tokens, "waves": bench.waves, "turns": turns}
    record |= {"only": arguments.only, "fixed": arguments.fixed or FIXED, "rows": []}
    steps = []
    for batch in map(int, arguments.batches.split(",")):
        row, of_ways = compare(bench, batch, ways, turns, arguments.fixed or FIXED, arguments.rounds)
        record["rows"].append(row)
        steps.append(of_ways)
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        if arguments.steps:
            arguments.steps.write_bytes(gzip.compress(json.dumps(steps).encode(), mtime=0))


if __name__ == "__main__":
    main()
