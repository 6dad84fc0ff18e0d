"""The parity check: a model is served only if packed rows give the logits of its own forward of each sequence alone.

Owns what is compared, the bound, and the refusals. `load_model` runs it on every model before it leaves the CPU. The
reference is Hugging Face's eager attention, with the positions, masks and biases that the module makes for itself.
Against it run the engine's forward (prefill, decode and verify rows of several sequences in one batch, over pages) and
the trainer's (packed documents). Attention over pages runs as its plain twin: tests compare the kernels with that.

Logits at a few positions cannot show a sliding window of thousands of tokens, so the mask that Hugging Face would build
is compared at far positions with the window that the layer passes to attention.

Axes: B sequences, L tokens of each, T packed tokens, N rows that want logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from slipstream.models.attention import ATTENTION_NAME, AttentionForm
from slipstream.models.cached import CachedRows, KVPages, PackedRows, attend_rows_plainly
from slipstream.models.packed import document_hidden, head_logits, logits_of

NUM_SEQUENCES, LENGTH = 2, 6
PAGE_TOKENS = 2
NUM_PADDING = 2
"""Tokens at the end of a step that belong to no row."""
NUM_PAGES = 15
TABLE_SW = ((9, 2, 5), (0, 11, 7), (4, 1, 10), (8, 14, 3), (6, 13, 12), (NUM_PAGES,) * 3)
"""Pages of five slots, scattered, and of the trash slot."""

Cut = tuple[int, int, int, int]
"""Of a row: its slot, its sequence, its first position and its number of tokens."""
STEPS: tuple[dict[str, tuple[Cut, ...]], ...] = (
    {"prefill": ((0, 0, 0, 4), (1, 1, 0, 1), (2, 1, 0, 3), (3, 0, 0, 2))},
    {
        "decode": ((0, 0, 4, 1), (1, 1, 1, 1), (2, 1, 3, 1)),
        "verify": ((3, 0, 2, 3),),
        "prefill beside them": ((4, 1, 0, 6),),
    },
)
DOCUMENTS = ((0, 6), (1, 4), (0, 2))
"""Of a trainer's batch: sequence and number of tokens."""
NO_LIMIT = 1 << 20
"""Positions at which masks are compared if the config has no `max_position_embeddings`."""

Mask = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""Whether a query position attends to a key position: (batch, head, query, key), as in `transformers.masking_utils`."""


@torch.no_grad()
def check_parity(model: PreTrainedModel, name: str) -> None:
    """ValueError says what about the model cannot be served or trained. In float32, whatever format its weights have:
    rounding to 16 bits, and the experts it chooses, would hide a small error."""
    who = f"model {name!r} ({model.config.model_type})"
    was_training, ids_BL = model.training, _probe_ids(model)
    model.eval()
    try:
        with _in_float32(model):
            _check(model, ids_BL, who)
    finally:
        model.train(was_training)


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """The way there and back changes no bit."""
    narrow = [
        (tensor, tensor.dtype)
        for tensor in chain(model.parameters(), model.buffers())
        if tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 32
    ]
    try:
        for tensor, _ in narrow:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in narrow:
            tensor.data = tensor.data.to(dtype)


def _check(model: PreTrainedModel, ids_BL: Tensor, who: str) -> None:
    with _refusing(who, "its own forward"):
        own_BLV, masks = _alone(model, ids_BL)
    _refuse_broken(own_BLV, who)
    asked: list[tuple[int, AttentionForm]] = []
    with _refusing(who, "the packed forward"):
        packed = _by_pages(model, ids_BL, asked)
    _refuse_unseen_layers(model, [layer for layer, _ in asked], who)
    _refuse_other_logits(packed, own_BLV, who)
    _refuse_other_masks(model, masks, dict(asked), who)
    with _refusing(who, "the trainer's forward"):
        trained = _by_documents(model, ids_BL)
    _refuse_other_head(trained, own_BLV, who)


def bound(own: Tensor) -> float:
    """Largest root mean square difference from these logits that rounding explains.

    Half the digits of the number format are left to the errors that accumulate from layer to layer, measured by how
    much logits differ from token to token; and one rounding of the logits themselves. Errors in float32 stay hundreds
    of times below it, and a wrong position, mask or neighbour lies hundreds of times above (benchmarks/families.py).
    """
    eps = torch.finfo(own.dtype).eps
    wide = own.float().flatten(0, -2)
    spread, size = (wide - wide.mean(0)).square().mean().sqrt(), wide.square().mean().sqrt()
    return float(eps**0.5 * spread + 2 * eps * size)


def difference(got_TV: Tensor, own_TV: Tensor) -> float:
    """Root mean square over the vocabulary, of the median token: for one with narrow margins rounding may choose other
    experts."""
    return float((got_TV.float() - own_TV.float()).square().mean(-1).sqrt().median())


def _probe_ids(model: PreTrainedModel) -> Tensor:
    """Sequences of different tokens, none with a meaning of its own."""
    config = model.config.get_text_config()
    embeddings_VD = model.get_input_embeddings().weight
    assert isinstance(embeddings_VD, Tensor)
    named = [value for key, value in config.to_dict().items() if key.endswith("_token_id")]
    special = {one for value in named for one in (value if isinstance(value, list) else [value])}
    plain = [token for token in range(min(len(embeddings_VD), 1000)) if token not in special] or [0]
    stride = max(1, len(plain) // (NUM_SEQUENCES * LENGTH))
    ids = [plain[place * stride % len(plain)] for place in range(NUM_SEQUENCES * LENGTH)]
    return torch.tensor(ids).view(NUM_SEQUENCES, LENGTH)


@contextmanager
def _refusing(who: str, what: str) -> Iterator[None]:
    """What a module raises when it is called in a way it was not made for is a reason not to serve it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{who} cannot be served: {what} fails ({type(error).__name__}: {error})") from error


