"""What the processes of a run do: each builds its plain worker from the recipe, then obeys its pipe.

A fault that comes from the work itself (a model that gives no numbers, a full disk) is told as it is before the process
ends; whoever dies without a word was killed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from slipstream.config import Config
from slipstream.draft.reading import Reader
from slipstream.draft.together import Member
from slipstream.engine.engine import Engine
from slipstream.engine.measure import speed_points
from slipstream.models.loading import load_model, load_tokenizer
from slipstream.models.packed import document_hidden
from slipstream.models.precision import precision_of, use_batch_invariant_products
from slipstream.models.weights import cast_weights
from slipstream.rng import derive_seed
from slipstream.runtime.drafter_messages import FromMember
from slipstream.runtime.drafter_worker import DrafterWorker
from slipstream.runtime.drafting import (
    build_selector,
    draft_as,
    drafter_trainer_for,
    learns,
    remembers,
    settle_source,
)
from slipstream.runtime.engines import choose_device, engine_around, fit_memory
from slipstream.runtime.folder import LESSONS_FOLDER, REFERENCE_FOLDER, VERSIONS_FOLDER
from slipstream.runtime.heap import keep_few_kernels, map_large_blocks
from slipstream.runtime.processes import Pipe, PipeClosed
from slipstream.runtime.rollout_messages import Broke, Here
from slipstream.runtime.rollout_worker import TELL_S, PastTexts, RolloutWorker
from slipstream.runtime.trainer_messages import TrainerBroke, TrainerReady
from slipstream.runtime.trainer_worker import TrainerWorker
from slipstream.stream.editions import RefusedWeights, VersionMissing
from slipstream.stream.ways import Ways
from slipstream.train.trainer_rank import TrainerRank

WAIT_S = 1.0
"""A trainer with nothing to do says so as often."""


def sample_in_process(
    pipe: Pipe,
    recipe: Config,
    weights_folder: Path,
    name: str,
    most_bytes: int | None = None,
    ways: Ways = Ways(),
) -> None:
    """The recipe's model tells the shape; weights come from `weights_folder`, or a shorter way. `most_bytes`: that it
    may take of a GPU which it shares; None: what is free."""

    def work() -> None:
        device = choose_device(recipe.device)
        config = settle_source(recipe, device)
        if device.type == "cuda" and config.engine.exact:
            use_batch_invariant_products()
        model = load_model(config.model, dtype=torch.float32, device=device, seed=config.seed).requires_grad_(False)
        cast_weights(model, precision_of(config.engine.dtype, model))
        past = PastTexts()
        remembered = past.of_prompt if remembers(config) else None
        tokenizer, selector = load_tokenizer(config.model), build_selector(config, device)
        fitted = fit_memory(config, model, most_bytes)
        # Whether others wait for its slots the run knows, which gives a worker no more than it has.
        engine = engine_around(model, fitted, tokenizer, device, remembered, selector, others_follow=True)
        slots = config.engine.max_sequences
        points = speed_points(engine, slots, config.max_length)
        drafter = drafter_worker(config, engine, name, pipe.say) if learns(config) else None
        chooser = selector if engine.drafter is not None else None
        receiver = ways.receiver(weights_folder, name)
        worker = RolloutWorker(engine, receiver, past, pipe.say, drafter=drafter, selector=chooser)
        pipe.say(Here(slots, points, None if drafter is None else drafter.version))
        while not worker.is_leaving:
            for message in pipe.hear(0.0 if worker.has_work else TELL_S):
                worker.obey(message)
            if not worker.is_leaving:
                worker.step()

    _work_or_tell(work, lambda error, text: pipe.say(Broke(text)))


def drafter_worker(config: Config, engine: Engine, name: str, say: Callable[[FromMember], None]) -> DrafterWorker:
    """Its part in the drafter that the run's rollout workers train together."""
    lessons, seed = config.run.dir / LESSONS_FOLDER / name, derive_seed("drafter", config.seed, name)
    trainer = drafter_trainer_for(config, engine.model, lessons, seed)
    digest = engine.facts().version.digest
    member = Member(trainer, config.run.dir / VERSIONS_FOLDER, name=name, target_digest=digest)
    return DrafterWorker(
        member, Reader(trainer, partial(document_hidden, engine.model)), partial(draft_as, engine), say
    )


def train_in_process(
    pipe: Pipe,
    config: Config,
    checkpoint_folder: Path,
    weights_folder: Path,
    rank: int,
    rendezvous: str,
    ways: Ways = Ways(),
) -> None:
    """From a checkpoint, which holds the weights and all that the optimizer knows."""

    def work() -> None:
        device = choose_device(config.device)
        if device.type == "cuda" and config.engine.exact:
            use_batch_invariant_products()
        map_large_blocks()
        keep_few_kernels()
        source, num_ranks = str(checkpoint_folder), config.train.ranks
        trainer = TrainerRank(config, source, rank=rank, num_ranks=num_ranks, rendezvous=rendezvous, resume=True)
        if config.algorithm.kl_coef > 0:
            trainer.set_reference(str(config.run.dir / REFERENCE_FOLDER))
        dtype = precision_of(config.engine.dtype, trainer.trainer.model)
        publisher = ways.publisher(weights_folder, dtype) if rank == 0 else None
        drafter_folder = config.run.dir / VERSIONS_FOLDER if learns(config) else None
        worker = TrainerWorker(trainer, publisher, pipe.say, drafter_folder=drafter_folder)
        pipe.say(TrainerReady())
        while True:
            for message in pipe.hear(WAIT_S):
                worker.obey(message)
            worker.tell()
            if publisher is not None:
                publisher.look()

    _work_or_tell(work, lambda error, text: pipe.say(TrainerBroke(type(error).__name__, text)))


def _work_or_tell(work: Callable[[], None], tell: Callable[[Exception, str], None]) -> None:
    try:
        work()
    except (PipeClosed, VersionMissing, RefusedWeights):
        raise  # another process in its place may fare better
    except Exception as error:
        traceback.print_exc()
        tell(error, str(error) or type(error).__name__)
        raise SystemExit(1) from error
