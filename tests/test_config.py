"""The settings tree: helpful errors, inheritance, overrides, round trip, and no field without effect."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from slipstream.config import Config, Sampling, build_config, dump_config, field_paths, load_config
from slipstream.recipe import collect_overrides, shipped_recipes
from slipstream.schedule.dispatch import WorkerSpec
from slipstream.schedule.speeds import SpeedCurve
from slipstream.schedule.tiers import two_tiers

ROOT = Path(__file__).parent.parent
RECIPES = list(shipped_recipes().values())
MAX_KEYS = 30

# Sections whose fields are read all at once, and where.
READ_WHOLE = {
    "sampling": "SamplingParams(**config.sampling.model_dump()) in runtime/world.py",
}


def tree(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "run": {"dir": "runs/x"}, "tasks": {"train": [{"source": "gcd", "size": 9}]}} | changes


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    (folder / name).write_text(yaml.safe_dump(content))
    return folder / name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"step": 3}}, "unknown key 'train.step'; did you mean 'train.steps'?"),
        ({"modell": "tiny"}, "unknown key 'modell'; did you mean 'model'?"),
        ({"sampling": {"max_tokens": 3}}, "did you mean 'sampling.max_new_tokens'?"),
        ({"tasks": {"train": [{"source": "gcd", "sise": 9}]}}, "'tasks.train.0.sise'; did you mean 'tasks.train.size'"),
        ({"tasks": {"train": [{"source": "gcd"}], "eval": {"x": {"source": "gcd", "sed": 9}}}}, "'tasks.eval.seed'?"),
        ({"warmup": {"stps": 3}}, "did you mean 'warmup.steps'?"),
        ({"train": {"steps": "many"}}, "'train.steps' is 'many'"),
        ({"train": {"steps": -1}}, "'train.steps' is -1"),
        ({"train": {"steps": 1.5}}, "'train.steps' is 1.5"),
        ({"algorithm": {"name": "ppo"}}, "'algorithm.name' is 'ppo'"),
        ({"train": 3}, "'train' is 3"),
        ({"tasks": {"train": []}}, "'tasks.train'"),
        ({"tasks": {"train": [{"size": 9}]}}, "'tasks.train.0.source' is required"),
        ({"train": {"samples_per_prompt": 1}}, "set train.samples_per_prompt >= 2"),
        ({"train": {"updates_per_step": 99}}, "train.updates_per_step cannot exceed train.prompts_per_step"),
        ({"mode": "parallel"}, "'mode' is 'parallel'"),
        ({"rollout": {"workers": 2}}, "rollout.workers > 1 needs mode=sync, async or rhyme"),
        ({"drafter": {"least_idle": 2}}, "drafter.least_idle > 1 needs mode=sync, async or rhyme"),
        ({"mode": "sync", "drafter": {"least_idle": 2}}, "least_idle=2 is more than there are rollout workers: 1"),
        ({"train": {"ranks": 2}}, "train.ranks > 1 needs mode=sync, async or rhyme"),
        ({"mode": "rhyme"}, "write rollout.workers=2 or more"),
        ({"algorithm": {"clip_high": 0.28}}, "algorithm.clip_high=0.28 has no effect with train.updates_per_step=1"),
        ({"algorithm": {"clip_low": 0.1}}, "write train.updates_per_step=4, say (DAPO makes 16), or leave"),
        ({"train": {"betas": [2, 3]}}, "'train.betas.0' is 2: input should be less than 1"),
        ({"train": {"lr": 1e300}}, "'train.lr' is 1e+300: input should be less than or equal to 1"),
        ({"train": {"lr": "nan"}}, "'train.lr' is 'nan': input should be a finite number"),
        ({"seed": 2**63}, "'seed' is 9223372036854775808: input should be less than"),
        ({"sampling": {"top_k": 2**31}}, "sampling.top_k: write a number up to 2,147,483,647, not 2,147,483,648"),
        ({"engine": {"kv_tokens": 10**20}}, "engine.kv_tokens: write a number up to 2,147,483,647"),
        ({"draft": {"library_tokens": 10**20}}, "draft.library_tokens: write a number up to"),
        ({"history": {"keep_per_prompt": 10**20}}, "history.keep_per_prompt: write a number up to"),
        ({"train": {"logprob_chunk_tokens": 10**20}}, "train.logprob_chunk_tokens: write a number up to"),
        ({"tasks": {"train": [{"source": "gcd", "size": 10**13}]}}, "tasks.train.0.size: write a number up to"),
        ({"tasks": {"train": [{"source": "gcd", "params": {"a": [math.nan]}}]}}, "'tasks.train.0.params.a.0' is nan"),
        ({"sampling": {"temperature": float("inf")}}, "'sampling.temperature' is inf: write a finite number"),
        ({"sampling": {"temperature": 1e-9}}, "write 0 for greedy, or 0.001"),
        ({"sampling": {"temperature": 0}}, "greedy rollouts have no probabilities to train on"),
        ({"reward": {"timeout_s": 1e12}}, "'reward.timeout_s' is 1000000000000.0: input should be less than or equal"),
        ({"engine": {"max_prompt_tokens": 2**31 - 1}}, "no sequence has more than 2,147,483,647"),
        ({"model": "a\0b"}, "'model' is 'a\\x00b': leave out the character NUL"),
        ({"placement": 1}, "unknown key 'placement'; all settings are listed by: slipstream train"),
        ({"lr": 1}, "unknown key 'lr'; did you mean 'drafter.lr' or 'train.lr' or 'warmup.lr'?"),
        ({"eval": {"samples": 1}}, "unknown key 'eval.samples'; did you mean 'eval.samples_per_prompt'?"),
        ({"mode": "sync", "engine": {"sleep": "kv"}}, "engine.sleep makes room for training in the same process"),
    ],
)  # fmt: skip
def test_an_error_says_where_and_what_to_write(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^here: ") as caught:
        build_config(tree(**changes), where="here")
    assert words in str(caught.value)


def test_all_errors_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="'model' is required; 'run' is required; 'tasks' is required"):
        build_config({})


def test_a_recipe_inherits_over_two_levels(tmp_path: Path) -> None:
    write(tmp_path, "ground.yaml", tree(train={"steps": 1, "lr": 0.5, "prompts_per_step": 4}))
    write(tmp_path, "middle.yaml", {"defaults": "ground.yaml", "train": {"steps": 2, "lr": 0.25}})
    config = load_config(write(tmp_path, "top.yaml", {"defaults": "middle.yaml", "train": {"steps": 3}}))
    assert (config.train.steps, config.train.lr, config.train.prompts_per_step) == (3, 0.25, 4)


def test_of_several_parents_the_later_wins(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", tree(train={"steps": 1, "lr": 0.5}))
    write(tmp_path, "b.yaml", {"train": {"steps": 2}})
    config = load_config(write(tmp_path, "top.yaml", {"defaults": ["a.yaml", "b.yaml"], "seed": 7}))
    assert (config.train.steps, config.train.lr, config.seed) == (2, 0.5, 7)


def test_parents_are_found_beside_the_child(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, "ground.yaml", tree())
    assert load_config(write(tmp_path / "sub", "top.yaml", {"defaults": "../ground.yaml"})).model == "tiny"


def test_a_shipped_recipe_is_taken_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # a folder of that name, say of runs, does not hide it
    shipped = load_config("quickstart")
    assert shipped == load_config(shipped_recipes()["quickstart"])
    child = write(tmp_path, "mine.yaml", {"defaults": "quickstart", "train": {"steps": 3}})
    assert load_config(child) == load_config("quickstart", ["train.steps=3"])


def test_a_file_of_the_user_wins_over_a_shipped_recipe_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "quickstart").write_text(yaml.safe_dump(tree(seed=77)))
    assert load_config(write(tmp_path, "mine.yaml", {"defaults": "quickstart"})).seed == 77


def test_the_error_for_an_unknown_recipe_names_those_that_are_shipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"taken by name: dapo, quickstart, smollm2-arithmetic, smollm2-reasoner"):
        load_config(tmp_path / "recipes" / "quickstart.yaml")


def test_one_parent_may_be_reached_by_two_ways(tmp_path: Path) -> None:
    write(tmp_path, "ground.yaml", tree())
    write(tmp_path, "a.yaml", {"defaults": "ground.yaml"})
    write(tmp_path, "b.yaml", {"defaults": "ground.yaml"})
    assert load_config(write(tmp_path, "top.yaml", {"defaults": ["a.yaml", "b.yaml"]})).model == "tiny"


def test_a_circle_of_parents_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", {"defaults": "b.yaml"})
    write(tmp_path, "b.yaml", {"defaults": "a.yaml"})
    with pytest.raises(ValueError, match="goes in a circle"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(("text", "words"), [("a: [1", "not valid YAML"), ("- 1\n- 2", "a recipe is a mapping")])
def test_a_broken_recipe_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"x\.yaml: {words}"):
        load_config(tmp_path / "x.yaml")


def test_a_missing_recipe_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no recipe at"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="is a folder"):
        load_config(tmp_path)


@pytest.mark.parametrize("words", [["train.lr=0.5", "eval.every=0"], ["--train.lr", "0.5", "--eval.every=0"]])
def test_overrides_in_all_three_spellings(tmp_path: Path, words: list[str]) -> None:
    config = load_config(write(tmp_path, "x.yaml", tree(train={"lr": 0.1, "steps": 4})), collect_overrides(words))
    assert (config.train.lr, config.eval.every, config.train.steps) == (0.5, 0, 4)


def test_override_values_are_yaml(tmp_path: Path) -> None:
    overrides = [
        "train.betas=[0.8, 0.9]",
        "train.lr=1e-4",
        "algorithm.dynamic_sampling=true",
        "tasks.train=[{source: a=b}]",
    ]
    config = load_config(write(tmp_path, "x.yaml", tree()), overrides)
    assert config.train.betas == (0.8, 0.9) and config.train.lr == 1e-4 and config.algorithm.dynamic_sampling
    assert config.tasks.train[0].source == "a=b"


def test_off_is_a_word_where_it_is_a_choice_and_false_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", tree(engine={"sleep": False}))
    assert load_config(path).engine.sleep == load_config(path, ["engine.sleep=off"]).engine.sleep == "off"
    assert load_config(path, ["engine.exact=off"]).engine.exact is False
    with pytest.raises(ValueError, match=r"engine\.sleep"):
        load_config(path, ["engine.sleep=on"])


def test_an_empty_override_takes_an_optional_section_away(tmp_path: Path) -> None:
    path = write(tmp_path, "x.yaml", tree(warmup={"steps": 3}))
    assert load_config(path).warmup is not None and load_config(path, ["warmup="]).warmup is None


def test_an_empty_mapping_takes_the_place_of_what_was_there() -> None:
    config = load_config("quickstart", ["tasks.eval={}", "sampling={}"])
    assert (
        config.tasks.eval == {} and config.tasks.train and config.sampling.max_new_tokens == Sampling().max_new_tokens
    )


@pytest.mark.parametrize("words", [["train.steps"], ["--train.steps"], ["steps", "4"]])
def test_a_word_that_is_no_override_is_an_error(words: list[str]) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        collect_overrides(words)


def test_an_unknown_override_names_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"did you mean 'train\.steps'"):
        load_config(write(tmp_path, "x.yaml", tree()), ["train.stepps=4"])


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "-inf", 10**400, -(10**400)])
def test_no_number_is_without_bounds(kind: type, value: Any) -> None:
    """Whatever field of this kind is added: NaN, infinities and numbers of 400 digits are refused there."""
    fields = [path for path, info in numbers_of(Config) if kind in (info.annotation, *get_args(info.annotation))]
    assert len(fields) > 10
    for path in fields:
        with pytest.raises(ValueError, match=path.rpartition(".")[2]):
            build_config(with_value(path, value))


def numbers_of(section: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    """Fields of all sections, the items of lists as their first, with what is known of them."""
    found = []
    for name, info in section.model_fields.items():
        parts = [info.annotation, *get_args(info.annotation)]
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                is_list = get_origin(info.annotation) is tuple
                found += numbers_of(part, f"{prefix}{name}.0." if is_list else f"{prefix}{name}.")
        found.append((prefix + name, info))
    return found


def with_value(path: str, value: Any) -> dict[str, Any]:
    base = tree(tasks={"train": [{"source": "gcd", "size": 9}], "eval": {"0": {"source": "gcd", "size": 9}}})
    base |= {"warmup": {}, "reward": {"functions": [{"function": "task"}]}}
    node: Any = base
    *sections, name = path.replace("tasks.eval.", "tasks.eval.0.").split(".")
    for section in sections:
        node = node[int(section)] if isinstance(node, list) else node.setdefault(section, {})
    node[name] = value
    return base


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("Answer #1", "Answer #1"),
        ("#1", "#1"),
        ("a#b", "a#b"),
        ('"a # b"', "a # b"),
        ("a  # b ", "a  # b "),
    ],
)
def test_a_number_sign_is_text_in_an_override(tmp_path: Path, override: str, value: str) -> None:
    path = write(tmp_path, "x.yaml", tree())
    assert load_config(path, [f"tasks.train.0.system={override}"]).tasks.train[0].system == value


@pytest.mark.parametrize("override", ["train.betas=[0.5, 0.6] # or .9", 'model="tiny" # or not', "train={lr: 1} #"])
def test_a_comment_in_an_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ValueError, match="would be a comment of YAML: leave it out, or write the text in quotes"):
        load_config(write(tmp_path, "x.yaml", tree()), [override])


@pytest.mark.parametrize("override", ["train.steps=5 # five", "train.lr=#1"])
def test_a_number_with_a_comment_is_no_number(tmp_path: Path, override: str) -> None:
    with pytest.raises(ValueError, match=r"'train\.\w+' is '.*#"):
        load_config(write(tmp_path, "x.yaml", tree()), [override])


@pytest.mark.parametrize("override", ["tasks.eval.h={source: gcd", "train.lr=[1", "seed=a: b: c"])
def test_an_override_that_is_not_yaml_is_named(tmp_path: Path, override: str) -> None:
    with pytest.raises(ValueError, match="the value: not valid YAML") as caught:
        load_config(write(tmp_path, "x.yaml", tree()), [override])
    assert repr(override) in str(caught.value)


def test_an_override_changes_one_item_of_a_list(tmp_path: Path) -> None:
    sets = [{"source": "gcd", "size": 9, "params": {"a": 1}}, {"source": "sorting", "size": 8}]
    path = write(tmp_path, "x.yaml", tree(tasks={"train": sets}))
    first, second = load_config(path, ["tasks.train.0.size=5", "tasks.train.0.params.b=2"]).tasks.train
    assert (first.size, first.source, first.params) == (5, "gcd", {"a": 1, "b": 2})
    assert (second.size, second.source) == (8, "sorting")
    assert load_config(path, ["tasks.train.1={size: 3}"]).tasks.train[1].source == "sorting", "mappings are merged"


@pytest.mark.parametrize("key", ["2", "-1", "size"])
def test_an_item_that_is_not_there_is_an_error(tmp_path: Path, key: str) -> None:
    sets = [{"source": "gcd", "size": 9}, {"source": "sorting", "size": 8}]
    path = write(tmp_path, "x.yaml", tree(tasks={"train": sets}))
    with pytest.raises(ValueError, match=r"override 'tasks\.train\..*tasks\.train is a list of 2 item\(s\)"):
        load_config(path, [f"tasks.train.{key}.size=5" if key != "size" else "tasks.train.size=5"])


def test_a_dumped_config_reads_back_equal(tmp_path: Path) -> None:
    config = build_config(tree(warmup={}, train={"lr": 3e-7}, run={"dir": "a b/c", "loggers": ["wandb"]}, seed=5))
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


def test_a_config_is_frozen() -> None:
    config = build_config(tree())
    for section, name in ((config, "seed"), (config.train, "steps"), (config.tasks.train[0], "source")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 1)


def settings_in(node: Any, path: str = "") -> set[str]:
    """Dotted names of the settings that a recipe uses; the sets of a list, and named sets, count as one."""
    if isinstance(node, list):
        return set().union(*(settings_in(value, path) for value in node))
    if not isinstance(node, dict) or path == "tasks.train.params":
        return {path}
    if path == "tasks.eval":
        return settings_in(list(node.values()), "tasks.train")
    return set().union(*(settings_in(value, f"{path}.{key}".lstrip(".")) for key, value in node.items()))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_stays_small(path: Path) -> None:
    load_config(path)
    assert len(settings_in(yaml.safe_load(path.read_text()))) <= MAX_KEYS


def attributes_read(source: str) -> set[str]:
    nodes = ast.walk(ast.parse(source))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def unread_fields(read: set[str]) -> list[str]:
    every = field_paths()
    sections = {path.rpartition(".")[0] for path in every}
    return [
        path
        for path in every
        if path not in sections and path.rpartition(".")[2] not in read and path.rpartition(".")[0] not in READ_WHOLE
    ]


def test_a_field_without_effect_does_not_exist() -> None:
    sources = [file.read_text() for file in (ROOT / "slipstream").rglob("*.py") if file.name != "config.py"]
    read = set().union(*(attributes_read(source) for source in sources))
    assert unread_fields(read) == []
    for section in READ_WHOLE:
        assert any(f"config.{section}.model_dump()" in source for source in sources), section


def test_the_search_for_fields_without_effect_finds_one() -> None:
    read = {path.rpartition(".")[2] for path in field_paths()} - {"kl_coef"}
    assert unread_fields(read) == ["algorithm.kl_coef"]
    assert attributes_read("config.kl_coef = 1; kl_coef; f('kl_coef')") == set()


def test_the_derived_numbers_by_hand() -> None:
    config = build_config(
        tree(
            train={"steps": 10, "prompts_per_step": 6, "samples_per_prompt": 4, "updates_per_step": 2,
                   "micro_batch_tokens": 1000},
            sampling={"max_new_tokens": 100}, engine={"max_prompt_tokens": 50, "max_sequences": 10},
        )
    )  # fmt: skip
    assert (config.samples_per_step, config.max_length) == (24, 150)
    assert config.arithmetic() == {
        "prompts per step": "6",
        "samples per step": "6 prompts x 4 samples = 24",
        "response tokens per step": "at most 24 x 100 = 2,400",
        "sequences decoding at once": "at most 10, so about 3 wave(s)",
        "samples per update": "24 / 2 = 12",
        "updates that clip": "1 of 2 a step: in the first the probability ratio is 1",
        "micro-batches per step": "at most 5 of 1,000 packed tokens",  # 24 / 6 full ones, one more for a second update
        "rollouts in the whole run": "10 steps x 24 = 240",
    }


@pytest.mark.parametrize(
    ("rollout", "is_one_group"),
    [({"workers": 2}, True), ({"workers": 3}, True), ({"workers": 4}, False),
     ({"workers": 4, "scale": {"min": 2, "max": 8}}, True)],
)  # fmt: skip
def test_rhyme_says_when_all_rollouts_are_one_group(rollout: dict[str, Any], is_one_group: bool) -> None:
    workers = [WorkerSpec(f"w{number}", SpeedCurve(((1, 1.0),)), 8) for number in range(rollout["workers"])]
    lengths = {str(number): float(number + 1) for number in range(16)}
    shares = [set(uids) for uids in two_tiers(lengths, workers).values()]
    apart = max(map(float, shares[0])) < min(map(float, shares[-1]))
    assert apart == (rollout["workers"] >= 4), "the sentence says what the plan does"
    said = build_config(tree(mode="rhyme", rollout=rollout)).arithmetic().get("groups by length", "")
    assert ("one with 2 or 3 rollout workers" in said) == is_one_group
    assert "groups by length" not in build_config(tree(mode="async", rollout={"workers": 2})).arithmetic()


def test_dynamic_sampling_makes_the_numbers_bounds() -> None:
    config = build_config(
        tree(
            train={"steps": 10, "prompts_per_step": 6, "samples_per_prompt": 4}, sampling={"max_new_tokens": 100},
            algorithm={"dynamic_sampling": True, "max_sampling_rounds": 3},
        )
    )  # fmt: skip
    said = config.arithmetic()
    assert said["samples per step"] == "at least 6 prompts x 4 samples = 24, up to 3 times as many"
    assert said["response tokens per step"] == "at most 72 x 100 = 7,200"
    assert said["rollouts in the whole run"] == "at least 10 steps x 24 = 240, up to 3 times as many"


def test_the_bound_on_micro_batches_holds_when_they_cannot_be_full() -> None:
    """24 sequences of 150 tokens, at most 2 of them in 400 tokens: 12 micro-batches, not 3600 / 400 = 9."""
    config = build_config(
        tree(
            train={"prompts_per_step": 6, "samples_per_prompt": 4, "micro_batch_tokens": 400},
            sampling={"max_new_tokens": 100}, engine={"max_prompt_tokens": 50},
        )
    )  # fmt: skip
    assert config.arithmetic()["micro-batches per step"] == "at most 12 of 400 packed tokens"


def test_configs_load_without_torch() -> None:
    script = (
        f"import sys; sys.modules['torch'] = None\nfrom slipstream import load_config\nload_config({str(RECIPES[0])!r})"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_package_offers_its_config() -> None:
    assert issubclass(Config, object) and Config.model_fields["model"].is_required()


def test_a_cut_of_what_is_sampled_is_told_of_with_what_it_does_to_training() -> None:
    assert build_config(tree()).cut_warning() is None
    corrected = build_config(tree(sampling={"top_p": 0.9, "top_k": 20})).cut_warning()
    assert corrected is not None and "sampling.top_k=20, sampling.top_p=0.9 cuts" in corrected
    assert "rollout/kept_mass" in corrected and "a bias is left" in corrected
    biased = build_config(tree(sampling={"min_p": 0.05}, algorithm={"importance_cap": 0})).cut_warning()
    assert biased is not None and "sampling.min_p=0.05 cuts" in biased and "does not correct" in biased
