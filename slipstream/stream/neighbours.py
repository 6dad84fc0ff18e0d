"""Weights between processes of one machine, through memory that both see: CUDA IPC on a GPU, shared memory on a CPU.

The lender fills two buffers in turn, which torch shares with every borrower (`torch.multiprocessing`), and tells by a
pipe which one is full; a borrower checks the bucket's hash where it lies, copies it into its model, and answers.
Nothing is encoded: weights are written as they come, so a borrower whose lender dies is torn until it has borrowed
again. The same two calls as those of publisher and receiver, made on both sides at the same time.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing  # makes pipes carry tensors
from torch import Tensor, nn

from slipstream.models.digest import bits_of, combined_digest, tensor_digest
from slipstream.models.weights import fingerprint, named_weights, tell_written
from slipstream.stream.editions import Refusal, RefusedWeights
from slipstream.stream.values import ModelValues, OnePass, cut, dtype_name
from slipstream.types import WeightVersion

BUCKET_BYTES = 128 << 20
REPEATS = 3
NUM_BUFFERS = 2


class Lender:
    def __init__(
        self, pipes: Mapping[str, Connection], *, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`pipes`: to every borrower, by its name. Buffers lie where the first weights lie."""
        self.dtype = dtype
        self._pipes = dict(pipes)
        self._bucket_values = bucket_bytes // dtype.itemsize
        self._buffers: list[Tensor] = []
        self._answers: dict[tuple[str, int | None], str] = {}

    @torch.no_grad()
    def publish(self, weights: Iterable[tuple[str, Tensor]], number: int) -> WeightVersion:
        """Returns once every borrower holds the version; a copy in the engines' format is in memory until then.
        RefusedWeights if one does not take it."""
        one_pass = OnePass(weights, self.dtype)
        cast = list(one_pass)
        version = WeightVersion(number, combined_digest(one_pass.digests))
        told: tuple[Any, ...] = (number, version.digest, dtype_name(self.dtype), one_pass.tensors)
        if not self._buffers and cast:
            self._buffers = [bits_of(cast[0]).new_empty(self._bucket_values) for _ in range(NUM_BUFFERS)]
            told = (*told, self._buffers)
        for pipe in self._pipes.values():
            pipe.send(told)
        lent: deque[tuple[int, Tensor, str]] = deque()
        for index, bits in enumerate(cut(cast, self._bucket_values)):
            if len(lent) == NUM_BUFFERS:
                self._settle(*lent.popleft(), number)
            lent.append((index, bits, tensor_digest(bits)))
            self._fill(index, bits)
            for pipe in self._pipes.values():
                pipe.send((index, len(bits), lent[-1][2]))
        while lent:
            self._settle(*lent.popleft(), number)
        for name, pipe in self._pipes.items():
            pipe.send(None)
            found = self._answer(name, None)
            if found != version.digest:
                refusal = Refusal(name, number, "lent", None, version.digest, found)
                raise RefusedWeights(name, number, [refusal], torn=True)
        return version

    def _settle(self, index: int, bits: Tensor, expected: str, number: int) -> None:
        """Until everybody has a bucket; who found another hash is shown it again."""
        for name, pipe in self._pipes.items():
            refusals: list[Refusal] = []
            while (found := self._answer(name, index)) != expected:
                refusals.append(Refusal(name, number, "lent", index, expected, found))
                if len(refusals) > REPEATS:
                    raise RefusedWeights(name, number, refusals, torn=True)
                self._fill(index, bits)
                pipe.send((index, len(bits), expected))

    def _answer(self, name: str, index: int | None) -> str:
        """What a borrower found in a bucket; answers to others may come before."""
        while (name, index) not in self._answers:
            told, found = self._pipes[name].recv()
            self._answers[name, told] = found
        return self._answers.pop((name, index))

    def _fill(self, index: int, bits: Tensor) -> None:
        buffer = self._buffers[index % NUM_BUFFERS]
        buffer[: len(bits)].copy_(bits)
        _wait_for(buffer)


class Borrower:
    def __init__(self, pipe: Connection, worker_name: str) -> None:
        self.worker_name = worker_name
        self.version: WeightVersion | None = None
        self.refusals: list[Refusal] = []
        self._pipe = pipe
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def catch_up(self, model: nn.Module, to_number: int) -> WeightVersion:
        """Wait for the lender and write what it lends into the model, in place. ValueError if it is another version or
        does not fit the model, RefusedWeights if a bucket's or the whole's hash stays wrong."""
        number, digest, dtype, tensors, *buffers = self._pipe.recv()
        if buffers:
            (self._buffers,) = buffers
        if number != to_number:
            raise ValueError(f"{self.worker_name} wants version {to_number}, and {number} is lent")
        values = ModelValues(dict(named_weights(model)), tensors, dtype)
        self.version = None
        refused: list[Refusal] = []
        torn = False
        while (told := self._pipe.recv()) is not None:
            index, size, expected = told
            buffer = self._buffers[index % NUM_BUFFERS]
            found = tensor_digest(buffer[:size])
            if found == expected:
                torn = True
                values.write(index * len(buffer), buffer[:size])
                _wait_for(buffer)
            else:
                refused.append(self._refuse(number, index, expected, found))
            self._pipe.send((index, found))
            if sum(refusal.bucket == index for refusal in refused) > REPEATS:
                raise RefusedWeights(self.worker_name, number, refused, torn=torn)
        values.settle()
        tell_written(model)
        found = fingerprint(model)
        self._pipe.send((None, found))
        if found != digest:
            refused.append(self._refuse(number, None, digest, found))
            raise RefusedWeights(self.worker_name, number, refused, torn=True)
        self.version = WeightVersion(number, digest)
        return self.version

    def _refuse(self, number: int, bucket: int | None, expected: str, found: str) -> Refusal:
        refusal = Refusal(self.worker_name, number, "lent", bucket, expected, found)
        warnings.warn(str(refusal), stacklevel=3)
        self.refusals.append(refusal)
        return refusal


def _wait_for(tensor: Tensor) -> None:
    """Before another process is told to read or overwrite it."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
