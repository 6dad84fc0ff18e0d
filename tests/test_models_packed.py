"""The packed forward against Hugging Face's own, family by family; the CPU kernel against its twin; the refusals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, build_family, family_config, small_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, PreTrainedModel

from slipstream.models.attention import ATTENTION_NAME, AttentionForm, attend_causally
from slipstream.models.cached import CachedRows, KVPages
from slipstream.models.loading import _refuse_unseen_attention, load_model, refuse_unserved
from slipstream.models.packed import document_hidden, head_logits, row_logits

CPU = torch.device("cpu")
PAGE_TOKENS = 32
LENGTHS = (20, 13, 17, 9)
SEQUENCES = [torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
PAGES = (2, 0, 3, 1)
RAGGED_PREFILL = [(0, 0, 15), (1, 0, 8), (2, 0, 12)]
MIXED = [(0, 15, 1), (1, 8, 5), (3, 0, 9), (2, 12, 5)]  # decode, verify, fresh prefill, verify
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def without_gradients():  # type: ignore[no-untyped-def]
    with torch.no_grad():
        yield


@cache
def reference(family: str) -> list[Tensor]:
    """Logits of each sequence alone, by Hugging Face's eager attention."""
    model = build_family(family, "eager")
    with torch.no_grad():
        return [model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float() for ids in SEQUENCES]


def packed(
    model: PreTrainedModel, pages: KVPages, cuts: Sequence[tuple[int, int, int]], shift: int = 0
) -> list[Tensor]:
    """One forward over (sequence, first position, tokens) cuts; the logits of each. `shift` plants wrong positions."""
    rows = CachedRows(pages, [(PAGES[which], start, length) for which, start, length in cuts], CPU)
    rows.position_T += shift
    ids = torch.cat([SEQUENCES[which][start : start + length] for which, start, length in cuts])
    logits = row_logits(model, ids, rows, torch.arange(len(ids)))
    return list(logits.split([length for _, _, length in cuts]))


def relative_error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    scale = max(float(tensor.abs().max()) for tensor in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)) / scale


def mixed_error(family: str, shift: int = 0) -> float:
    model, pages = build_family(family, ATTENTION_NAME), KVPages(4, PAGE_TOKENS)
    packed(model, pages, RAGGED_PREFILL)
    got = packed(model, pages, MIXED, shift)
    return relative_error(got, [reference(family)[which][start : start + n] for which, start, n in MIXED])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_of_decode_verify_and_prefill_rows_equals_each_sequence_alone(family: str) -> None:
    assert mixed_error(family) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_and_the_head_give_the_modules_own_logits(family: str) -> None:
    model = build_family(family, ATTENTION_NAME)
    logits = head_logits(model, document_hidden(model, torch.cat(SEQUENCES), LENGTHS))
    assert relative_error(logits.split(LENGTHS), reference(family)) < TOLERANCE


def test_a_position_off_by_one_is_noticed() -> None:
    assert mixed_error("llama", shift=1) > 100 * TOLERANCE


