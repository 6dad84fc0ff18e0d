"""Slipstream: reinforcement learning for language models, with rollouts several times faster, token for token the same.

from slipstream import load_config, train

if __name__ == "__main__":
    train(load_config("quickstart", ["train.steps=20"]))
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import Config, load_config

if TYPE_CHECKING:
    from slipstream.runtime.local import Outcome

__all__ = ["Config", "load_config", "train"]
__version__ = "0.1.0"


def train(config: Config, *, resume: bool | Path = False) -> Outcome:
    """Run a recipe to its end in this process; what `slipstream train` does."""
    from slipstream.runtime.openmp import bound_spinning

    bound_spinning()
    from slipstream.runtime.local import run_training  # torch loads here, not at import

    return run_training(config, resume=resume)
