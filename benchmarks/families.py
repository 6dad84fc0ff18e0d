"""Every family of causal language models in transformers: is it served, and are its logits right if it is?

    python benchmarks/families.py --out benchmarks/results/families.json
    python benchmarks/families.py llama bart --dtype bfloat16

A tiny model of each, its sliding windows shorter than the sequences. The parity check of `models/parity.py` says
whether it is served; then packed rows, of the layers as they are and fused, and packed documents are compared with
Hugging Face's eager attention on each sequence alone, in float32: the number format is that of the weights when the
check sees them. A family that is served with other logits than rounding explains
ends the script with 1. Families whose tiny model cannot be built are listed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.cached import KVPages, PackedRows
from slipstream.models.loading import refuse_unserved
from slipstream.models.packed import document_hidden, head_logits, row_logits
from slipstream.models.parity import bound, check_parity, difference
from slipstream.models.recognise import fuse
from slipstream.runtime.benches import describe_machine

VOCABULARY = 97
NAMES_OF_SIZES: dict[int, str] = {
    32: "hidden_size d_model n_embd dim n_embed embedding_size embed_dim word_embed_proj_dim embedding_dim hidden_dim "
    "encoder_hidden_size cross_attention_hidden_size emb_dim dim_model",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff d_inner feed_forward_size "
    "shared_expert_intermediate_size shared_intermediate_size",
    2: "num_hidden_layers n_layer n_layers decoder_layers encoder_layers num_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k "
    "top_k_experts moe_top_k bos_token_id",
    4: "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts mamba_n_heads mamba_num_heads linear_num_key_heads linear_num_value_heads index_n_heads "
    "mamba_expand",
    8: "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim dim_head attention_head_dim d_kv kv_channels",
    VOCABULARY: "vocab_size",
    VOCABULARY - 1: "vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions "
    "max_sequence_length",
    6: "sliding_window",
    24: "moe_intermediate_size expert_ffn_hidden_size intermediate_size_mlp expert_intermediate_size",
    1: "n_group topk_group num_expert_group pad_token_id n_shared_experts num_shared_experts moe_num_shared_experts "
    "first_k_dense_replace",
    16: "q_lora_rank kv_lora_rank mamba_d_state ssm_state_size state_size mamba_d_head mamba_head_dim index_head_dim "
    "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input",
    3: "eos_token_id decoder_start_token_id",
}
SIZES = {name: size for size, names in NAMES_OF_SIZES.items() for name in names.split()}
MAY_BE_NONE = {"head_dim", "q_lora_rank", "sliding_window"}
LATENT = {"num_key_value_heads": 4}
HEADS = {"head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 4}
# What a family needs beside, so that a tiny model of it can be built, and so that its own feature is at work.
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), LATENT | {"index_topk": 4, "num_hidden_layers": 4}),
    **dict.fromkeys(("bamba", "granitemoehybrid"), MAMBA),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), HEADS),
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
WINDOWED = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}
"""For families whose windows are off by default: they are looked at a second time, with these."""

PAGE_TOKENS = 8
TABLE_SW = torch.tensor([[9, 2, 5], [0, 11, 7], [4, 1, 10], [8, 3, 6], [13, 13, 13]], dtype=torch.int32)
LENGTHS = (20, 13, 17, 9)
SEQUENCES = [torch.randint(4, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
STEPS = (
    [(0, 0, 15), (1, 0, 8), (2, 0, 12)],
    [(0, 15, 1), (1, 8, 1), (2, 12, 1), (3, 0, 9)],
    [(0, 16, 4), (1, 9, 4), (2, 13, 4)],
)
"""Sequence, first position and number of tokens of each row: prefill, decode beside prefill, verify."""


def sizes_of(config: PretrainedConfig) -> dict[str, int]:
    """Small values for the sizes that a config has."""
    aliases, values, sizes = config.attribute_map or {}, config.to_dict(), dict[str, int]()
    for name in {*values, *aliases} & SIZES.keys():
        value = values.get(aliases.get(name, name))
        is_size = type(value) is int or (value is None and name not in MAY_BE_NONE)
        if is_size and aliases.get(name) not in SIZES:
            sizes[name] = SIZES[name]
    return sizes


def tiny_config(family: str, changes: dict[str, Any]) -> PretrainedConfig:
    kind = CONFIG_MAPPING[family]
    default = kind()
    sizes: dict[str, Any] = dict(sizes_of(default))
    for name in kind.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            sizes[name] = {"model_type": part.model_type, **sizes_of(part)}
    config = kind(**sizes | CHANGES.get(family, {}) | changes)
    config.is_decoder = True
    return config


def may_have_windows(family: str) -> bool:
    try:
        values = CONFIG_MAPPING[family]().to_dict()
    except Exception:  # what is wrong with it is found again, and told, when its model is built
        return False
    return "sliding_window" in values and (values["sliding_window"] is None or "use_sliding_window" in values)


def tiny_model(family: str, dtype: torch.dtype, changes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(family, changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def packed(model: PreTrainedModel, pages: KVPages, cuts: list[tuple[int, int, int]]) -> list[Tensor]:
    lengths, trash = [length for *_, length in cuts], len(TABLE_SW) - 1
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = PackedRows(
        slot_T=torch.tensor([which for which, _, length in cuts for _ in range(length)] + [trash]),
        position_T=torch.tensor([start + i for _, start, length in cuts for i in range(length)] + [0]),
        slot_R=torch.tensor([which for which, *_ in cuts]),
        start_R1=ends.int(),
        length_R=torch.tensor([start + length for _, start, length in cuts], dtype=torch.int32),
        table_SW=TABLE_SW,
    )
    ids = torch.cat(
        [*(SEQUENCES[which][start : start + length] for which, start, length in cuts), torch.zeros(1).long()]
    )
    return list(row_logits(model, ids, pages, rows, torch.arange(len(ids) - 1)).split(lengths))


def by_pages(model: PreTrainedModel) -> list[Tensor]:
    """Logits of the decode rows together, of the prefill beside them, and of the verify rows."""
    pages = KVPages(num_pages=13, page_tokens=PAGE_TOKENS)
    steps = [packed(model, pages, cuts) for cuts in STEPS]
    return [torch.cat(steps[1][:3]), steps[1][3], torch.cat(steps[2])]


def by_documents(model: PreTrainedModel) -> list[Tensor]:
    hidden = document_hidden(model, torch.cat(SEQUENCES), LENGTHS)
    return list(head_logits(model, hidden).split(LENGTHS))


def excess(got: list[Tensor], own: list[Tensor]) -> float:
    """Difference of the worst sequence, as a share of what rounding explains."""
    most = bound(torch.cat(own))
    return max(difference(a, b) for a, b in zip(got, own, strict=True)) / most


def alone(model: PreTrainedModel) -> list[Tensor]:
    return [model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0] for ids in SEQUENCES]


@torch.no_grad()
def look_at(family: str, dtype: torch.dtype, changes: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"family": family, **({"changes": changes} if changes else {})}
    try:
        model = tiny_model(family, dtype, changes)
        alone(model)
    except Exception as error:
        return row | {"outcome": "not built", "reason": f"{type(error).__name__}: {error}"[:200]}
    try:
        refuse_unserved(model.config, family)
        model.set_attn_implementation(ATTENTION_NAME)
        check_parity(model, family)
    except ValueError as error:
        return row | {"outcome": "refused", "reason": str(error)}
    model.float().set_attn_implementation("eager")
    own = alone(model)
    model.set_attn_implementation(ATTENTION_NAME)
    wanted = [[own[which][start : start + length] for which, start, length in cuts] for cuts in STEPS[1:]]
    cuts = [torch.cat(wanted[0][:3]), wanted[0][3], torch.cat(wanted[1])]
    row |= {"documents": excess(by_documents(model), own), "rows": excess(by_pages(model), cuts)}
    fusion = fuse(model)
    row |= {"fused_layers": len(fusion.fused), "rows_fused": excess(by_pages(model), cuts)}
    right = max(row["documents"], row["rows"], row["rows_fused"]) <= 1
    return row | {"outcome": "served" if right else "WRONG"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="by default all")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    dtype, rows = getattr(torch, arguments.dtype), list[dict[str, Any]]()
    for family in arguments.families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if family == "blt":
            continue  # its patcher has 96 million parameters whatever the config
        for changes in ({}, WINDOWED) if may_have_windows(family) else ({},):
            rows.append(look_at(family, dtype, changes))
            print(json.dumps(rows[-1]), flush=True)
    counts = Counter(row["outcome"] for row in rows)
    worst = max(
        (row[name] for row in rows if row["outcome"] == "served" for name in ("documents", "rows", "rows_fused")),
        default=0.0,
    )
    print(f"{dict(counts)}; of what rounding explains the served ones need {worst:.3g} at most")
    if arguments.out:
        record = describe_machine(torch.device("cpu"), dtype) | {"counts": counts, "worst_share": worst, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if counts["WRONG"] else 0)


if __name__ == "__main__":
    main()
