"""Weights as named tensors: writing them in place, and the content hash that tells versions apart (`digest.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from slipstream.models.digest import combined_digest, tensor_digest

_AFTER_WRITING = "_slipstream_after_writing"


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once (tied ones under their first name), detached."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Change the parameters' number format, and nothing else: `model.to(dtype)` would round the rotary frequencies too,
    which is an error of radians at a thousand tokens."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def write_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy into the model's own storage, converting the dtype. ValueError if names or shapes do not all match, before
    the first weight is written."""
    own, given = dict(named_weights(model)), dict(weights)
    for name, tensor in given.items():
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(f"weight {name} {tuple(tensor.shape)} does not fit this model")
    missing = sorted(own.keys() - given.keys())
    if missing:
        raise ValueError(f"weights are missing: {', '.join(missing[:3])} and {max(0, len(missing) - 3)} more")
    for name, tensor in given.items():
        own[name].copy_(tensor)
    tell_written(model)


def tell_written(model: nn.Module) -> None:
    """Of whoever writes weights in another way than `write_weights`, once all are written."""
    for callback in vars(model).get(_AFTER_WRITING, ()):
        callback()


def after_writing(model: nn.Module, callback: Callable[[], None]) -> None:
    """Call this whenever weights of the model were written: for what is derived from them."""
    vars(model).setdefault(_AFTER_WRITING, []).append(callback)


def fingerprint(model: nn.Module) -> str:
    """The content hash of all weights, 32 hex digits: of names, shapes, dtypes and bits, in whatever order."""
    return digest_of(named_weights(model))


def digest_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """The same of weights that come one at a time."""
    return combined_digest({name: tensor_digest(tensor) for name, tensor in weights})
