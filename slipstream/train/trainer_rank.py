"""One rank of the trainer in a process of its own: joins the others, holds its part of the model, does what it is told.

Owns the life of a rank from its model to its last checkpoint; not how it is told (a pipe, an actor), nor what the run
does with the weights. All ranks are told the same things in the same order, feeds with the same samples included: they
deal the work among themselves. Only the first gives weights away and writes files. An error that all can see (a loss
that is not finite, a wrong call) is raised by all; if one dies, the others raise RuntimeError in the next call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.config import Config
from slipstream.models.loading import load_model, load_tokenizer
from slipstream.train.checkpoint import load_trainer_state, save_checkpoint
from slipstream.train.policy import Pair
from slipstream.train.ranks import joined_ranks
from slipstream.train.sharding import shard_model, whole_state, whole_weights
from slipstream.train.trainer import Progress, Trainer
from slipstream.types import TrainSample


class TrainerRank:
    def __init__(
        self,
        config: Config,
        source: str,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        rendezvous: str = "",
        device: torch.device | None = None,
        resume: bool = False,
    ) -> None:
        """`source`: a model's name or folder. `resume`: it is a checkpoint, of any number of ranks, to go on from.

        `rendezvous`: file:///path/of/a/new/file or tcp://host:port, the same for all; not needed by one alone.
        """
        self._config = config
        self._tokenizer = load_tokenizer(source)  # now: an older checkpoint is gone by the time of the next
        self._device = _device_of(config.device, rank) if device is None else device
        with ExitStack() as stack:
            # Whoever looks after the ranks sees first that one hangs, and which.
            wait_s = 2 * config.train.silence_s
            self._ranks = stack.enter_context(joined_ranks(rank, num_ranks, rendezvous, self._device, wait_s))
            self._trainer = Trainer(
                self._load(source),
                config.train,
                config.algorithm,
                temperature=config.sampling.temperature,
                max_new_tokens=config.sampling.max_new_tokens,
                ranks=self._ranks,
            )
            if resume:
                self._trainer.load_state_dict(load_trainer_state(Path(source), lazily=num_ranks > 1))
            self._stack = stack.pop_all()

    @property
    def trainer(self) -> Trainer:
        return self._trainer

    @property
    def steps_done(self) -> int:
        return self._trainer.steps_done

    def set_reference(self, source: str) -> None:
        """The model that algorithm.kl_coef pulls towards."""
        self._trainer.reference = self._load(source).eval()

    def supervised_step(self, pairs: Sequence[Pair], lr: float) -> dict[str, float]:
        return self._trainer.supervised_step(pairs, lr)

    def begin_step(self) -> None:
        self._trainer.begin_step()

    def feed(self, samples: Sequence[TrainSample], on_progress: Progress | None = None) -> None:
        self._trainer.feed(samples, on_progress)

    def finish_step(self, on_progress: Progress | None = None) -> dict[str, float]:
        return self._trainer.finish_step(on_progress)

    def abandon_step(self) -> None:
        self._trainer.abandon_step()

    def skip_step(self) -> None:
        self._trainer.skip_step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights, one at a time, whole, on this rank's device. All ranks go through all of them, and those
        that have no use for them drop them: `for _ in rank.weights(): pass`."""
        return whole_weights(self._trainer.model)

    def save(self, step: int, run_state: dict[str, Any], files: Mapping[str, bytes] = {}) -> Path | None:
        """Write a checkpoint of all ranks into the run's folder; where it is, on the first rank.

        The first rank's host holds the whole weights and moments meanwhile.
        """
        trainer_state, weights = self._trainer.state_dict(), self._whole_state()
        if not self._ranks.is_first:
            return None
        return save_checkpoint(
            self._config.run.dir,
            step,
            model=self._trainer.model,
            weights=weights,
            tokenizer=self._tokenizer,
            trainer_state=trainer_state,
            run_state=run_state,
            keep_last=self._config.run.keep_last,
            files=files,
        )

    def save_model(self, folder: Path) -> None:
        """Only the model, for `set_reference` and for others; the first rank writes it."""
        weights = self._whole_state()
        if self._ranks.is_first:
            self._trainer.model.save_pretrained(folder, state_dict=weights)
        self._ranks.all_say(True)  # nobody reads it before it is there

    def close(self) -> None:
        """Leave the others."""
        self._stack.close()

    def _whole_state(self) -> dict[str, Tensor] | None:
        """None where the model is whole already, and on all ranks but the first."""
        return None if self._ranks.size == 1 else whole_state(self._trainer.model, self._ranks)

    def _load(self, source: str) -> PreTrainedModel:
        # Whole on the host first; each layer goes to the device when it is cut.
        at = self._device if self._ranks.size == 1 else torch.device("cpu")
        model = load_model(source, dtype=torch.float32, device=at, seed=self._config.seed)
        shard_model(model, self._ranks)
        return model


def _device_of(setting: str, rank: int) -> torch.device:
    if setting == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())
