"""Gradient checkpointing: of a decoder layer only the input is kept for the backward, which computes the rest again.

Nothing of it stays in the model between forwards, because engines are made from copies of the trainer's. The attention
of the forward is put in place again for the second time, when its own context is long over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.models.attention import attending, current_attention


@contextmanager
def recomputing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Forwards of these layers in here keep their inputs only. Each must have the forward of its class."""
    for layer in layers:
        assert "forward" not in vars(layer), "a layer with another forward has no backward that we know"
        layer.forward = partial(_recomputed, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _recomputed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    attention = current_attention()
    return checkpoint(
        forward,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing is drawn: there is no dropout
        context_fn=lambda: (nullcontext(), attending(attention)),
        **named,
    )