def _alone(model: PreTrainedModel, ids_BL: Tensor) -> tuple[Tensor, dict[int, Mask]]:
    """The module's own logits, and by layer the masks that it built."""
    with _eager(model), _recording_masks(model) as masks:
        out = model(input_ids=ids_BL, use_cache=False)
    return out.logits, masks


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def _recording_masks(model: PreTrainedModel) -> Iterator[dict[int, Mask]]:
    """Of each layer whose attention gets a mask that Hugging Face built from a function of positions: that function."""
    built: list[tuple[Tensor, Mask]] = []
    by_layer: dict[int, Mask] = {}
    build = ALL_MASK_ATTENTION_FUNCTIONS["eager"]

    def build_and_note(*args: Any, mask_function: Mask, **options: Any) -> Any:
        mask = build(*args, mask_function=mask_function, **options)
        built.append((mask, mask_function))
        return mask

    def note_layer(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = (*args, *options.values())
        for mask, function in built:
            if any(mask is one for one in given):
                by_layer[module.layer_idx] = function  # type: ignore[index]

    hooks = [
        module.register_forward_pre_hook(note_layer, with_kwargs=True)
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
    ]
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = build_and_note
    try:
        yield by_layer
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]
        for hook in hooks:
            hook.remove()


class _NotingRows(CachedRows):
    """Attention over pages by the plain twin, which notes what each layer asks for."""

    def __init__(self, pages: KVPages, rows: PackedRows, asked: list[tuple[int, AttentionForm]]) -> None:
        super().__init__(pages, rows)
        self._asked = asked

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        self._asked.append((layer, form))
        return attend_rows_plainly(query, *self.write(layer, key, value), self.rows, form)


def _by_pages(model: PreTrainedModel, ids_BL: Tensor, asked: list[tuple[int, AttentionForm]]) -> list[Tensor]:
    """The engine's logits [N, V] of each row of each step. `asked`: is given the layers and forms of the last step."""
    pages, logits = KVPages(NUM_PAGES, PAGE_TOKENS), list[Tensor]()
    for step in STEPS:
        asked.clear()
        cuts = [cut for kind in step.values() for cut in kind]
        rows, lengths = _packed_rows(cuts), [length for *_, length in cuts]
        tokens = [ids_BL[sequence, start : start + length] for _, sequence, start, length in cuts]
        ids_T = torch.cat([*tokens, ids_BL[0, :1].expand(NUM_PADDING)])
        logits_NV = logits_of(
            model, ids_T, rows.position_T, _NotingRows(pages, rows, asked), torch.arange(sum(lengths))
        )
        if len(logits_NV) != sum(lengths):
            raise ValueError("it ignores logits_to_keep, with which the engine chooses the tokens that want logits")
        logits += logits_NV.split(lengths)
    return logits


