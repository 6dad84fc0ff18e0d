"""A drafter outside a run: judged by what the engine would do, taught from a recorded run, exported, taken over."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_cli import call, settings
from test_draft_history import MAX_LENGTH, NUM_SLOTS, drafter_with, groups, tiny
from test_draft_learned import guessing, of_each_kind, sharp, target
from test_runtime_drafts import WORDS
from tiny_models import build_family
from transformers import LlamaConfig

from slipstream.config import build_config, load_config
from slipstream.draft import online
from slipstream.draft.eagle import DraftModel, Features, build_draft, kind_of
from slipstream.draft.export import FORMATS, exported_config
from slipstream.draft.judge import num_steps, right_drafts
from slipstream.draft.learned import ModelGuesser
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.saved import DRAFTER_FILE, WEIGHTS, DrafterState, save_drafter_state
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import Always, Feeding, Strategy
from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.loading import load_tokenizer
from slipstream.models.packed import document_hidden
from slipstream.runtime import drafting
from slipstream.runtime.drafters import find_drafter, save_drafter
from slipstream.runtime.drafting import check_kind, draft_with
from slipstream.runtime.local import run_training
from slipstream.runtime.offline import recorded_samples
from slipstream.train.checkpoint import save_checkpoint

DEPTH = 2
"""Of which the narrowest width of the engine is."""


@of_each_kind
@pytest.mark.parametrize("family", ["tiny", "gemma3_text"])
def test_the_judge_counts_the_steps_that_the_engine_takes(kind: str, family: str) -> None:
    """Also where a family scales its embeddings, which a drafter sees as they are."""
    if family == "tiny":
        draft, model = sharp(kind, 3), target()
        guesser, engine = guessing(kind, Strategy(4.0, 0, DEPTH))
    else:
        model, served = (build_family(family, ATTENTION_NAME).requires_grad_(False) for _ in range(2))
        draft, drafter = build_draft(model.config, kind, 3), drafter_with((), library_tokens=0)
        drafter.guesser = guesser = ModelGuesser(num_slots=NUM_SLOTS, kind=kind)
        policy = Always(Strategy(4.0, 0, DEPTH))
        engine = Engine(served, max_sequences=NUM_SLOTS, max_length=MAX_LENGTH, drafter=drafter, policy=policy)
    guesser.write(draft.state_dict().items())
    for group in groups(3, 4, temperature=0.8):
        engine.submit(group)
    rollouts = []
    while engine.has_work:
        rollouts += engine.step()
    features, steps, steps_without = Features(model, kind), 0, 0
    for rollout in rollouts:
        request = rollout.request
        ids = torch.tensor([*request.prompt_ids, *rollout.token_ids])
        document_hidden(model, ids, [len(ids)])
        right = right_drafts(draft, model, ids, features.take(), seed=request.seed, depth=DEPTH, temperature=0.8)
        steps += num_steps(right, len(request.prompt_ids))
        steps_without += num_steps(right[:0], len(request.prompt_ids))
    counts = engine.take_draft_counts()
    assert steps == counts.num_rows < 0.9 * counts.num_tokens and steps_without == counts.num_tokens


def test_steps_by_hand() -> None:
    right = torch.zeros(2, 8, dtype=torch.bool)
    assert num_steps(right, 3) == 5
    right[0, 2], right[1, 3] = True, True  # two right drafts, of tokens 4 and 5, after the first one
    assert num_steps(right, 3) == 3
    right[0, 2] = False  # the second is of no use without the first
    assert num_steps(right, 3) == 5
    right[0, 4:], right[1, 4:] = True, True  # past the end nothing is gained
    assert num_steps(right, 3) == 4 and num_steps(right, 7) == 1


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    return (
        settings(
            folder,
            tasks={"train": [{"source": "sorting", "size": 24, "seed": 1, "params": WORDS}]},
            warmup={"steps": 20, "sequences_per_step": 12, "lr": 3e-3},
            sampling={"max_new_tokens": 36},
            train={"steps": 2, "prompts_per_step": 8, "samples_per_prompt": 2},
        )
        | changes
    )


def untaught(model: DraftModel) -> DrafterState:
    return DrafterState(0, 0, "", {f"{WEIGHTS}{name}": one.detach() for name, one in model.named_parameters()})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a drafter; a folder of the other kind, for that run's policy; and a run without."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {"draft": {"source": "drafter"}, "drafter": {"updates": 1}}
    run_training(build_config(recipe(folder, run={"dir": str(folder / "eagle3")}, **changes)), quiet=True)
    save_drafter(
        folder / "eagle1", untaught(sharp("eagle1", 3)), {"target": str(folder / "eagle3" / "checkpoints" / "step_2")}
    )
    save_checkpoint(
        folder / "without",
        2,
        model=tiny(),
        tokenizer=load_tokenizer("tiny"),
        trainer_state={},
        run_state={},
        keep_last=1,
    )
    shutil.copy(folder / "eagle3" / "config.yaml", folder / "without")
    return folder


@pytest.fixture(autouse=True)
def short_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "LESSON_TOKENS", 160)


@of_each_kind
def test_what_is_exported_is_what_there_is(
    kind: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_format = next(name for name, one in FORMATS.items() if one == kind)
    out, checkpoint = tmp_path / "out", runs / "eagle3" / "checkpoints" / "step_2"
    out.mkdir()
    assert call("export-drafter", str(runs / kind), str(out), "--format", own_format, "--dtype", "float32") == 0
    said = capsys.readouterr().out
    assert f"vllm serve {checkpoint}" in said and f'"method": "{own_format}", "model": "{out}"' in said
    weights, policy = load_file(out / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    ours = find_drafter(runs / kind).state.weights
    if kind == "eagle3":
        assert torch.equal(weights.pop("lm_head.weight"), policy["model.embed_tokens.weight"])
    assert weights.keys() == ours.keys() and all(torch.equal(weights[name], ours[name]) for name in ours)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    written = [*out.iterdir(), checkpoint / "model.safetensors", checkpoint / DRAFTER_FILE]
    assert {path.stat().st_mode for path in written} == {(checkpoint / "config.json").stat().st_mode}, (
        "anybody may read"
    )
    learned = {"eagle3": "2 updates", "eagle1": "that has learned nothing yet"}
    assert f"a drafter for {checkpoint}, {learned[kind]}\n" in said
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == config["draft_vocab_size"] == tiny().config.vocab_size
    assert config.get("eagle_aux_hidden_state_layer_ids") == ([1, 2, 3] if kind == "eagle3" else None)
    assert call("export-drafter", str(runs / kind), str(tmp_path / "half")) == 0
    halves = load_file(tmp_path / "half" / "model.safetensors")
    assert {one.dtype for one in halves.values()} == {torch.bfloat16}


def test_layers_are_told_only_where_other_engines_would_take_others() -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    deep = exported_config("eagle3", LlamaConfig(num_hidden_layers=7, **shape), torch.bfloat16)
    assert "eagle_aux_hidden_state_layer_ids" not in deep and deep["torch_dtype"] == "bfloat16"
    assert deep["head_dim"] == 8 and deep["rope_theta"] == 10_000.0 and "logit_scale" not in deep
    with pytest.raises(ValueError, match="too few"):
        exported_config("eagle3", LlamaConfig(num_hidden_layers=1, **shape), torch.bfloat16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["without", "out"], "train with draft.source=drafter or both"),
        (["eagle3", "eagle1"], "exists and is not an empty folder"),
        (["eagle3", "out", "--format", "gguf"], "unknown format 'gguf': one of eagle3, eagle"),
        (["eagle1", "out", "--format", "eagle3"], "give --format eagle"),
        (["eagle3", "out", "--dtype", "int3"], "one of bfloat16"),
        (["eagle3", "out", "--target", "gone"], "there is no such folder; give one with --target"),
        (["eagle3", "out", "--target", "eagle3/checkpoints"], "eagle3/checkpoints is no model folder"),
        (["nowhere", "out"], "neither a run folder"),
    ],
)
def test_what_cannot_be_exported_says_why(
    words: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    assert call("export-drafter", *words) == 2
    assert message in capsys.readouterr().err and not (runs / "out").exists()


def test_a_recorded_run_teaches_a_drafter_that_the_next_run_begins_with(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "taught"
    words = ["train-drafter", str(runs / "eagle3"), "--out", str(folder), "drafter.lr=3e-3"]
    assert call(*words, "--updates", "24") == 0
    said, about = capsys.readouterr().out, json.loads((folder / "drafter.json").read_text())
    assert about["updates"] == 24 and about["tokens_a_step"] > about["tokens_a_step_before"] + 0.1
    assert f"{about['tokens_a_step']:.2f} after 24 updates" in said
    assert call(*words, "--updates", "24") == 2 and "in it: --resume" in capsys.readouterr().err
    assert (
        call(*words, "--updates", "16", "--resume") == 0 and "24 updates were made already" in capsys.readouterr().out
    )
    assert call("export-drafter", str(folder), str(tmp_path / "exported")) == 0
    assert "other weights" not in capsys.readouterr().out
    other = ["--target", str(runs / "without" / "checkpoints" / "step_2")]
    assert call("export-drafter", str(folder), str(tmp_path / "for_another"), *other) == 0
    assert "it was taught by other weights" in capsys.readouterr().out
    moved = json.loads((folder / "drafter.json").read_text()) | {"target": other[1]}
    shutil.copytree(folder, tmp_path / "moved")
    (tmp_path / "moved" / "drafter.json").write_text(json.dumps(moved))
    assert call("export-drafter", str(tmp_path / "moved"), str(tmp_path / "for_moved")) == 0
    assert "it was taught by other weights" in capsys.readouterr().out, "another policy lies where its own did"
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "drafter.json").write_text("{}")
    assert call("export-drafter", str(tmp_path / "damaged"), str(tmp_path / "no")) == 2
    assert "drafter.json is damaged" in capsys.readouterr().err

    changes = {"draft": {"source": "drafter"}, "drafter": {"updates": 0, "warm_from": str(folder)}, "warmup": None}
    new = recipe(tmp_path, train={"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2}, **changes)
    run_training(build_config(new), quiet=True)
    begun_with, has = find_drafter(folder).state.weights, find_drafter(tmp_path / "run").state.weights
    assert all(torch.equal(begun_with[name], has[name]) for name in begun_with)


def test_stopped_it_has_what_it_learned_and_goes_on(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, train = tmp_path / "taught", DrafterTrainer.train

    def stopping(self: DrafterTrainer, num_updates: int) -> Any:
        signal.raise_signal(signal.SIGINT)
        return train(self, num_updates)

    words = ["train-drafter", str(runs / "eagle3"), "--out", str(folder), "--updates", "12"]
    with monkeypatch.context() as patched:
        patched.setattr(DrafterTrainer, "train", stopping)
        assert call(*words) == 130
    assert "stopped after 4 updates" in capsys.readouterr().out
    first = find_drafter(folder)
    assert first.state.num_updates == 4
    before = json.loads((folder / "drafter.json").read_text())["tokens_a_step_before"]
    assert call(*words, "--resume", "drafter.kind=eagle1") == 2
    assert "is of the kind eagle3: leave out drafter.kind=eagle1" in capsys.readouterr().err
    assert call(*words, "--resume") == 0 and find_drafter(folder).state.num_updates == 12
    assert json.loads((folder / "drafter.json").read_text())["tokens_a_step_before"] == before, "of one untaught"
    assert (
        call(*words[:3], str(tmp_path / "no"), "--resume") == 2
        and "no drafter to go on with" in capsys.readouterr().err
    )


@pytest.mark.filterwarnings("ignore:the drafter has nothing to learn from")
def test_too_little_memory_is_said_and_not_waited_for(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train-drafter", str(runs / "eagle3"), "--out", str(tmp_path / "no"), "drafter.memory_gb=1e-9"]
    assert call(*words) == 2 and "fits into drafter.memory_gb: raise it" in capsys.readouterr().err


def test_prompts_are_held_out_whole(runs: Path) -> None:
    config = load_config(runs / "eagle3" / "config.yaml")
    rest, held_out = recorded_samples(runs / "eagle3", config, "tiny")
    prompts, judged = ({one.ids[: one.num_prompt] for one in part} for part in (rest, held_out))
    assert prompts and judged and not prompts & judged
    assert len(rest) + len(held_out) == 2 * 8 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": {"source": "history"}}, "of no use without a drafter"),
        ({"drafter": {"kind": "eagle1"}}, "write drafter.kind=eagle3"),
        ({"drafter": {"warm_from": "without"}}, "has no drafter"),
        ({"drafter": {"warm_from": "wide"}}, "is for a model of another shape.*leave out drafter.warm_from"),
    ],
)
def test_a_drafter_that_does_not_fit_is_noticed_before_anything_is_written(
    changes: dict[str, Any], message: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    wide = LlamaConfig(hidden_size=256, num_attention_heads=4, num_hidden_layers=3, vocab_size=100)
    save_drafter(runs / "wide", untaught(build_draft(wide, "eagle3")), {"target": "elsewhere"})
    drafter = {"warm_from": "eagle3"} | changes.get("drafter", {})
    tree = recipe(tmp_path, draft=changes.get("draft", {"source": "both"}), drafter=drafter)
    with pytest.raises(ValueError, match=message):
        run_training(build_config(yaml.safe_load(yaml.safe_dump(tree))), quiet=True)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_resumed_run_keeps_its_kind(runs: Path, tmp_path: Path) -> None:
    """Or is told so before anything is written, and its drafter stays."""
    folder = runs / "eagle3"

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}

    before = files()
    config = load_config(folder / "config.yaml", ["drafter.kind=eagle1", "train.steps=3"])
    with pytest.raises(ValueError, match=r"of the kind eagle3: write drafter\.kind=eagle3, or begin a new run"):
        run_training(config, resume=True, quiet=True)
    assert files() == before
    lost = shutil.copytree(folder, tmp_path / "lost") / "checkpoints"
    (lost / "step_2" / DRAFTER_FILE).write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"step_0 is of the kind eagle3"):
        check_kind(config, lost / "step_2")
    save_drafter_state(lost / "step_0", DrafterState(0, 0, "", {}))
    check_kind(config, lost / "step_2")  # a warning tells later, and the run goes on


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_new_drafter_in_the_place_of_a_lost_one_is_not_asked_before_it_has_learned(
    is_lost: bool, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    folder, told = shutil.copytree(runs / "eagle3", tmp_path / "run"), list[tuple[bool, Feeding]]()
    for file in folder.rglob(DRAFTER_FILE):
        if is_lost:
            file.unlink()

    def noting(engine: Engine, weights: Iterable[tuple[str, torch.Tensor]], *, is_taught: bool = True) -> None:
        draft_with(engine, weights, is_taught=is_taught)
        assert engine.policy is not None
        told.append((is_taught, engine.policy.feed(8)))

    monkeypatch.setattr(drafting, "draft_with", noting)
    config = load_config(folder / "config.yaml", [f"run.dir={folder}", "train.steps=3"])
    run_training(config, resume=True, quiet=True)
    assert told[0] == ((False, Feeding.NOTHING) if is_lost else (True, Feeding.KEYS))
    assert any("a new drafter" in str(one.message) for one in recwarn) == is_lost


def test_weights_of_another_kind_are_refused(runs: Path) -> None:
    state = find_drafter(runs / "eagle1").state
    assert kind_of(state.weights) == "eagle1"
    learner = DrafterTrainer(target(), lr=1e-3, temperature=1.0, memory_bytes=0, kind="eagle3")
    with pytest.raises(ValueError, match=r"write drafter\.kind=eagle1"):
        learner.load_state_dict(state.tensors, 0)


@pytest.mark.parametrize("override", ["drafter.updates=3", "drafter.warm_from=x", "drafter.disk_gb=1", "model=tiny"])
def test_what_would_do_nothing_is_refused(override: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train-drafter", str(runs / "eagle3"), override) == 2
    assert "is of no use here" in capsys.readouterr().err