def test_a_family_feature_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each feature that AttentionForm carries changes the output, so the comparison above would see it missing."""
    whole = CachedRows.attend
    for feature, family in {"sliding_window": "mistral", "softcap": "gemma2", "sinks_H": "gpt_oss"}.items():

        def without(self, layer, query, key, value, form, feature=feature):  # type: ignore[no-untyped-def]
            fields = {name: getattr(form, name) for name in AttentionForm.__slots__}
            return whole(self, layer, query, key, value, AttentionForm(**fields | {feature: None}))

        monkeypatch.setattr(CachedRows, "attend", without)
        assert mixed_error(family) > 100 * TOLERANCE, feature


def test_a_head_without_its_scaling_is_noticed() -> None:
    for family in ("granite", "cohere", "gemma2"):
        model = build_family(family, ATTENTION_NAME)
        hidden = document_hidden(model, torch.cat(SEQUENCES), LENGTHS)
        bare = model.get_output_embeddings()(hidden)
        assert relative_error(bare.split(LENGTHS), reference(family)) > 100 * TOLERANCE, family


FORMS = {
    "plain": AttentionForm(0.3),
    "window": AttentionForm(0.3, sliding_window=5),
    "softcap": AttentionForm(0.3, softcap=1.5),
    "sinks": AttentionForm(0.3, sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "everything": AttentionForm(0.3, 5, 1.5, torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("value_size", [8, 6])
def test_the_cpu_kernel_equals_its_plain_twin(name: str, value_size: int) -> None:
    torch.manual_seed(1)
    pages, rows = KVPages(3, 24), [(1, 0, 11), (0, 0, 1), (2, 0, 20)]
    num_tokens = sum(length for _, _, length in rows)
    query, key, value = (torch.randn(num_tokens, *shape) for shape in ((4, 8), (2, 8), (2, value_size)))
    got = CachedRows(pages, rows, CPU).attend(0, query, key, value, FORMS[name])
    lengths = [length for _, _, length in rows]
    for mine, *inputs in zip(*(tensor.split(lengths) for tensor in (got, query, key, value)), strict=True):
        torch.testing.assert_close(mine, attend_causally(*inputs, FORMS[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_the_gpu_form_of_cached_attention_equals_the_cpu_kernel(name: str) -> None:
    """The by-row form runs on any device; here on the CPU, called by name."""
    torch.manual_seed(2)
    pages = KVPages(4, 24)
    key, value = torch.randn(2, 46, 2, 8).unbind(0)
    filled = CachedRows(pages, [(0, 0, 20), (1, 0, 11), (3, 0, 15)], CPU)
    filled.attend(0, torch.randn(46, 4, 8), key, value, FORMS[name])
    rows = CachedRows(pages, [(0, 20, 1), (3, 15, 5), (1, 11, 1), (2, 0, 7)], CPU)
    query, key, value = torch.randn(14, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    by_token = rows.attend(0, query, key, value, FORMS[name])
    by_row = rows._by_row(query, *pages.layers[0], FORMS[name])
    torch.testing.assert_close(by_row, by_token, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_attention_of_a_token_has_the_same_bits_however_its_row_is_cut(name: str) -> None:
    """Decode, verify and chunked prefill, alone or among other rows: equal to the bit."""
    torch.manual_seed(3)
    length, form = 21, FORMS[name]
    query, key, value = torch.randn(length, 4, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)

    def run(cuts: Sequence[int], company: int) -> Tensor:
        pages, outs, at = KVPages(3, 24), [], 0
        for cut in cuts:
            others = [torch.randn(company, heads, 8) for heads in (4, 2, 2)]
            mine = [tensor[at : at + cut] for tensor in (query, key, value)]
            rows = CachedRows(pages, [(0, 0, company), (2, at, cut)] if company else [(2, at, cut)], CPU)
            packed = [torch.cat(pair) for pair in zip(others, mine, strict=True)]
            outs.append(rows.attend(0, *packed, form)[company:])
            at += cut
        return torch.cat(outs)

    whole = run([length], company=0)
    for cuts in ([1] * length, [7, 5, 9], [16, 1, 4], [20, 1]):
        for company in (0, 13):
            assert torch.equal(run(cuts, company), whole), (cuts, company)


def test_a_finished_pages_leftovers_are_never_read() -> None:
    model, pages = small_llama(), KVPages(4, PAGE_TOKENS)
    packed(model, pages, [(0, 0, 20)])
    clean = packed(model, KVPages(4, PAGE_TOKENS), [(1, 0, 13)])[0]
    pages.layers = {layer: tuple(tensor + 99 for tensor in both) for layer, both in pages.layers.items()}
    assert torch.equal(packed(model, pages, [(1, 0, 13)])[0], clean)


def save_tiny(config: object, folder: Path) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_layers_with_a_state_of_their_own_are_refused_by_type_and_name() -> None:
    config = family_config("qwen3_next", layer_types=["linear_attention", "full_attention"] * 2)
    with pytest.raises(ValueError, match=r"'acme/next'.*linear_attention.*served: full_attention"):
        refuse_unserved(config, "acme/next")


def test_models_that_do_not_use_the_attention_interface_are_refused_by_name(tmp_path: Path) -> None:
    name = save_tiny(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine' \(bloom\) does not run all of its 2 layers through the attention"):
        load_model(name, dtype=torch.float32, device=CPU)


def test_state_space_models_are_refused_by_type_and_name(tmp_path: Path) -> None:
    small = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match=r"mine' has layers of type linear_attention"):
        load_model(save_tiny(small, tmp_path / "mine"), dtype=torch.float32, device=CPU)


def test_a_model_with_a_mask_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    name = save_tiny(family_config("doge", sliding_window=None), tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine' \(doge\): DogeAttention makes an attention mask of its own"):
        load_model(name, dtype=torch.float32, device=CPU)


def test_a_model_with_more_than_a_head_behind_its_hidden_states_is_refused_by_name(tmp_path: Path) -> None:
    name = save_tiny(family_config("modernbert-decoder"), tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine' \(modernbert-decoder\) does more behind its last hidden state"):
        load_model(name, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_served_family_is_refused(family: str) -> None:
    model = build_family(family, ATTENTION_NAME)
    refuse_unserved(model.config, family)
    _refuse_unseen_attention(model, family)


def test_a_served_folder_loads_with_our_attention(tmp_path: Path) -> None:
    name = save_tiny(family_config("qwen3"), tmp_path / "mine")
    model = load_model(name, dtype=torch.float32, device=CPU)
    assert model.config._attn_implementation == ATTENTION_NAME


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ValueError, match=r"\./nowhere"):
        load_model("./nowhere", dtype=torch.float32, device=CPU)
