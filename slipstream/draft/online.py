"""A drafter that learns while the policy does, from what the policy's own training computes anyway.

Features and hidden states come from the trainer's forward passes, so there is no other (`lessons.py` keeps them).
Embedding and head are the policy's own tensors, read and never written, so they are always the newest.

On a GPU an update runs on a stream of its own, of the lowest priority, beside whatever else the device does: after a
few eager ones it is one CUDA graph over memory that stays where it is, so starting it costs the host next to nothing.
On a CPU it is the same function, run at once. Whoever changes the policy's weights, the texts or this model's weights
calls `finish` first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.draft.eagle import FEATURES, Features, build_draft, kind_of
from slipstream.draft.lesson import Lesson, Window, lesson_loss
from slipstream.draft.lessons import Lessons, Text
from slipstream.draft.saved import WEIGHTS
from slipstream.models.packed import AfterHead
from slipstream.models.weights import named_weights
from slipstream.rng import derive_seed

LESSON_TOKENS = 1024
"""Of an update."""
PASSES = 4
"""Tokens ahead that it is taught to go on its own."""
BETAS, CLIP = (0.9, 0.95), 1.0
EAGER_UPDATES = 3
"""Before an update is captured: libraries and the optimizer set themselves up meanwhile."""
LOWEST_PRIORITY = 0
"""Of a stream; the engine's graphs are captured on one of a higher one, which has a lower number."""


