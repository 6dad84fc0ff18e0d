"""The drafter's forward in the engine's step: `eagle.DraftModel`, its plain twin, in a dozen kernels instead of fifty.

It shares the model's parameters, has no backward, and keeps its keys in the target's pages, as one more layer.

Axes: T packed tokens, D hidden size, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from slipstream.draft.eagle import DraftModel, Eagle3
from slipstream.models.cached import CachedRows, KVPages, PackedRows
from slipstream.models.fused import Heads, Norm, kernels_for, norm_rope_plainly, normalise_plainly
from slipstream.models.products import Product
from slipstream.models.rotary import Rotary

DRAFT_LAYER = -1
"""Of the pages: where the drafter's keys are."""


class FastDraft:
    def __init__(self, model: DraftModel, embeddings_VD: Tensor, pages: KVPages, max_length: int) -> None:
        config, layer = model.config, model.layer
        self._pages, self._form, self._embeddings_VD = pages, model.form, embeddings_VD
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self._heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        attention = layer.self_attn
        # No token depends on the bits of what is drafted.
        self._fc = Product([model.fc], exact=False)
        self._qkv = Product([attention.q_proj, attention.k_proj, attention.v_proj], exact=False)
        self._output = Product([attention.o_proj], exact=False)
        self._gate_up = Product([layer.mlp.gate_proj, layer.mlp.up_proj], "silu", exact=False)
        self._down = Product([layer.mlp.down_proj], exact=False)
        self._of_mlp = _norm(layer.post_attention_layernorm)
        self._of_inputs, self._last = None, None
        if isinstance(model, Eagle3):
            self._of_inputs = _norm(model.midlayer.input_layernorm), _norm(model.midlayer.hidden_norm)
            self._last = _norm(model.norm)
        num_places = -(-max_length // pages.page_tokens) * pages.page_tokens
        positions = torch.arange(num_places, device=model.fc.weight.device)
        with torch.no_grad():
            self._cosines, self._sines = model.turns(positions)

    def refresh(self) -> None:
        """The parameters were written."""
        for product in (self._fc, self._qkv, self._output, self._gate_up, self._down):
            product.refresh()

    def fuse(self, features_TF: Tensor) -> Tensor:
        return features_TF.contiguous() if self._of_inputs is None else self._fc(features_TF)

    def remember(self, next_T: Tensor, hidden_TD: Tensor, rows: PackedRows) -> None:
        """Write keys and values, and nothing else: they follow from the input alone, in a model of one layer."""
        self._write(next_T, hidden_TD, rows)

    def forward(self, next_T: Tensor, hidden_TD: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """The hidden states with which drafting goes on, and what goes to the target's head."""
        kernels = kernels_for(hidden_TD)
        hidden_TD, query, keys, values = self._write(next_T, hidden_TD, rows)
        attended_TD = CachedRows(self._pages, rows).read(query, keys, values, self._form).flatten(1)
        hidden_TD, normed_TD = kernels.add_norm(hidden_TD, self._output(attended_TD), None, 1.0, self._of_mlp)
        inner = self._gate_up.activated(normed_TD, "silu", kernels.act_mul)
        hidden_TD, normed_TD = kernels.add_norm(hidden_TD, self._down(inner), None, 1.0, self._last)
        return hidden_TD, hidden_TD if normed_TD is None else normed_TD

    def _write(self, next_T: Tensor, hidden_TD: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the layer adds to; query, and all keys and values."""
        kernels, heads, join = kernels_for(hidden_TD), self._heads, join_plainly
        if hidden_TD.is_cuda:
            from slipstream.draft import triton_eagle  # a machine without a GPU may lack triton

            join = triton_eagle.join
        if self._of_inputs is None:
            inputs = hidden_TD = self._fc(torch.cat([self._embeddings_VD[next_T], hidden_TD], -1))
        else:
            inputs = join(next_T, self._embeddings_VD, hidden_TD, *self._of_inputs)
        qkv = self._qkv(inputs)
        rotary = Rotary(self._cosines, self._sines, rows.position_T)
        if kernels.norm_rope_write is None:
            query, key, value = norm_rope_plainly(qkv, heads, rotary)
            keys, values = CachedRows(self._pages, rows).write(DRAFT_LAYER, key, value)
            return hidden_TD, query, keys, values
        views = qkv.unflatten(-1, (-1, heads.size))[:, heads.num_query :].chunk(2, 1)  # only their shapes are read
        keys, values = self._pages.of_layer(DRAFT_LAYER, *views)
        return hidden_TD, kernels.norm_rope_write(qkv, heads, rotary, rows, keys, values), keys, values


def _norm(module: LlamaRMSNorm) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


def join_plainly(ids_T: Tensor, embeddings_VD: Tensor, hidden_TD: Tensor, of_embeds: Norm, of_hidden: Norm) -> Tensor:
    return torch.cat([normalise_plainly(embeddings_VD[ids_T], of_embeds), normalise_plainly(hidden_TD, of_hidden)], -1)
