"""A small model that changes as one in training does, and its versions on a shelf."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.models.weights import named_weights
from slipstream.stream.publisher import Publisher
from slipstream.types import WeightVersion

SMALL = 4096
"""Bytes of a bucket: the small model has a dozen."""


class Tied(nn.Module):
    """A tied weight, an empty one, one value alone, one that is not contiguous."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(50, 8, generator=generator).to(dtype))
        self.head = self.embed
        self.none = nn.Parameter(torch.empty(0, 8, dtype=dtype))
        self.one = nn.Parameter(torch.randn((), generator=generator).to(dtype))
        self.turned = nn.Parameter(torch.randn(8, 6, generator=generator).to(dtype).t())


def step(model: nn.Module, share: float, seed: int) -> None:
    """Change so many weights a little, as an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in named_weights(model):
            moved = (torch.rand(weight.shape, generator=generator) < share).to(weight.device)
            weight.copy_(torch.where(moved, weight * 1.01 + 1e-3, weight))


def publish_steps(publisher: Publisher, model: nn.Module, numbers: range, share: float = 0.05) -> list[WeightVersion]:
    versions = []
    for number in numbers:
        step(model, share, number)
        versions.append(publisher.publish(named_weights(model), number))
    return versions


def damage(folder: Path, name: str, index: int, *, at: int = -1) -> bytes:
    """Flip a bit; the bucket as it was."""
    path = folder / name / f"{index:05d}.bucket"
    before = path.read_bytes()
    broken = bytearray(before)
    broken[at] ^= 1
    path.unlink()  # who has it open keeps what was there
    path.write_bytes(broken)
    return before


def bits(model: nn.Module) -> list[Tensor]:
    return [weight.clone().view(torch.int16) for _, weight in named_weights(model) if weight.ndim]
