"""The packed forward against Hugging Face's own, family by family; the CPU kernel against its twin; the refusals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, build_family, family_config, packed_rows, small_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, PreTrainedModel

from slipstream.models.attention import (
    ATTENTION_NAME,
    AttentionForm,
    Documents,
    computed_in,
    fits_flash,
    largest_flash_head,
)
from slipstream.models.cached import CachedRows, KVPages, attend_rows_plainly
from slipstream.models.loading import load_model, refuse_unserved
from slipstream.models.packed import document_hidden, head_logits, row_logits

CPU = torch.device("cpu")
PAGE_TOKENS = 8
NUM_PAGES = 13
# Four slots of three pages, scattered, and the trash slot.
TABLE = torch.tensor([[9, 2, 5], [0, 11, 7], [4, 1, 10], [8, 3, 6], [13, 13, 13]], dtype=torch.int32)
LENGTHS = (20, 13, 17, 9)
SEQUENCES = [torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
SLOTS = (2, 0, 3, 1)
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
    rows = packed_rows([(SLOTS[which], start, length) for which, start, length in cuts], TABLE, num_padding=3)
    rows.position_T.add_(shift)
    ids = torch.cat(
        [*(SEQUENCES[which][start : start + length] for which, start, length in cuts), torch.zeros(3).long()]
    )
    logits = row_logits(model, ids, pages, rows, torch.arange(len(ids) - 3))
    return list(logits.split([length for _, _, length in cuts]))


def relative_error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    scale = max(float(tensor.abs().max()) for tensor in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)) / scale


def mixed_error(family: str, shift: int = 0) -> float:
    model, pages = build_family(family, ATTENTION_NAME), KVPages(NUM_PAGES, PAGE_TOKENS)
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


@pytest.mark.parametrize("half", [True, False])
def test_under_autocast_attention_computes_in_bfloat16_whatever_it_is_given(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary positions are computed in float32, and a kernel that asks for 16 bits would never be taken."""
    seen = []
    plain = Documents.attend

    def attend(self: Documents, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        seen.append((query.dtype, computed_in(query), fits_flash(computed_in(query), 64, 64, 256, form)))
        return plain(self, layer, query, key, value, form)

    monkeypatch.setattr(Documents, "attend", attend)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        document_hidden(build_family("llama", ATTENTION_NAME), torch.cat(SEQUENCES), LENGTHS)
    assert set(seen) == {(torch.float32, torch.bfloat16, True) if half else (torch.float32, torch.float32, False)}


def test_what_the_flash_kernel_does_not_have_is_attended_to_one_by_one() -> None:
    half, form = torch.bfloat16, AttentionForm(0.1, sliding_window=4)
    assert fits_flash(half, 64, 64, 192, form) and fits_flash(torch.float16, 256, 256, 256, form)
    assert not fits_flash(torch.float32, 64, 64, 256, form)
    assert not any(fits_flash(half, size, size, 192, form) for size in (20, 200)) and not fits_flash(
        half, 64, 32, 256, form
    )
    assert not fits_flash(half, 64, 64, 256, AttentionForm(0.1, softcap=30.0))
    assert not fits_flash(half, 64, 64, 256, AttentionForm(0.1, sinks_H=torch.zeros(2)))
    assert largest_flash_head(CPU) == 0


@pytest.mark.parametrize(("capability", "largest"), [((7, 5), 0), ((8, 0), 256), ((8, 6), 192), ((9, 0), 256)])
def test_heads_that_flash_has_depend_on_the_gpu(
    capability: tuple[int, int], largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for is_there in (True, False):
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_there)  # noqa: B023
        assert largest_flash_head.__wrapped__(torch.device("cuda")) == (largest if is_there else 0)


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
    pages = KVPages(NUM_PAGES, PAGE_TOKENS)
    for cuts in ([(1, 0, 11), (0, 0, 1), (2, 0, 20)], [(0, 1, 6), (1, 11, 1), (3, 0, 9), (2, 20, 1)]):
        rows = packed_rows(cuts, TABLE, num_padding=2, num_empty=1)
        shapes = ((4, 8), (2, 8), (2, value_size))
        query, key, value = (torch.randn(len(rows.slot_T), *shape) for shape in shapes)
        got = CachedRows(pages, rows).attend(0, query, key, value, FORMS[name])
        wanted = attend_rows_plainly(query, *pages.layers[0], rows, FORMS[name])
        torch.testing.assert_close(got[:-2], wanted[:-2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_attention_of_a_token_has_the_same_bits_however_its_row_is_cut(name: str) -> None:
    """Decode, verify and chunked prefill, alone or among other rows: equal to the bit."""
    torch.manual_seed(3)
    length, form = 21, FORMS[name]
    query, key, value = torch.randn(length, 4, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)

    def run(cuts: Sequence[int], company: int) -> Tensor:
        pages, outs, at = KVPages(NUM_PAGES, PAGE_TOKENS), [], 0
        for cut in cuts:
            others = [torch.randn(company, heads, 8) for heads in (4, 2, 2)]
            mine = [tensor[at : at + cut] for tensor in (query, key, value)]
            cuts_now = [(0, 0, company), (2, at, cut)] if company else [(2, at, cut)]
            rows = CachedRows(pages, packed_rows(cuts_now, TABLE))
            packed = [torch.cat(pair) for pair in zip(others, mine, strict=True)]
            outs.append(rows.attend(0, *packed, form)[company:])
            at += cut
        return torch.cat(outs)

    whole = run([length], company=0)
    for cuts in ([1] * length, [7, 5, 9], [16, 1, 4], [20, 1]):
        for company in (0, 13):
            assert torch.equal(run(cuts, company), whole), (cuts, company)


def test_a_finished_pages_leftovers_are_never_read() -> None:
    model, pages = small_llama(), KVPages(NUM_PAGES, PAGE_TOKENS)
    packed(model, pages, [(0, 0, 20)])
    clean = packed(model, KVPages(NUM_PAGES, PAGE_TOKENS), [(1, 0, 13)])[0]
    pages.layers = {layer: tuple(tensor + 99 for tensor in both) for layer, both in pages.layers.items()}
    assert torch.equal(packed(model, pages, [(1, 0, 13)])[0], clean)


def save_tiny(config: object, folder: Path) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_layers_with_a_state_of_their_own_are_refused_by_type_and_name() -> None:
    config = family_config("qwen3_next", layer_types=["linear_attention", "full_attention"] * 2)
    with pytest.raises(ValueError, match=r"'acme/next'.*linear_attention.*served: full_attention"):
        refuse_unserved(config, "acme/next")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_batch_are_refused_by_name(kind: str) -> None:
    config = family_config("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=f"'acme/long'.*{kind}"):
        refuse_unserved(config, "acme/long")


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


def test_a_served_folder_loads_with_our_attention(tmp_path: Path) -> None:
    name = save_tiny(family_config("qwen3"), tmp_path / "mine")
    model = load_model(name, dtype=torch.float32, device=CPU)
    assert model.config._attn_implementation == ATTENTION_NAME


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ValueError, match=r"\./nowhere"):
        load_model("./nowhere", dtype=torch.float32, device=CPU)
