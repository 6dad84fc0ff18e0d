"""Texts that a drafter learns from, in memory while they fit and else on the disk, and which of them an update sees.

Owns the files, which live as long as the texts: a text is kept for the step it comes from, and the longer half of a
step's for one more, since what ends first is short and a drafter is for the long ones. What a crash leaves behind is
removed by the next `Lessons` of the same folder. A disk that fails costs texts, never the run.

Axes: T tokens, F features, D hidden size.
"""

from __future__ import annotations

import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.draft.lesson import Window
from slipstream.rng import keyed_random

MOST_TRIED = 64
"""Texts that are looked at to fill a lesson."""


@dataclass(frozen=True, slots=True)
class Text:
    ids_T: Tensor
    features_TF: Tensor
    last_TD: Tensor
    num_prompt: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def num_bytes(self) -> int:
        return self.ids_T.nbytes + self.features_TF.nbytes + self.last_TD.nbytes

    def window(self, first: int, end: int) -> Window:
        part = slice(first, end)
        return Window(self.ids_T[part], self.features_TF[part], self.last_TD[part], first, self.num_prompt)


@dataclass(frozen=True, slots=True)
class SpilledText:
    """One that lies on the disk; a window is all that is read of it."""

    path: Path
    num_tokens: int
    num_bytes: int
    num_prompt: int

    def window(self, first: int, end: int) -> Window:
        with safe_open(self.path, framework="pt") as file:
            ids_T, features_TF, last_TD = (file.get_slice(name)[first:end] for name in ("ids", "features", "last"))
        return Window(ids_T, features_TF, last_TD, first, self.num_prompt)


@dataclass(slots=True)
class Lessons:
    """As many texts as fit."""

    memory_bytes: int
    disk_bytes: int = 0
    folder: Path | None = None
    """For texts beyond the memory, and for nothing else; None: those are dropped."""
    num_dropped: int = 0
    """Texts that there was no room for."""
    _new: list[Text | SpilledText] = field(default_factory=list)
    _old: list[Text | SpilledText] = field(default_factory=list)
    """The shortest first, which is the first to make room."""
    _names: count[int] = field(default_factory=count)
    _used: dict[type, int] = field(default_factory=lambda: {Text: 0, SpilledText: 0})
    """Bytes of each kind."""

    def __post_init__(self) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    @property
    def num_new(self) -> int:
        return len(self._new)

    @property
    def has_spilled(self) -> bool:
        return self._used[SpilledText] > 0

    def add(self, text: Text) -> None:
        while True:
            if self._used[Text] + text.num_bytes <= self.memory_bytes:
                self._keep(text)
                return
            if self.folder is not None and self._used[SpilledText] + text.num_bytes <= self.disk_bytes:
                self._spill(text, self.folder)
                return
            if not self._old:
                self.num_dropped += 1
                if not self._new:
                    warnings.warn(
                        "the drafter has nothing to learn from: neither drafter.memory_gb nor drafter.disk_gb has room "
                        "for the hidden states of a text",
                        stacklevel=2,
                    )
                return
            self._forget(self._old.pop(0))

    def begin_step(self) -> None:
        """New texts are about to come: of those of the last step the longer half stays, of older ones none."""
        by_length = sorted(self._new, key=lambda text: text.num_tokens)
        half = len(by_length) // 2
        for text in (*self._old, *by_length[:half]):
            self._forget(text)
        self._old, self._new = by_length[half:], []

    def draw(self, num_tokens: int, *key: int) -> list[Window]:
        """Windows of so many tokens at most, by chance; a text is shown whole unless it is longer than that."""
        dice = keyed_random("lessons", *key)
        texts = [*self._new, *self._old]
        windows, room = list[Window](), num_tokens
        for text in dice.sample(texts, min(MOST_TRIED, len(texts))):
            first, end = 0, text.num_tokens
            if end > num_tokens:
                latest = end - num_tokens
                first = dice.randint(min(latest, text.num_prompt), latest)
                end = first + num_tokens
            if end - first > room:
                continue
            try:
                windows.append(text.window(first, end))
            except (OSError, SafetensorError) as error:
                warnings.warn(f"a text to learn from cannot be read back and is left out: {error}", stacklevel=2)
                continue
            room -= end - first
        return windows

    def close(self) -> None:
        """Forget all, and leave no file."""
        self._new, self._old = [], []
        self._used = dict.fromkeys(self._used, 0)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _keep(self, text: Text | SpilledText) -> None:
        self._new.append(text)
        self._used[type(text)] += text.num_bytes

    def _spill(self, text: Text, folder: Path) -> None:
        path = folder / f"{next(self._names)}.safetensors"
        tensors = {"ids": text.ids_T, "features": text.features_TF, "last": text.last_TD}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self.disk_bytes = 0
            self.num_dropped += 1
            warnings.warn(f"no more texts for the drafter are put on the disk: {error}", stacklevel=2)
            return
        self._keep(SpilledText(path, text.num_tokens, text.num_bytes, text.num_prompt))

    def _forget(self, text: Text | SpilledText) -> None:
        self._used[type(text)] -= text.num_bytes
        if isinstance(text, SpilledText):
            with suppress(OSError):
                text.path.unlink(missing_ok=True)
