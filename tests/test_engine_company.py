"""Whatever runs beside a rollout, and however little room there is for it, it is the same to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engine import PROMPT, PROMPTS, build_engine, run
from tiny_models import COMMON, group, wide_gpt2, wide_llama
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from slipstream.engine import step as step_module
from slipstream.engine.engine import Engine
from slipstream.engine.sampling import sample_rows
from slipstream.models import heights
from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.loading import load_model
from slipstream.types import Request


def company(num_groups: int, size: int, **sampling: Any) -> list[list[Request]]:
    return [group(f"other{number}", PROMPTS[number % 16], size, **sampling) for number in range(num_groups)]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a processor without it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_sequences", [pytest.param(1, marks=pytest.mark.slow), 5, 40])
def test_a_rollout_alone_and_among_31_others_is_the_same(dtype: torch.dtype, max_sequences: int) -> None:
    """Tokens and log-probabilities, to the bit."""
    mine, cut = group("mine", PROMPT, 1), group("cut", PROMPTS[7], 1, top_k=3)
    alone = run(build_engine(dtype=dtype), [mine])
    alone |= run(build_engine(dtype=dtype), [cut])
    among = run(build_engine(dtype=dtype, max_sequences=max_sequences), [*company(15, 2), mine, cut])
    assert len(among) == 32 and all(among[uid] == alone[uid] for uid in ("mine/0", "cut/0"))
    assert not alone["mine/0"].log_kept and len(alone["cut/0"].log_kept) == len(alone["cut/0"].token_ids)


def test_a_rollout_of_the_quickstart_model_is_the_same_alone_and_among_others() -> None:
    model = load_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    mine = group("mine", PROMPT, 2, max_new_tokens=8)
    alone = run(Engine(model, max_sequences=4, max_length=64), [mine])
    for num_groups, max_sequences in ((6, 20), (28, 150)):  # steps of some 20 tokens, and of the full 128
        engine = Engine(model, max_sequences=max_sequences, max_length=64)
        among = run(engine, [*company(num_groups, 5, max_new_tokens=8), mine])
        assert all(among[uid] == alone[uid] for uid in alone)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("build", "fused"), [(wide_llama, True), (wide_llama, False), (wide_gpt2, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rollout_of_a_wide_model_is_the_same_alone_and_among_others(
    build: Callable[[torch.dtype], PreTrainedModel], dtype: torch.dtype, fused: bool
) -> None:
    """With AMX a step of 12 to 32 rows of bfloat16 gave others before they were padded; without, one of 16 to 56."""
    model, mine = build(dtype), group("mine", PROMPT, 2, max_new_tokens=8)
    alone = run(Engine(model, max_sequences=1, max_length=64, fused=fused), [mine])
    for num_groups, max_sequences in ((2, 12), (6, 30), (10, 50), (25, 128)):
        engine = Engine(model, max_sequences=max_sequences, max_length=64, fused=fused)
        among = run(engine, [*company(num_groups, 5, max_new_tokens=8), mine])
        assert all(among[uid] == alone[uid] for uid in alone)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "mish"])
@pytest.mark.parametrize("inner_size", [33, 700])
def test_a_rollout_of_an_unfused_model_with_an_odd_inner_size_is_the_same_alone_and_among_others(
    inner_size: int, activation: str
) -> None:
    """The last numbers of a step are computed by other instructions than those before, in threads' shares too."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "intermediate_size": inner_size, "hidden_act": activation}
    model = LlamaForCausalLM(LlamaConfig(**COMMON | sizes | {"initializer_range": 0.3}))
    model.set_attn_implementation(ATTENTION_NAME)
    mine = group("mine", PROMPT, 2, max_new_tokens=6)
    alone = run(Engine(model.eval(), max_sequences=2, max_length=64, fused=False), [mine])
    for num_groups, max_sequences in ((3, 17), (12, 62)):
        engine = Engine(model, max_sequences=max_sequences, max_length=64, fused=False)
        among = run(engine, [*company(num_groups, 5, max_new_tokens=6), mine])
        assert all(among[uid] == alone[uid] for uid in alone)


def test_where_products_have_no_common_height_exactness_is_refused_and_can_be_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heights, "heights_of", lambda form: (7,))
    with pytest.raises(ValueError, match=r"or write engine\.exact: false"):
        build_engine(fused=False)
    mine = group("mine", PROMPT, 1)
    found, wanted = (run(build_engine(**how), [mine])["mine/0"] for how in ({"fused": False, "exact": False}, {}))
    assert found.token_ids == wanted.token_ids


def test_noise_that_depends_on_the_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(logits, rows, **kwargs):  # type: ignore[no-untyped-def]
        places = torch.arange(len(logits)).unsqueeze(1).expand(-1, 2)
        return sample_rows(logits, dataclasses.replace(rows, seed_N2=places), **kwargs)

    monkeypatch.setattr(step_module, "sample_rows", by_place)
    mine = group("mine", PROMPT, 1)
    alone, among = run(build_engine(), [mine]), run(build_engine(), [*company(3, 2), mine])
    assert among["mine/0"] != alone["mine/0"]


def test_a_group_larger_than_the_pages_gives_what_a_roomy_engine_gives() -> None:
    requests = group("g", PROMPT, 12)
    roomy = run(build_engine(max_sequences=12), [requests])
    for pages in (1, 2, 5):
        assert run(build_engine(max_sequences=pages), [requests]) == roomy
    assert len({rollout.token_ids for rollout in roomy.values()}) == 12, "samples differ"


def test_more_sequences_than_step_tokens_give_what_a_few_give() -> None:
    requests = [group(f"g{number}", PROMPTS[number % 16], 5, max_new_tokens=4) for number in range(30)]
    engine = build_engine(max_sequences=150)
    assert run(engine, requests) == run(build_engine(max_sequences=16), requests)


def test_a_prompt_longer_than_a_step_is_prefilled_in_chunks() -> None:
    prompt = tuple(3 + place % 90 for place in range(300))
    alone = run(build_engine(max_length=320), [group("g", prompt, 2)])
    among = run(build_engine(max_length=320), [*company(4, 2), group("g", prompt, 2)])
    assert all(among[uid] == alone[uid] for uid in alone)
