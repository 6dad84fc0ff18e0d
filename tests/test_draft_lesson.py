"""What a drafter is taught: packed and padded into one shape, it is what each text teaches by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_draft_history import tiny
from test_draft_learned import CPU, sharp, target
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.draft import lesson as lesson_module
from slipstream.draft.eagle import FEATURES, KINDS, DraftModel, Features, build_draft
from slipstream.draft.lesson import FADING, Lesson, Window, lesson_loss
from slipstream.draft.online import PASSES, DrafterTrainer
from slipstream.models.attention import attend_causally
from slipstream.models.packed import AfterHead, document_hidden

TEXTS = [[5, 6, 7, *range(40, 52)], [5, 6, 8, *range(60, 80)], [5, 6, 9, 30]]


def windows_of(model: Any, texts: Sequence[Sequence[int]], num_prompt: int, kind: str = "eagle3") -> list[Window]:
    windows, features = [], Features(model, kind)
    for text in texts:
        ids = torch.tensor(text)
        with torch.no_grad():
            last = document_hidden(model, ids, [len(ids)])
        windows.append(Window(ids, features.take(), last, 0, num_prompt))
    features.release()
    return windows


def room(num_tokens: int, kind: str = "eagle3") -> Lesson:
    width = tiny().config.hidden_size
    return Lesson.room(num_tokens, FEATURES[kind] * width, width, torch.float32, CPU)


def packed(windows: Sequence[Window], num_tokens: int, kind: str = "eagle3") -> Lesson:
    lesson = room(num_tokens, kind)
    lesson.features_TF.fill_(3.0)  # what an earlier lesson left behind
    lesson.fill(windows, 1)
    return lesson


def plain_losses(
    model: Any, draft: DraftModel, window: Window, passes: int, scale: float, after: AfterHead
) -> list[list[Tensor]]:
    """By pass, then position: as the words of `lesson.py` have it, every position by itself."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    ids, size = window.ids_T, len(window.ids_T)
    losses: list[list[Tensor]] = [[] for _ in range(passes)]
    fused = draft.fuse(window.features_TF)
    for begin in range(size - 1):
        # Features are known up to `begin`; from there on it goes by itself.
        seen = begin + 1
        hidden = fused[:seen]
        positions = window.first + torch.arange(size)
        residual, query, keys, values = draft.begin(embed(ids[1 : seen + 1]), hidden, positions[:seen])
        state = draft.finish(residual, attend_causally(query, keys, values, draft.form))[-1:]
        for number in range(passes):
            at = begin + number
            if number:
                if at >= size - 1:
                    break
                residual, query, key, value = draft.begin(embed(ids[at + 1 : at + 2]), state, positions[at : at + 1])
                keys, values = torch.cat([keys, key]), torch.cat([values, value])
                state = draft.finish(residual, attend_causally(query, keys, values, draft.form))
            if window.first + at + 2 >= window.num_prompt:
                wanted = (after(head(window.last_TD[at + 1])) * scale).softmax(-1)
                said = after(head(draft.head_input(state[0]))) * scale
                losses[number].append(cross_entropy(said.unsqueeze(0), wanted.unsqueeze(0)))
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_tokens", "after"),
    [(sum(map(len, TEXTS)), AfterHead()), (64, AfterHead(divided_by=2.0)), (64, AfterHead(times=0.25, cap=1.5))],
)
def test_the_lesson_and_its_gradients_are_those_of_every_position_by_itself(
    kind: str, num_tokens: int, after: AfterHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed texts do not see one another at any pass, and padding does not count. Logits are those of the family."""
    monkeypatch.setattr(lesson_module, "LOGIT_BYTES", 4 * 200 * 10 * 4)  # several parts
    model, draft, passes, scale = target(), sharp(kind, 5), 4, 1 / 0.7
    windows = windows_of(model, TEXTS, 3, kind)
    windows[1] = Window(*(one[4:] for one in (windows[1].ids_T, windows[1].features_TF, windows[1].last_TD)), 4, 3)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if after.cap is not None:
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, head.out_features), requires_grad=False)
    lesson = packed(windows, num_tokens, kind)
    taught = lesson_loss(draft, embed, head, lesson, passes=passes, inverse_temperature=scale, after_head=after)
    gradients = torch.autograd.grad(taught.loss, list(draft.parameters()))

    by_pass: list[list[Tensor]] = [[] for _ in range(passes)]
    for window in windows:
        for number, losses in enumerate(plain_losses(model, draft, window, passes, scale, after)):
            by_pass[number] += losses
    assert taught.asked_J.tolist() == [len(losses) for losses in by_pass] and taught.asked_J[3] > 20
    plain = torch.stack([FADING**number * torch.stack(one).mean() for number, one in enumerate(by_pass)]).sum()
    assert taught.loss.item() == pytest.approx(plain.item(), rel=1e-5)
    # A gradient is a sum of a term for each position that is asked about, added up in another order.
    rounding = int(taught.asked_J.sum()) * 2**-24
    for ours, theirs in zip(gradients, torch.autograd.grad(plain, list(draft.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=rounding * float(theirs.abs().max()))


def test_some_positions_are_asked_about_by_chance() -> None:
    model, draft = target(), sharp("eagle3", 5)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    windows, lesson = windows_of(model, TEXTS, 3), room(64)

    def loss(seed: int, most: int) -> float:
        lesson.fill(windows, seed)
        taught = lesson_loss(draft, embed, head, lesson, passes=2, most_positions=most)
        assert taught.asked_J[0] == min(most, 36) and taught.asked_J[1] <= taught.asked_J[0]
        return taught.loss.item()

    assert loss(1, 512) == pytest.approx(loss(2, 512), rel=1e-5)
    few = [loss(seed, 8) for seed in range(40)]
    assert few[0] == loss(0, 8) and len(set(few)) > 30
    assert sum(few) / len(few) == pytest.approx(loss(0, 512), rel=0.05)
    lesson.fill([], 0)
    nothing = lesson_loss(draft, embed, head, lesson, passes=2)
    assert nothing.loss.item() == 0.0 and nothing.asked_J.tolist() == [0.0, 0.0]


def test_a_lesson_teaches() -> None:
    """A text that repeats itself can be foretold at every pass."""
    model, draft = target(), build_draft(tiny().config, "eagle3")
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    lesson = packed(windows_of(model, [[5, 6, 7, *[40, 41, 42] * 6]], 3), 32)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        taught = lesson_loss(draft, embed, head, lesson, passes=3)
        optimizer.zero_grad()
        taught.loss.backward()
        optimizer.step()
        losses.append(taught.loss.item())
    assert losses[-1] < losses[0] - 1.0 and (taught.right_J / taught.asked_J).min() > 0.6
    with pytest.raises(AssertionError, match="given gradients"):
        lesson_loss(draft, embed, head.requires_grad_(True), lesson, passes=1)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_in_half_precision_it_teaches_nearly_the_same() -> None:
    """As on a GPU."""
    model, draft = target(), sharp("eagle3", 5)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    windows, width = windows_of(model, TEXTS, 3), tiny().config.hidden_size
    half = Lesson.room(64, 3 * width, width, torch.bfloat16, CPU)
    half.fill(windows, 1)
    parameters = list(draft.parameters())
    exact = lesson_loss(draft, embed, head, packed(windows, 64), passes=4)
    with torch.autocast("cpu", torch.bfloat16):
        rough = lesson_loss(draft, embed, head, half, passes=4)
    assert rough.loss.item() == pytest.approx(exact.loss.item(), rel=2e-2)
    pairs = zip(torch.autograd.grad(exact.loss, parameters), torch.autograd.grad(rough.loss, parameters), strict=True)
    assert all(ours.dtype == torch.float32 and (ours - own).norm() < 0.1 * own.norm() for own, ours in pairs)


class HostReads(TorchDispatchMode):
    """Operations whose outcome, or its shape, the host has to wait for: none can be in a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        chosen = [one for one in args[1] if one is not None] if name in ("index", "index_put", "index_put_") else []
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
        if name in waits or any(one.dtype == torch.bool for one in chosen):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_reads_nothing_on_the_host() -> None:
    model, draft = target(), sharp("eagle3", 5)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    lesson = packed(windows_of(model, TEXTS, 3), 64)
    with HostReads() as reads:
        lesson_loss(draft, embed, head, lesson, passes=4, most_positions=16).loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    assert reads.found == []
    with HostReads() as reads:
        assert lesson.features_TF[lesson.places_4T[2] > 0].sum().item() != 0.0
    assert len(reads.found) == 2, "the watch can see"


def student(seed: int = 0, **changes: Any) -> DrafterTrainer:
    return DrafterTrainer(target(), lr=1e-3, temperature=1.0, **{"memory_bytes": 10**9, "seed": seed} | changes)


def show(trainer: DrafterTrainer, model: nn.Module, texts: Sequence[Sequence[int]]) -> None:
    """As the trainer of the policy does."""
    features = Features(model, "eagle3")  # type: ignore[arg-type]
    ids, lengths = torch.tensor([token for text in texts for token in text]), [len(text) for text in texts]
    with torch.no_grad():
        last = document_hidden(model, ids, lengths)  # type: ignore[arg-type]
    trainer._features = features
    trainer.collect(ids, lengths, [length - 2 for length in lengths], last)
    features.release()


def test_training_goes_on_from_what_was_saved() -> None:
    first, model = student(), target()
    show(first, model, TEXTS)
    first.train(3)
    saved, num_updates = first.state_dict(), first.num_updates
    first.train(2)
    second = student(seed=9)
    show(second, model, TEXTS)
    second._seed = 0
    second.load_state_dict(saved, num_updates)
    second.train(2)
    ours, theirs = second.state_dict(), first.state_dict()
    assert second.num_updates == 5 and ours.keys() == theirs.keys() and len(ours) == 4 * len(list(second.weights()))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not all(torch.equal(saved[name], ours[name]) for name in ours), "a copy, not the weights themselves"
    metrics = first.take_metrics()
    assert metrics["drafter/updates"] == 5.0 and 0.0 <= metrics["drafter/right_at_4"] <= 1.0
    assert first.take_metrics() == {} and not first.trains_aside and not first.is_busy
    with pytest.raises(ValueError, match="other weights"):
        second.load_state_dict({name: one for name, one in saved.items() if "norm" not in name}, 1)


def test_a_policy_is_imitated_as_it_samples() -> None:
    """With logits that the family makes all alike, it is asked for every token as often."""
    model = target()
    model.config.logit_scale = 1e-9
    trainer = DrafterTrainer(model, lr=1e-3, temperature=1.0, memory_bytes=10**9)
    show(trainer, model, TEXTS)
    trainer.train(1)
    expected = math.log(model.config.vocab_size) * sum(FADING**number for number in range(PASSES))
    assert trainer.take_metrics()["drafter/loss"] == pytest.approx(expected, rel=1e-5)


def test_a_broken_text_does_not_break_the_drafter() -> None:
    trainer = student()
    show(trainer, target(), [list(range(30, 60)), list(range(60, 90))])
    trainer.lessons._new[0].last_TD[3] = torch.inf  # type: ignore[union-attr]
    before = {name: one.clone() for name, one in trainer.weights()}
    trainer.train(3)
    assert all(torch.isfinite(one).all() for _, one in trainer.weights())
    assert trainer.num_updates == 3 and all(torch.isfinite(one).all() for one in trainer.state_dict().values())
    trainer.lessons._new[0].last_TD[3] = 0.0  # type: ignore[union-attr]
    trainer.train(3)
    assert any(not torch.equal(one, before[name]) for name, one in trainer.weights())