class DrafterTrainer:
    def __init__(
        self,
        target: PreTrainedModel,
        *,
        lr: float,
        temperature: float,
        memory_bytes: int,
        disk_bytes: int = 0,
        folder: Path | None = None,
        kind: str = "eagle3",
        seed: int = 0,
        graphs: bool = True,
    ) -> None:
        """`target`: the model that is trained, in the trainer's number format. `folder`: for texts beyond the memory.
        `graphs` off gives the plain twin on a GPU."""
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        assert isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
        self.device = device = embedding.weight.device
        on_gpu = device.type == "cuda"
        self.model = build_draft(target.config, kind, seed).to(device)
        self.lessons = Lessons(memory_bytes, disk_bytes, folder)
        self._embed = nn.Embedding.from_pretrained(embedding.weight.detach(), freeze=True)
        self._head = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self._head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
        if head.bias is not None:
            self._head.bias = nn.Parameter(head.bias.detach(), requires_grad=False)
        self._after_head = AfterHead.of(target.config)
        self._features = Features(target, kind)
        self._temperature, self._kind, self._seed = temperature, kind, seed
        self.num_updates = 0
        self._settings = {"lr": lr, "betas": BETAS, "capturable": on_gpu}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **self._settings)  # type: ignore[arg-type]
        self._dtype = torch.bfloat16 if on_gpu else torch.float32
        self._lesson = self._room(LESSON_TOKENS)
        self._totals = torch.zeros(1 + 2 * PASSES, device=device)
        """Of updates that no metrics were taken of: the loss, and by pass how many were right and how many asked."""
        self._num_untold = 0
        self._stream = torch.cuda.Stream(device, priority=LOWEST_PRIORITY) if on_gpu else None
        self._done = torch.cuda.Event() if on_gpu else None
        self._graphs, self._graph, self._num_eager = graphs, None, 0
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: Future[list[Window]] | None = None
        """What the next update is to see, if some of it comes from the disk."""

    def begin_step(self) -> None:
        """New texts are about to come."""
        self.finish()
        self._forget_ahead()
        self.lessons.begin_step()

    def collect(self, ids_T: Tensor, lengths: Sequence[int], response_lengths: Sequence[int], last_TD: Tensor) -> None:
        """What a forward of the target computed; a text is its prompt and its response without the last token."""
        self._forget_ahead()
        features_TF = self._features.take()
        for (start, end), num_response in zip(pairwise(accumulate(lengths, initial=0)), response_lengths, strict=True):
            part = slice(start, end)
            text = Text(
                ids_T[part].clone(),
                features_TF[part].to(self._dtype, copy=True),
                last_TD[part].detach().to(self._dtype, copy=True),
                end - start + 1 - num_response,
            )
            self.lessons.add(text)

    @property
    def trains_aside(self) -> bool:
        """Whether an update can run beside the engine without holding it up. Never on a CPU, where both want the same
        cores; on a GPU once it is captured, which only happens while the engine rests."""
        return self._graph is not None

    @property
    def can_start(self) -> bool:
        """Whether there is something to learn from, and it is at hand."""
        return len(self.lessons) > 0 and (self._ahead is None or self._ahead.done())

    @property
    def is_busy(self) -> bool:
        """Whether an update is under way. Asks, and never waits."""
        return self._done is not None and not self._done.query()

    def start(self) -> None:
        """Launch an update; none may be under way."""
        assert not self.is_busy, "its memory is in use"
        windows = self._draw(self.num_updates) if self._ahead is None else self._ahead.result()
        self._ahead = None
        if self._stream is None:  # eagerly, padding would only cost time
            self._lesson = self._room(sum(len(window.ids_T) for window in windows))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._lesson.fill(windows, derive_seed("asked", self._seed, self.num_updates))
            if self._graph is None and self._graphs and self._stream is not None and self._num_eager >= EAGER_UPDATES:
                self._graph = self._capture(self._stream)
            if self._graph is not None:
                self._graph.replay()
            else:
                self._update()
                self._num_eager += 1
            if self._done is not None:
                self._done.record()
        self.num_updates += 1
        self._num_untold += 1
        if self.lessons.has_spilled:
            self._reader = self._reader or ThreadPoolExecutor(1, "lessons")
            self._ahead = self._reader.submit(self._draw, self.num_updates)

    def finish(self) -> None:
        """Wait for the update under way, if there is one."""
        if self._done is not None:
            self._done.synchronize()

    def follow(self) -> None:
        """Updates started from now on come after what the current stream was given so far: texts, or a copy made of
        this model's weights."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def train(self, num_updates: int) -> None:
        """So many updates, with nothing beside them, if there is anything to learn from."""
        self.follow()
        for _ in range(num_updates if len(self.lessons) else 0):
            self.finish()
            self.start()
        self.finish()

    def take_metrics(self) -> dict[str, float]:
        """Of the updates since they were last taken; none if there were none."""
        self.finish()
        left_out, self.lessons.num_dropped = self.lessons.num_dropped, 0
        told = {"drafter/texts_left_out": float(left_out)} if left_out else {}
        if not self._num_untold:
            return told
        totals, count = self._totals.tolist(), self._num_untold
        self._totals.zero_()
        self._num_untold = 0
        self.follow()
        metrics = told | {"drafter/loss": totals[0] / count, "drafter/updates": float(self.num_updates)}
        for place, (right, asked) in enumerate(zip(totals[1 : 1 + PASSES], totals[1 + PASSES :], strict=True)):
            if asked:
                metrics[f"drafter/right_at_{place + 1}"] = right / asked
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model)

    def state_dict(self) -> dict[str, Tensor]:
        """What training goes on from, on the host, by names as in a file; texts are collected anew."""
        self.finish()
        tensors = {f"{WEIGHTS}{name}": tensor for name, tensor in self.weights()}
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], num_updates: int) -> None:
        """ValueError if this is another model's."""
        own = dict(self.model.named_parameters())
        given = {name.removeprefix(WEIGHTS): one for name, one in tensors.items() if name.startswith(WEIGHTS)}
        kind = kind_of(given)
        if kind != self._kind:
            raise ValueError(f"this drafter is of the kind {kind}; write drafter.kind={kind}")
        if {name: one.shape for name, one in own.items()} != {name: one.shape for name, one in given.items()}:
            raise ValueError("it has other weights than a drafter of this policy")
        self.finish()
        self._graph, self._num_eager = None, 0  # a graph holds addresses, and the optimizer takes new memory
        state = dict[int, dict[str, Tensor]]()
        for number, (name, parameter) in enumerate(own.items()):
            parameter.copy_(given[name])
            ends = f".{name}"
            found = [key for key in tensors if key.startswith("optimizer.") and key.endswith(ends)]
            moments = {key.removeprefix("optimizer.").removesuffix(ends): tensors[key] for key in found}
            if moments:
                state[number] = moments
        groups = [group | self._settings for group in self._optimizer.state_dict()["param_groups"]]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.num_updates = num_updates

    def close(self) -> None:
        self.finish()
        self._forget_ahead()
        if self._reader is not None:
            self._reader.shutdown()
        self.lessons.close()

    def _room(self, num_tokens: int) -> Lesson:
        width = self.model.config.hidden_size
        return Lesson.room(num_tokens, FEATURES[self._kind] * width, width, self._dtype, self.device)

    def _draw(self, number: int) -> list[Window]:
        return self.lessons.draw(LESSON_TOKENS, self._seed, number)

    def _forget_ahead(self) -> None:
        """Before texts change."""
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None

    def _update(self) -> None:
        """One update from what the lesson holds. No shape depends on it, and the host reads nothing."""
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            taught = lesson_loss(
                self.model,
                self._embed,
                self._head,
                self._lesson,
                passes=PASSES,
                inverse_temperature=1.0 / (self._temperature or 1.0),  # at 0 the likeliest token is sampled
                after_head=self._after_head,
            )
        taught.loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        # One broken text must not break the drafter for good. No number times 0 is no number: hence not by a product.
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(torch.where(norm.isfinite(), parameter.grad, 0.0))
        self._optimizer.step()
        told = torch.cat([taught.loss.detach().unsqueeze(0), taught.right_J, taught.asked_J])
        self._totals += torch.where(norm.isfinite(), told, 0.0)

    def _capture(self, stream: torch.cuda.Stream) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._update()
        return graph
