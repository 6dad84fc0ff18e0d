"""Whether the engine can keep a rollout the same to the bit in every batch: not where products escape it.

It keeps the bits of products of linear layers (`heights.py`, `products.py`, `precision.py`), and those have the rows of
the step. Experts have the rows that were sent to each, and weights of their own.
"""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D


def products_out_of_reach(model: nn.Module) -> tuple[str, ...]:
    """Classes of modules whose matrix products the engine does not make independent of the batch."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        is_expert = "expert" in name.lower().rpartition(".")[2] or "expert" in type(module).__name__.lower()
        has_matrix = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        is_known = isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        if (is_expert and any(True for _ in module.parameters())) or (has_matrix and not is_known):
            found[type(module).__name__] = None
    return tuple(found)


def why_inexact(model: nn.Module) -> str | None:
    """Why rollouts of this model may depend on their batch even with engine.exact; None if they do not."""
    names = products_out_of_reach(model)
    if not names:
        return None
    return (
        f"rollouts are not the same in every batch: {', '.join(names)} of this model multiply rows that the engine "
        "cannot pad (of a mixture of experts, those that were sent to each expert), so tokens and log-probabilities "
        "may depend on what runs beside a rollout, on preemption and on drafts; engine.exact: false with "
        "mode=colocated measures how often (rollout/token_match)"
    )
