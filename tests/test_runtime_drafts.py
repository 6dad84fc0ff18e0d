"""A run with drafts is the run without them: the same tokens, rewards and weights, in fewer steps of the engine."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reports import report_from
from safetensors.torch import load_file
from test_draft_learned import guessing, sharp
from test_draft_together import publish
from tiny_models import group

from slipstream.config import build_config
from slipstream.draft import online
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.saved import WEIGHTS, DrafterState, load_drafter_state
from slipstream.draft.selector import ASKING, MIXED_STRATEGIES, Choice, Fixed, Selector
from slipstream.draft.shelves import HISTORY, OWN_TEXT, SIBLING
from slipstream.draft.throttle import Throttle
from slipstream.engine.engine import PAGE_TOKENS
from slipstream.engine.strategy import OFF, Always, DraftCounts, Feeding, StepResult, Strategy
from slipstream.history.format import HistoryStoreError
from slipstream.history.store import HistoryStore
from slipstream.models.loading import load_model, load_tokenizer
from slipstream.observe import advice
from slipstream.observe.console import Console
from slipstream.observe.store import RunStore
from slipstream.runtime import tail as tail_module
from slipstream.runtime.coats import drafter_worker
from slipstream.runtime.drafter_messages import TakeDrafter
from slipstream.runtime.drafting import (
    build_selector,
    draft_metrics,
    draft_with,
    known_ways,
    settle_source,
    unread_settings,
)
from slipstream.runtime.engines import engine_around, kv_token_bytes
from slipstream.runtime.folder import VERSIONS_FOLDER
from slipstream.runtime.local import run_training
from slipstream.types import MODEL_ORIGIN, ORIGIN_NAMES

PROMPTS, PER_STEP, SAMPLES, EPOCHS = 9, 3, 4, 3
WORDS = {"wording": "terse", "min_length": 2, "max_length": 3, "max_value": 9}


@pytest.fixture(autouse=True)
def short_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "LESSON_TOKENS", 256)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "run": {"dir": str(folder)},
        "tasks": {"train": [{"source": "sorting", "size": PROMPTS, "seed": 1, "params": WORDS}]},
        "reward": {
            "functions": [{"function": f"{Path(__file__).parent / 'data' / 'reward_functions.py'}:shorter_is_better"}]
        },
        "warmup": {"steps": 30, "sequences_per_step": 9, "lr": 1e-3},
        "sampling": {"max_new_tokens": 40},
        "engine": {"max_sequences": 8, "max_prompt_tokens": 32},
        "train": {
            "steps": EPOCHS * PROMPTS // PER_STEP,
            "prompts_per_step": PER_STEP,
            "samples_per_prompt": SAMPLES,
            "lr": 1e-4,
        },
    } | changes


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(folder: Path) -> list[dict[str, float]]:
    """What a run's metrics say but for clocks and drafts."""
    clocks = ("timing_s/", "perf/", "rollout/tokens_per_s", "rollout/spec_", "drafter/")
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in rows_of(folder)]


