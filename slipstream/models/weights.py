"""Weights as named tensors: writing them in place, and a fingerprint that tells versions apart.

The fingerprint sums each tensor's bits, which costs one read of the weights. It is meant to catch weights that did not
arrive, not an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

_AFTER_WRITING = "_slipstream_after_writing"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    for callback in vars(model).get(_AFTER_WRITING, ()):
        callback()


def after_writing(model: nn.Module, callback: Callable[[], None]) -> None:
    """Call this whenever `write_weights` has changed the model: for what is derived from its weights."""
    vars(model).setdefault(_AFTER_WRITING, []).append(callback)


def fingerprint(model: nn.Module) -> str:
    return fingerprint_of(named_weights(model))


def fingerprint_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """16 hex digits over names, shapes, dtypes and bits."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in weights:
        total = tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{int(total)}".encode())
    return digest.hexdigest()
