"""A drafter that learns while the policy does, from what the policy's own training computes anyway.

Features and hidden states come from the trainer's forward passes, so there is no other. Texts of this step and the long
ones of the step before are what it learns from: those that end first are short, and a drafter is for the long ones.
Embedding and head are the policy's own tensors, read and never written, so they are always the newest.

Axes: T packed tokens, F features, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.draft.eagle import Features, build_draft, kind_of
from slipstream.draft.lesson import Lesson, lesson_loss
from slipstream.models.weights import named_weights
from slipstream.rng import keyed_random

LESSON_TOKENS = 1024
"""Of an update."""
PASSES = 4
"""Tokens ahead that it is taught to go on its own."""
BETAS, CLIP = (0.9, 0.95), 1.0


@dataclass(frozen=True, slots=True)
class Text:
    ids_T: Tensor
    features_TF: Tensor
    last_TD: Tensor
    num_prompt: int

    @property
    def num_bytes(self) -> int:
        return self.features_TF.nbytes + self.last_TD.nbytes


@dataclass(slots=True)
class Lessons:
    """Texts to learn from, as many as fit."""

    budget_bytes: int
    num_dropped: int = 0
    """Texts that there was no room for."""
    _new: list[Text] = field(default_factory=list)
    _old: list[Text] = field(default_factory=list)
    _num_bytes: int = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, text: Text) -> None:
        while self._old and self._num_bytes + text.num_bytes > self.budget_bytes:
            self._num_bytes -= self._old.pop(0).num_bytes
        if self._num_bytes + text.num_bytes > self.budget_bytes:
            self.num_dropped += 1
            return
        self._new.append(text)
        self._num_bytes += text.num_bytes

    def end_step(self) -> None:
        """Of what is here the longer half stays for another step."""
        by_length = sorted(self._new, key=lambda text: len(text.ids_T))
        self._old, self._new = by_length[len(by_length) // 2 :], []
        self._num_bytes = sum(text.num_bytes for text in self._old)

    def draw(self, *key: int) -> Iterator[Text]:
        texts = [*self._new, *self._old]
        keyed_random("lessons", *key).shuffle(texts)
        return iter(texts)


class DrafterTrainer:
    def __init__(
        self,
        target: PreTrainedModel,
        *,
        lr: float,
        temperature: float,
        budget_bytes: int,
        kind: str = "eagle3",
        seed: int = 0,
    ) -> None:
        """`target`: the model that is trained, in the trainer's number format."""
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        assert isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
        self.model = build_draft(target.config, kind, seed).to(embedding.weight.device)
        self.lessons = Lessons(budget_bytes)
        self._embed = nn.Embedding.from_pretrained(embedding.weight.detach(), freeze=True)
        self._head = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        self._head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
        self._features = Features(target, kind)
        self._temperature, self._kind, self._seed = temperature, kind, seed
        self.num_updates = 0
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=BETAS)

    def collect(self, ids_T: Tensor, lengths: Sequence[int], response_lengths: Sequence[int], last_TD: Tensor) -> None:
        """What a forward of the target computed; a text is its prompt and its response without the last token."""
        features_TF = self._features.take()
        half = torch.bfloat16 if ids_T.is_cuda else torch.float32
        for (start, end), num_response in zip(pairwise(accumulate(lengths, initial=0)), response_lengths, strict=True):
            part = slice(start, end)
            text = Text(
                ids_T[part].clone(),
                features_TF[part].to(half, copy=True),
                last_TD[part].detach().to(half, copy=True),
                end - start + 1 - num_response,
            )
            self.lessons.add(text)

    def train(self, num_updates: int) -> dict[str, float]:
        """Metrics of the updates; none if there is nothing to learn from."""
        losses, hits = [], list[list[float]]()
        for _ in range(num_updates if len(self.lessons) else 0):
            lesson = self._lesson()
            loss, right = lesson_loss(
                self.model,
                self._embed,
                self._head,
                lesson,
                passes=PASSES,
                inverse_temperature=1.0 / self._temperature,
                generator=torch.Generator().manual_seed(self._seed + self.num_updates),
            )
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self._optimizer.step()
            self.num_updates += 1
            losses.append(loss.item())
            hits.append(right)
        self.lessons.end_step()
        if not losses:
            return {}
        metrics = {"drafter/loss": sum(losses) / len(losses), "drafter/updates": float(self.num_updates)}
        for place in range(PASSES):
            found = [one[place] for one in hits if len(one) > place]
            if found:
                metrics[f"drafter/right_at_{place + 1}"] = sum(found) / len(found)
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model)

    def state_dict(self) -> dict[str, Any]:
        """What training goes on from; texts are collected anew."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kind = kind_of(state["model"])
        if kind != self._kind:
            raise ValueError(f"this drafter is of the kind {kind}; write drafter.kind={kind}")
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]

    def _lesson(self) -> Lesson:
        texts, num_tokens = list[Text](), 0
        for text in self.lessons.draw(self._seed, self.num_updates):
            if texts and num_tokens + len(text.ids_T) > LESSON_TOKENS:
                continue
            texts.append(text)
            num_tokens += len(text.ids_T)
        return Lesson(
            ids_T=torch.cat([text.ids_T for text in texts]),
            features_TF=torch.cat([text.features_TF for text in texts]).float(),
            last_TD=torch.cat([text.last_TD for text in texts]).float(),
            lengths=tuple(len(text.ids_T) for text in texts),
            num_prompt=tuple(text.num_prompt for text in texts),
        )
