"""Which decoder layers get the fused forward of `fused.py`: the engine's own copy of a model, changed in place.

Recognition is strict: a family is in FAMILIES because its arithmetic was read and `tests/test_models_fused.py`
compares it; every submodule must be known. What is not recognised stays as it is, and `fuse` says why.
Rotary cosines and sines come from Hugging Face, whatever their scaling (`rotary.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.models.attention import ATTENTION_NAME, AttentionForm
from slipstream.models.fused import Activation, FusedLayer, Handover, Heads, Norm, fused_norm
from slipstream.models.products import Product
from slipstream.models.rotary import RotaryTables
from slipstream.models.weights import after_writing


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's attributes do not tell. All of them rotate halves (x1, x2) -> (-x2, x1), not pairs."""

    rounds_first: bool = True
    plus_one: bool = False
    centred: bool = False
    window: Literal["module", "config"] | None = None
    """Where the attention takes its sliding window from."""
    softcap: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="config"),
    "qwen2": Family(window="module"),
    "qwen3": Family(window="module"),
    "smollm3": Family(window="module"),
    "gemma": Family(rounds_first=False, plus_one=True),
    "gemma2": Family(rounds_first=False, plus_one=True, window="module", softcap=True),
    "gemma3": Family(rounds_first=False, plus_one=True, window="module"),
    "olmo": Family(centred=True),
    "olmo2": Family(rounds_first=False),
    "olmo3": Family(rounds_first=False, window="module"),
    "granite": Family(),
    "phi3": Family(window="config"),
}
"""By the folder in transformers.models that a layer's classes come from."""

ACTIVATIONS: dict[str, Activation] = {
    "SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
}  # fmt: skip