def _packed_rows(cuts: Sequence[Cut]) -> PackedRows:
    table_SW = torch.tensor(TABLE_SW, dtype=torch.int32)
    lengths, trash = [length for *_, length in cuts], len(TABLE_SW) - 1
    slots = [slot for slot, *_, length in cuts for _ in range(length)]
    return PackedRows(
        slot_T=torch.tensor([*slots, *[trash] * NUM_PADDING]),
        position_T=torch.tensor([start + i for _, _, start, length in cuts for i in range(length)] + [0] * NUM_PADDING),
        slot_R=torch.tensor([slot for slot, *_ in cuts]),
        start_R1=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        length_R=torch.tensor([start + length for _, _, start, length in cuts], dtype=torch.int32),
        table_SW=table_SW,
    )


def _by_documents(model: PreTrainedModel, ids_BL: Tensor) -> list[Tensor]:
    """The trainer's logits of each document."""
    lengths = [length for _, length in DOCUMENTS]
    ids_T = torch.cat([ids_BL[sequence, :length] for sequence, length in DOCUMENTS])
    hidden_TD = document_hidden(model, ids_T, lengths)
    if hidden_TD.shape[-1] != model.get_output_embeddings().weight.shape[-1]:
        return []
    return list(head_logits(model, hidden_TD).split(lengths))


def _refuse_broken(own_BLV: Tensor, who: str) -> None:
    if not own_BLV.isfinite().all():
        raise ValueError(
            f"{who} gives logits that are not numbers (NaN or infinite): its weights are damaged; copy them again "
            "from where they came from, or go on from an earlier checkpoint"
        )


def _refuse_unseen_layers(model: PreTrainedModel, layers: list[int], who: str) -> None:
    """Older modules ignore the attention they are given, hybrids use it in some layers."""
    num_layers = model.config.get_text_config().num_hidden_layers
    if layers != list(range(num_layers)):
        raise ValueError(
            f"{who} does not run all of its {num_layers} layers through the attention interface (seen: {len(layers)} "
            "calls); the engine cannot serve it"
        )


def _refuse_other_logits(packed: list[Tensor], own_BLV: Tensor, who: str) -> None:
    most, rows = bound(own_BLV), iter(packed)
    for kind, cuts in (item for step in STEPS for item in step.items()):
        own = [own_BLV[sequence, start : start + length] for _, sequence, start, length in cuts]
        off = difference(torch.cat([next(rows) for _ in cuts]), torch.cat(own))
        if not off <= most:
            raise ValueError(
                f"{who} gives other logits in a packed batch than alone (in {kind}, off by {off:.2g}, where rounding "
                f"explains {most:.2g}): its positions are not the position_ids that it is given, or it keeps a state "
                "outside of attention; the engine cannot serve it, choose another model"
            )


def _refuse_other_masks(
    model: PreTrainedModel, masks: dict[int, Mask], forms: dict[int, AttentionForm], who: str
) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
    for mask, window in {(masks[layer], forms[layer].sliding_window): None for layer in masks.keys() & forms.keys()}:
        for query in {limit - 1, limit // 2, limit // 3}:
            attended = _attended(mask, query, limit)
            if attended is not None and attended != (0 if window is None else max(0, query + 1 - window), query + 1):
                raise ValueError(
                    f"{who} attends from position {query} to positions {attended[0]} to {attended[1] - 1}, but its "
                    f"layers pass {'no window' if window is None else f'a window of {window} tokens'} to the attention "
                    "interface; the engine cannot serve it, choose another model"
                )


def _attended(mask: Mask, query: int, limit: int) -> tuple[int, int] | None:
    """First and last position + 1 that a query attends to. None if only the tokens of a batch say: then the logits at
    the first positions are all that is compared."""
    zero, at, keys = torch.zeros(1, 1, 1, 1).long(), torch.full((1, 1, 1, 1), query), torch.arange(limit)
    try:
        attended = mask(zero, zero, at, keys.view(1, 1, 1, -1)).expand(1, 1, 1, limit).flatten().nonzero().flatten()
    except IndexError:
        return None
    return int(attended[0]), int(attended[-1]) + 1


def _refuse_other_head(trained: list[Tensor], own_BLV: Tensor, who: str) -> None:
    """Some put more than a head behind the last hidden state."""
    if trained and all(
        difference(got_LV, own_BLV[sequence, :length]) <= bound(own_BLV)
        for got_LV, (sequence, length) in zip(trained, DOCUMENTS, strict=True)
    ):
        return
    raise ValueError(
        f"{who} does more behind its last hidden state than the head and scaling that the trainer knows "
        "(models/packed.py: head_logits); it cannot be trained"
    )
