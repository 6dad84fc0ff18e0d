"""reasoning-gym, to be imported where it is needed: it takes seconds."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # Of a package that it uses, in whatever process is the first to compile that.
    warnings.simplefilter("ignore", SyntaxWarning)
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

__all__ = ["DATASETS", "create_dataset"]
