"""The memory of a model's weights, which may be given back to the device for a while, e.g. for training on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from slipstream.models.recognise import Fusion


class WeightMemory:
    def __init__(self, model: PreTrainedModel, fusion: Fusion | None) -> None:
        self._model, self._fusion = model, fusion
        self._given_back: list[tuple[torch.UntypedStorage, int]] | None = None
        """Storages and their sizes."""

    @property
    def is_there(self) -> bool:
        return self._given_back is None

    def give_back(self) -> None:
        """What the weights were is lost."""
        if self._given_back is not None:
            return
        if self._fusion is not None:
            self._fusion.release()
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in self._model.parameters()}
        # Norms, which the CPU's kernels look into, cannot be given back; they are a fraction of a per cent.
        self._given_back = [(one, one.nbytes()) for one in storages.values() if one.resizable()]
        for storage, _ in self._given_back:
            storage.resize_(0)

    @contextmanager
    def being_written(self) -> Iterator[None]:
        """Taken again for weights that are written in the meantime. If that fails, they are still not there."""
        for storage, num_bytes in self._given_back or ():
            storage.resize_(num_bytes)
        try:
            yield
        except BaseException:
            for storage, _ in self._given_back or ():
                storage.resize_(0)
            raise
        self._given_back = None
