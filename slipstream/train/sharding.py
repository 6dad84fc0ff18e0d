"""One model over several ranks (FSDP2): each keeps a part of every weight, its gradient and its moments.

Owns how a model is cut and put together again. Weights stay float32 in the shards and on the wire, so autocast rounds
them as it does on one rank; gradients are added over the ranks, never averaged. Between calls all weights are cut.
What is put together is put together tensor by tensor, by all ranks at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from slipstream.models.weights import named_weights
from slipstream.train.ranks import Ranks

T = TypeVar("T")
_INSIDE = "_slipstream_inside_forward"


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that repeat, by the names that the model itself gives for what must stay together."""
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in kinds]
    if not layers:
        raise ValueError(f"{type(model).__name__} does not say which of its modules are layers")
    return layers


def shard_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Cut it in place, layer by layer, each part moved to its rank's device. One rank alone keeps it whole."""
    if ranks.size == 1:
        return
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    # The whole model last: it takes what no layer has, and embedding and head with it, which may be one tensor.
    for module in [*decoder_layers(model), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor
    setattr(model, _INSIDE, lambda compute: compute())
    register_fsdp_forward_method(model, _INSIDE)


def inside_forward(model: nn.Module, compute: Callable[[], T]) -> T:
    """Call this as if it were the model's forward, so that the weights outside its layers are there for it."""
    if not isinstance(model, FSDPModule):
        return compute()
    result: T = getattr(model, _INSIDE)(compute)
    return result


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`named_weights`, each put together when it is asked for. All ranks go through all of it."""
    for name, tensor in named_weights(model):
        yield name, whole(tensor)


def whole_on_first(tree: Any, ranks: Ranks) -> Any:
    """The same dicts and lists with whole tensors, on the host of the first rank; the others get None for a tensor."""
    if isinstance(tree, dict):
        return {key: whole_on_first(value, ranks) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole_on_first(value, ranks) for value in tree]
    if not isinstance(tree, Tensor):
        return tree
    together = whole(tree.detach())
    return together.to("cpu") if ranks.is_first else None


def whole_state(model: nn.Module, ranks: Ranks) -> dict[str, Tensor] | None:
    """The state of a sharded model on the host of the first rank, tied weights being one tensor as they are in it."""
    named = model.state_dict(keep_vars=True)
    distinct = {id(tensor): tensor for tensor in named.values()}
    together = {key: whole_on_first(tensor, ranks) for key, tensor in distinct.items()}
    return {name: together[id(tensor)] for name, tensor in named.items()} if ranks.is_first else None


def cut_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of this rank's part of a tensor that every rank has whole, or of all of it if the other is not cut."""
    if not isinstance(like, DTensor) or tensor.ndim == 0:
        return tensor.clone()
    together = tensor.to(like.device, torch.float32)
    return distribute_tensor(together, like.device_mesh, like.placements, src_data_rank=None).clone()