def rollouts(folder: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "run.db") as connection:
        return connection.execute("SELECT uid, token_ids, logprobs, reward FROM rollouts ORDER BY uid").fetchall()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{EPOCHS * PROMPTS // PER_STEP}" / "model.safetensors")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "off"
    run_training(build_config(settings(folder)), quiet=True)
    return folder


@pytest.fixture
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as fit, whatever the clock says."""
    monkeypatch.setattr(Selector, "choose", lambda self, batch, is_matching: Strategy(8.0, 1))


@pytest.mark.usefixtures("always_drafting")
def test_three_epochs_with_drafts_are_three_epochs_without(without: Path, tmp_path: Path) -> None:
    folder = tmp_path / "on"
    run_training(build_config(settings(folder, draft={"source": "history"})), quiet=True)
    assert rollouts(folder) == rollouts(without)
    assert told(folder) == told(without)
    ours, theirs = weights(folder), weights(without)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    lengths = [row["rollout/spec_accept_length"] for row in rows_of(folder) if row["step"] > 0]
    assert min(lengths) >= 1.0 and max(lengths[6:]) > 1.3, "the third epoch draws from two before it"
    assert not (without / "history.db").exists()


def test_three_epochs_with_a_drafter_that_learns_are_three_epochs_without(
    without: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped half-way and resumed, too: the drafter goes on from its checkpoint."""
    monkeypatch.setattr(Selector, "choose", lambda self, batch, is_matching: Strategy(4.0, 0, 4))
    folder = tmp_path / "on"
    recipe = settings(folder, draft={"source": "drafter"}, drafter={"updates": 3, "lr": 4e-3})
    half = recipe | {"train": recipe["train"] | {"steps": 5}}
    run_training(build_config(half), quiet=True)
    run_training(build_config(recipe), resume=True, quiet=True)
    assert rollouts(folder) == rollouts(without) and told(folder) == told(without)
    ours, theirs = weights(folder), weights(without)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = [row for row in rows_of(folder) if row["step"] > 0]
    trained = [row["drafter/updates"] for row in rows if "drafter/updates" in row]
    assert trained == [3.0 * place for place in range(1, len(trained) + 1)] and len(trained) > 6
    assert rows[-1]["drafter/loss"] < 0.8 * rows[0]["drafter/loss"]
    first, last = (sum(row["rollout/spec_share_drafter"] for row in part) for part in (rows[:2], rows[-2:]))
    assert last > first and not (folder / "history.db").exists()


def test_a_run_that_trains_in_the_tail_samples_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU such an update holds up the engine, so that it is not done there but for this test; and texts lie on the
    disk."""
    monkeypatch.setattr(Selector, "choose", lambda self, batch, is_matching: Strategy(4.0, 0, 4))
    monkeypatch.setattr(DrafterTrainer, "trains_aside", True)
    monkeypatch.setattr(tail_module, "MOST_SLOWDOWN", 1e6)
    kinds, step_took = set[Any](), Throttle.step_took

    def note_kind(self: Throttle, seconds: float, *, beside_update: bool, kind: Any) -> None:
        kinds.add(kind)
        step_took(self, seconds, beside_update=beside_update, kind=kind)

    monkeypatch.setattr(Throttle, "step_took", note_kind)
    short = {"warmup": None, "train": settings(tmp_path)["train"] | {"steps": 2}}
    run_training(build_config(settings(tmp_path / "off", **short)), quiet=True)
    drafter = {"updates": 2, "memory_gb": 1e-9}
    run_training(
        build_config(settings(tmp_path / "on", draft={"source": "drafter"}, drafter=drafter, **short)), quiet=True
    )
    assert rollouts(tmp_path / "on") == rollouts(tmp_path / "off") and told(tmp_path / "on") == told(tmp_path / "off")
    rows = [row for row in rows_of(tmp_path / "on") if row["step"] > 0]
    assert [row["drafter/updates_in_tail"] for row in rows] == [0.0, 2.0]
    assert [row["drafter/updates"] for row in rows] == [2.0, 4.0], "what was not done in the tail is done after it"
    assert [row["drafter/version"] for row in rows] == [0.0, 4.0]
    assert [row["drafter/behind"] for row in rows] == [0.0, 0.0]
    assert {4, 8} <= {kind[0] for kind in kinds if kind is not None}, "told apart by how many sequences there are"
    with RunStore(tmp_path / "on", read_only=True) as store:
        assert [event.step for event in store.events("TrainRound")] == [1]
        assert len(store.events("Lend")) == len(store.events("Recall")) >= 1 and len(store.events("Publish")) == 1
    told_of = "4 updates, 2 of them beside the last sequences of rollouts, in 1 session(s)"
    html = (tmp_path / "on" / "report.html").read_text()
    assert told_of in html and not (tmp_path / "on" / "lessons").exists()
    share = rows[-1]["rollout/spec_share_drafter"]
    assert f"In the last step {share:.1%} of all tokens were its drafts" in html and "Right in its lessons" in html
    checkpoint = tmp_path / "on" / "checkpoints" / "step_2"
    assert (load_drafter_state(checkpoint).step, load_drafter_state(checkpoint).num_updates) == (2, 4)


def test_the_selector_of_a_run_changes_no_number_and_its_choices_are_told(
    without: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "2 drafts give 1.50 times the tokens of off"
    choices = [Choice(8, Strategy(2.0), reason)]
    take = Selector.take_choices  # its own depend on the clock
    monkeypatch.setattr(Selector, "take_choices", lambda self: take(self) + ([choices.pop()] if choices else []))
    soon = advice.Conditions(drafter_steps=2, drafter_share=0.0, drafter_tokens=1.0)
    monkeypatch.setattr(advice, "CONDITIONS", soon)
    notes: list[str] = []
    monkeypatch.setattr(Console, "note", lambda _, text: notes.append(text))
    folder = tmp_path / "on"
    recipe = settings(folder, draft={"source": "both", "widths": "aimd"}, drafter={"updates": 1})
    run_training(build_config(recipe | {"train": recipe["train"] | {"steps": 4}}), quiet=True)
    assert len(told(folder)) == 5 and set(rollouts(folder)) < set(rollouts(without))
    assert told(folder)[:4] == told(without)[:4], "but for the evaluation at its end"
    assert (folder / "history.db").exists() and rows_of(folder)[-1]["drafter/updates"] > 2
    assert ["in the last 2 steps teaching the drafter took" in note for note in notes].count(True) == 1
    state = json.loads((folder / "checkpoints" / "step_4" / "run_state.json").read_text())
    assert any(len(bucket["ways"]) > 1 for bucket in state["drafting"].values()), "what it measured is in checkpoints"
    with RunStore(folder, read_only=True) as store:
        events, first_turn = store.events("DraftChosen"), store.events("DrafterAsked")[0]
    payload = {"batch": 8, "strategy": "2 drafts, 2+", "reason": reason, "is_matching": False}
    assert [event.payload for event in events].count(payload) == 1
    assert first_turn.payload == {"is_asked": True, "reason": "it has been taught"} and first_turn.step == 1
    html = (folder / "report.html").read_text()
    assert "What pays, by how many sequences run" in html and "Whether it is asked has changed" in html


@pytest.mark.parametrize(
    ("source", "way"),
    [("history", "4 drafts, 1+"), ("both", "4 drafts, 8+ or model 4"), ("drafter", "4 drafts, model 4")],
)
def test_a_run_that_keeps_to_one_way_of_drafting_is_the_run_without(
    source: str, way: str, without: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "on"
    recipe = settings(folder, draft={"source": source, "way": way}, drafter={"updates": 1, "lr": 4e-3})
    run_training(build_config(recipe | {"train": recipe["train"] | {"steps": 3}}), quiet=True)
    assert set(rollouts(folder)) < set(rollouts(without)) and told(folder)[:3] == told(without)[:3]
    drafted = [row["rollout/spec_drafted"] for row in rows_of(folder) if row["step"] > 0]
    assert (drafted[0] == 0) == (source != "history"), "a drafter is asked once it has learned"
    assert min(drafted[1:]) > 50, "whatever it costs"
    with RunStore(folder, read_only=True) as store:
        assert store.events("DraftChosen") == [] == store.events("DrafterAsked")


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"source": "history", "way": "4 drafts"}, "write one of '0.5 drafts, 2+', '1 drafts, 2+'"),
        ({"source": "drafter", "way": "4 drafts, 1+"}, "with draft.source=drafter; write one of '1 drafts, model 1'"),
    ],
)
def test_a_way_that_does_not_exist_is_answered_with_those_that_do(
    draft: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"draft\.way: there is no") as caught:
        run_training(build_config(settings(tmp_path / "run", draft=draft)), quiet=True)
    assert words in str(caught.value) and not (tmp_path / "run" / "config.yaml").exists()


def test_one_way_is_kept_with_as_many_sequences_as_it_is_made_for(tmp_path: Path) -> None:
    tree = next(way for way in MIXED_STRATEGIES if way.branches > 1)
    selector = Fixed(tree, has_model=False)
    assert selector.best(4) == OFF and selector.feed(4) == Feeding.NOTHING
    selector.note_new_model()
    assert (selector.choose(8), selector.choose(9)) == (tree, OFF) and selector.feed(9) == Feeding.KEYS
    for _ in range(300):
        assert selector.choose(8) == tree
        selector.observe(StepResult(8, tree, 1.0, 5.0, False, 0.0))
    assert selector.take_choices() == [] == selector.take_turns()


@pytest.mark.slow
@pytest.mark.usefixtures("always_drafting")
def test_another_runs_history_is_there_from_the_first_step(without: Path, tmp_path: Path) -> None:
    """From a run without drafts: its run.db has the rollouts too."""
    history = {"warm_from": str(without), "keep_per_prompt": 4}
    recipe = settings(tmp_path / "warm", draft={"source": "history"}, history=history)
    run_training(build_config(recipe | {"train": recipe["train"] | {"steps": 3}}), quiet=True)
    assert set(rollouts(tmp_path / "warm")) < set(rollouts(without))
    first = next(row for row in rows_of(tmp_path / "warm") if row["step"] == 1)
    assert first["rollout/spec_share_history"] > 0
    with HistoryStore(tmp_path / "warm" / "history.db") as store:
        assert store.num_prompts == PROMPTS and store.num_rollouts <= 4 * PROMPTS


@pytest.mark.parametrize(
    ("warm_from", "source", "words"),
    [
        ("nowhere", "history", "holds neither history.db nor run.db"),
        ("mine", "history", "is this run's own folder"),
        ("nowhere", "off", "of no use without drafts"),
    ],
)
def test_a_wrong_history_is_noticed_before_anything_is_written(
    warm_from: str, source: str, words: str, tmp_path: Path
) -> None:
    changes = {"draft": {"source": source}, "history": {"warm_from": str(tmp_path / warm_from)}}
    with pytest.raises(ValueError, match=words):
        run_training(build_config(settings(tmp_path / "mine", **changes)), quiet=True)
    assert not (tmp_path / "mine" / "config.yaml").exists()


@pytest.mark.slow
def test_a_broken_history_costs_drafts_and_not_the_run(without: Path, tmp_path: Path) -> None:
    config = build_config(settings(tmp_path / "on", draft={"source": "history"}))
    with pytest.MonkeyPatch.context() as patched, pytest.warns(UserWarning, match="not in the history"):

        def fails(*_: Any) -> None:
            raise HistoryStoreError("history.db: the disk is full")

        patched.setattr(HistoryStore, "add", fails)
        run_training(config, quiet=True)
    assert rollouts(tmp_path / "on") == rollouts(without)


def test_ways_that_max_drafts_makes_alike_are_one_way(tmp_path: Path) -> None:
    config = build_config(settings(tmp_path, draft={"source": "both", "max_drafts": 3}))
    selector = build_selector(config, torch.device("cpu"))
    assert [way.drafts_each for way in selector.strategies] == [0.0, 1.0, 2.0, 4.0, 2.0]
    wide = build_selector(build_config(settings(tmp_path, draft={"source": "both"})), torch.device("cpu"))
    assert wide.strategies == MIXED_STRATEGIES


def test_the_metrics_of_drafts_by_hand() -> None:
    counts = DraftCounts()
    counts.add(report_from([[1, 1, 0], [2, 3], [], [0]], [3, 2, 0, 0]))
    counts.merge(DraftCounts(saved_s=1.5))
    metrics = draft_metrics(counts)
    assert metrics["rollout/spec_saved_s"] == 1.5
    assert metrics["rollout/spec_drafted"] == 5 and metrics["rollout/spec_accepted"] == 4
    assert metrics["rollout/spec_accept_rate"] == 0.8 and metrics["rollout/spec_wasted"] == 1
    assert metrics["rollout/spec_accept_length"] == 2.0
    assert metrics["rollout/spec_accept_at_1"] == 1.0 and metrics["rollout/spec_accept_at_2"] == 1.0
    assert metrics["rollout/spec_share_sibling"] == pytest.approx(2 / 6)
    assert draft_metrics(DraftCounts()) == {}
    assert set(ORIGIN_NAMES) == {0, SIBLING, HISTORY, OWN_TEXT, MODEL_ORIGIN}


def test_without_a_word_in_the_recipe_a_gpu_drafts_from_history_and_a_cpu_does_not(tmp_path: Path) -> None:
    config = build_config(settings(tmp_path))
    assert config.draft.source == "auto"
    assert settle_source(config, torch.device("cuda")).draft.source == "history"
    assert settle_source(config, torch.device("cpu")).draft.source == "off"
    asked = build_config(settings(tmp_path, draft={"source": "both"}))
    assert settle_source(asked, torch.device("cpu")).draft.source == "both"


class Counting(Always):
    num_models = 0

    def note_new_model(self) -> None:
        self.num_models += 1


def test_an_engine_with_a_new_drafter_drafts_with_it_and_its_policy_knows() -> None:
    guesser, engine = guessing("eagle3", OFF)
    engine.policy = policy = Counting(OFF)
    weights = sharp("eagle3", 3).state_dict()
    draft_with(engine, weights.items())
    assert policy.num_models == 1
    assert all(torch.equal(value, weights[name]) for name, value in guesser.model.state_dict().items())


def test_rollout_workers_ask_a_drafter_only_once_it_has_learned(tmp_path: Path) -> None:
    config = build_config(settings(tmp_path, draft={"source": "drafter"}, mode="sync"))
    guesser, engine = guessing("eagle3", OFF)
    engine.policy = selector = build_selector(config, torch.device("cpu"))
    versions_folder = config.run.dir / VERSIONS_FOLDER

    def publish_after(num_updates: int) -> None:
        tensors = {f"{WEIGHTS}{name}": one for name, one in sharp("eagle3", num_updates).state_dict().items()}
        publish(versions_folder, DrafterState(0, num_updates, "", tensors), "run")

    publish_after(num_updates=0)
    worker = drafter_worker(config, engine, "rollout-0", lambda message: None)
    assert worker.version == 0 and selector.feed(8) == Feeding.NOTHING
    publish_after(num_updates=5)
    worker.obey(TakeDrafter(1))
    assert worker.version == 1 and selector.feed(8) == Feeding.KEYS
    assert all(
        torch.equal(one, guesser.model.state_dict()[name]) for name, one in sharp("eagle3", 5).named_parameters()
    )
    worker.close()


def test_a_checkpoint_says_of_its_own_drafter_alone_whether_it_is_asked() -> None:
    known = Selector(MIXED_STRATEGIES).state_dict() | {"8 plain": {}}
    own, new = SimpleNamespace(num_updates=3), SimpleNamespace(num_updates=0)
    for learner, is_said in ((own, True), (new, False), (None, False)):
        expected = known if is_said else {"8 plain": {}}
        assert known_ways({"drafting": known}, learner) == expected  # type: ignore[arg-type]
    assert known_ways({}, None) == {} and ASKING in known


@pytest.mark.parametrize("source", ["off", "history", "drafter", "both"])
def test_an_engine_keeps_as_many_keys_as_are_reckoned_with(source: str, tmp_path: Path) -> None:
    config = build_config(settings(tmp_path, draft={"source": source}))
    device = torch.device("cpu")
    model = load_model("tiny", dtype=torch.float32, device=device).requires_grad_(False)
    wanted = kv_token_bytes(config, model)
    engine = engine_around(model, config, load_tokenizer("tiny"), device, selector=build_selector(config, device))
    if engine.drafter is not None and engine.drafter.has_model:
        draft_with(engine, sharp("eagle3", 3).state_dict().items())
    engine.submit(group("0", (5, 6, 7), 2))
    engine.step()
    num_tokens = (engine.facts().num_pages + 1) * PAGE_TOKENS
    assert engine.facts().kv_bytes == wanted * num_tokens


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({"draft": {"source": "both"}, "drafter": {"lr": 1e-3}, "history": {"keep_per_prompt": 4}}, []),
        ({"draft": {"source": "history"}, "drafter": {"lr": 1e-3, "kind": "eagle1"}}, ["drafter.kind", "drafter.lr"]),
        ({"draft": {"source": "drafter", "library_tokens": 4096}}, ["draft.library_tokens"]),
        (
            {"draft": {"source": "off", "max_drafts": 4}, "history": {"disk_gb": 1}},
            ["draft.max_drafts", "history.disk_gb"],
        ),
        ({"drafter": {"lr": 3e-4}}, []),
    ],
)
def test_settings_of_drafts_that_nobody_reads_are_told(
    changes: dict[str, Any], unread: list[str], tmp_path: Path
) -> None:
    config = settle_source(build_config(settings(tmp_path, **changes)), torch.device("cuda"))
    assert unread_settings(config) == unread