_PRE = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_SANDWICH = _PRE | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_POST = frozenset({"self_attn", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"})
_DROPPING = _PRE | {"resid_attn_dropout", "resid_mlp_dropout"}
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_ATTENTION_NORMED = _ATTENTION | {"q_norm", "k_norm"}
_ATTENTION_PACKED = frozenset({"qkv_proj", "o_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})
_MLP_PACKED = frozenset({"gate_up_proj", "down_proj", "activation_fn"})


_FUSION = "_slipstream_fusion"


class NotFused(Exception):
    """A layer that is left as it is; says why."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """What `fuse` did."""

    num_layers: int
    fused: tuple[int, ...]
    families: tuple[str, ...]
    reasons: tuple[str, ...]
    """Why the other layers are not fused, each reason once."""
    products: tuple[Product, ...] = ()
    """All that are ours: those of fused layers, and the head if all layers are fused."""
    has_head: bool = False
    rotary: RotaryTables | None = None
    """If all layers are fused."""

    @property
    def any_height(self) -> bool:
        """Every product of the model is one that looks after that, so a row has the same bits in any step."""
        whole = self.has_head and len(self.fused) == self.num_layers
        return whole and all(product.serves_any_height for product in self.products)

    def know_positions(self, count: int) -> None:
        """All below this, for rows of pages: what their rotary embedding is will be looked up."""
        if self.rotary is not None:
            self.rotary.know(count)

    def refresh(self) -> None:
        """The weights were written."""
        for product in self.products:
            product.refresh()

    def release(self) -> None:
        """Give back what is derived from the weights, until the next `refresh`."""
        for product in self.products:
            product.release()

    def __str__(self) -> str:
        if not self.fused:
            return f"not fused: {'; '.join(self.reasons)}"
        done = f"{len(self.fused)} of {self.num_layers} layers fused ({', '.join(self.families)})"
        return done if not self.reasons else f"{done}; others not: {'; '.join(self.reasons)}"


@torch.no_grad()
def fuse(model: PreTrainedModel) -> Fusion:
    """Give every recognised decoder layer its fused forward, in place; say what was done and what was not."""
    known: Fusion | None = getattr(model, _FUSION, None)
    if known is not None:  # by another engine on the same model
        return known
    fusion = _fuse(model)
    setattr(model, _FUSION, fusion)
    after_writing(model, fusion.refresh)
    return fusion


def is_fused(model: PreTrainedModel) -> bool:
    return getattr(model, _FUSION, None) is not None


def _fuse(model: PreTrainedModel) -> Fusion:
    body = model.base_model
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return Fusion(0, (), (), (f"{type(body).__name__} has no list of layers",))
    if model.config._attn_implementation != ATTENTION_NAME:
        return Fusion(len(layers), (), (), (f"its attention is {model.config._attn_implementation!r}, not ours",))
    handover, fused, families, reasons = Handover(), dict[int, FusedLayer](), dict[str, None](), dict[str, None]()
    for index, layer in enumerate(layers):
        try:
            fused[index] = _fused_layer(layer, handover)
            families[_family(layer)] = None
        except NotFused as reason:
            reasons[str(reason)] = None
    for index, forward in fused.items():
        layers[index].forward = forward  # type: ignore[assignment]
        if index + 1 in fused:
            forward.next_norm = fused[index + 1].before_attention
    if len(layers) - 1 in fused and isinstance(getattr(body, "norm", None), nn.Module):
        _join_last_norm(body.norm, fused[len(layers) - 1])
    products = [product for one in fused.values() for product in (one.qkv, one.output, one.gate_up, one.down)]
    head = model.get_output_embeddings()
    fuses_head = type(head) is nn.Linear and "forward" not in vars(head) and len(fused) == len(layers)
    if fuses_head:
        products.append(Product([head]))
        head.forward = products[-1]
    rotary = _tabled_rotary(body) if len(fused) == len(layers) else None
    return Fusion(len(layers), tuple(fused), tuple(families), tuple(reasons), tuple(products), fuses_head, rotary)


def _tabled_rotary(body: Any) -> RotaryTables | None:
    module = getattr(body, "rotary_emb", None)
    if not isinstance(module, nn.Module):
        return None
    tables = RotaryTables(module)
    module.forward = tables  # type: ignore[assignment]
    return tables


def _join_last_norm(module: Any, last: FusedLayer) -> None:
    """A last norm that is not recognised stays as it is, and nothing is handed over to it."""
    try:
        _check_untouched(module, hooks=False)
        last.next_norm = _norm(module, FAMILIES[_family(module)])
    except NotFused:
        return
    module.forward = partial(fused_norm, last.next_norm, last.handover)


def _fused_layer(layer: Any, handover: Handover) -> FusedLayer:
    """Everything is checked before the first parameter is moved."""
    names = _known_names(layer, _PRE, _SANDWICH, _POST, _DROPPING)
    packed = _known_names(layer.self_attn, _ATTENTION, _ATTENTION_NORMED, _ATTENTION_PACKED) == _ATTENTION_PACKED
    qkv = _linears(layer.self_attn, ["qkv_proj"] if packed else ["q_proj", "k_proj", "v_proj"])
    (output,) = _linears(layer.self_attn, ["o_proj"])
    gate_up, down, activation = _mlp_parts(layer.mlp)
    family = FAMILIES[_family(layer)]
    norms = {name: _norm(getattr(layer, name), family) for name in names if name.endswith("norm")}
    for module in layer.modules():
        _check_untouched(module, hooks=module is not layer)
    for module in (getattr(layer, name) for name in ("self_attn", "mlp", *norms)):
        if type(module).__module__ != type(layer).__module__:
            raise NotFused(f"{type(layer).__name__} has a {type(module).__name__} from another file")
    if names == _DROPPING and (layer.resid_attn_dropout.p or layer.resid_mlp_dropout.p):
        raise NotFused(f"{type(layer).__name__} has dropout")
    # What is called after the attention is the norm of its output in some families, of the MLP's input in others.
    pre = names in (_PRE, _DROPPING)
    return FusedLayer(
        layer=layer.self_attn.layer_idx,
        heads=_heads(layer.self_attn, family, [x.out_features for x in qkv], output.in_features),
        form=_form(layer.self_attn, family),
        uses_rope=bool(getattr(layer.self_attn, "use_rope", True)),
        qkv=Product(qkv),
        output=Product([output]),
        gate_up=Product(gate_up, activation),
        down=Product([down]),
        activation=activation,
        before_attention=norms.get("input_layernorm"),
        after_attention=None if pre else norms["post_attention_layernorm"],
        before_mlp=norms["post_attention_layernorm"] if pre else norms.get("pre_feedforward_layernorm"),
        after_mlp=norms.get("post_feedforward_layernorm"),
        residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
        handover=handover,
    )


def _heads(attention: Any, family: Family, num_rows: list[int], num_columns: int) -> Heads:
    name, config = type(attention).__name__, attention.config
    if not attention.is_causal:
        raise NotFused(f"{name} is not causal")
    if getattr(config, "clip_qkv", None) is not None:
        raise NotFused(f"{name} clips queries, keys and values")
    num_query, num_key, size = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
    rows = [num_query * size, num_key * size, num_key * size]
    if num_rows not in (rows, [sum(rows)]) or num_columns != rows[0]:
        raise NotFused(f"{name} has projections of unexpected sizes")
    if not hasattr(attention, "q_norm"):
        return Heads(num_query, num_key, size)
    norms = [_norm(module, family) for module in (attention.q_norm, attention.k_norm)]
    lengths = [norm.weight.numel() for norm in norms if norm.weight is not None]
    if norms[0].eps != norms[1].eps or lengths not in ([size, size], rows[:2]):
        raise NotFused(f"{name} has norms of unexpected sizes")
    return Heads(num_query, num_key, size, *norms)


def _form(attention: Any, family: Family) -> AttentionForm:
    """What the family's attention module passes on to the attention function."""
    source = {None: None, "module": attention, "config": attention.config}[family.window]
    softcap = attention.attn_logit_softcapping if family.softcap else None
    return AttentionForm(attention.scaling, None if source is None else source.sliding_window, softcap)


def _mlp_parts(mlp: nn.Module) -> tuple[list[nn.Linear], nn.Linear, Activation]:
    packed = _known_names(mlp, _MLP, _MLP_PACKED) == _MLP_PACKED
    gate_up = _linears(mlp, ["gate_up_proj"] if packed else ["gate_proj", "up_proj"])
    (down,) = _linears(mlp, ["down_proj"])
    if sum(layer.out_features for layer in gate_up) != 2 * down.in_features:
        raise NotFused(f"{type(mlp).__name__} has projections of unexpected sizes")
    activation = type(mlp.activation_fn if packed else mlp.act_fn).__name__
    if activation not in ACTIVATIONS:
        raise NotFused(f"{type(mlp).__name__} has the activation {activation}, not {' or '.join(ACTIVATIONS)}")
    return gate_up, down, ACTIVATIONS[activation]


def _norm(module: nn.Module, family: Family) -> Norm:
    name = type(module).__name__
    if family.centred:
        if not name.endswith("LayerNorm") or list(module.parameters()):
            raise NotFused(f"{name} is not a LayerNorm without weights")
        return Norm(None, 1e-5, centred=True)
    if not name.endswith("RMSNorm"):
        raise NotFused(f"{name} is not an RMSNorm")
    _known_names(module, frozenset({"weight"}))
    eps = module.eps if family.plus_one else module.variance_epsilon
    assert isinstance(eps, float) and isinstance(module.weight, Tensor)
    return Norm(module.weight, eps, family.rounds_first, family.plus_one)


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """Plain linear layers that can be stacked: the same input, number format and device, all with or without bias."""
    layers: list[nn.Linear] = [getattr(module, name) for name in names]
    for name, layer in zip(names, layers, strict=True):
        if type(layer) is not nn.Linear:
            raise NotFused(f"{type(module).__name__}.{name} is a {type(layer).__name__}, not a plain Linear")
    if len({(x.in_features, x.weight.dtype, x.weight.device, x.bias is None) for x in layers}) > 1:
        raise NotFused(f"{type(module).__name__} has {', '.join(names)} that do not stack")
    return layers


def _known_names(module: nn.Module, *known: frozenset[str]) -> frozenset[str]:
    """Which of the known sets of names the module's children and own tensors are; exactly."""
    names = {name for name, child in module.named_children() if name not in ("rotary_fn", "apply_rotary_pos_emb")}
    names |= {name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]}
    if names in known:
        return frozenset(names)
    nearest = max(known, key=lambda wanted: len(wanted & names))
    if missing := sorted(nearest - names):
        raise NotFused(f"{type(module).__name__} has no {', '.join(missing)}")
    raise NotFused(f"{type(module).__name__} has {', '.join(sorted(names - nearest))}, unknown to models/recognise.py")


def _check_untouched(module: nn.Module, *, hooks: bool) -> None:
    """What was put onto a module from outside would no longer run; hooks of the layer itself still do."""
    if "forward" in vars(module) or (hooks and (module._forward_hooks or module._forward_pre_hooks)):
        raise NotFused(f"{type(module).__name__} has hooks or a forward from outside")


def _family(module: nn.Module) -> str:
    """The family by the file of its class: only there is the arithmetic known."""
    *_, folder, file = ["", "", *type(module).__module__.split(".")]
    if folder in FAMILIES and type(module).__module__ == f"transformers.models.{folder}.{file}":
        return folder
    raise NotFused(f"{type(module).__name__} is of no family known to models/recognise.py")
