"""What other processes do in tests of the stream; importable by their names."""

from __future__ import annotations

import warnings
from multiprocessing.connection import Connection

import torch
from tiny_models import small_llama

from slipstream.models.weights import fingerprint
from slipstream.stream import neighbours
from slipstream.stream.editions import RefusedWeights
from slipstream.stream.neighbours import Borrower


def borrow(
    weights: Connection, results: Connection, numbers: list[int], dtype: torch.dtype, device: str, bad: list[int]
) -> None:
    """Take these versions and tell of each what was found; reads of these ordinal numbers see a flipped bit."""
    torch.set_num_threads(1)
    model = small_llama(9, dtype=dtype).to(device)
    borrower = Borrower(weights, "neighbour")
    plain, reads = neighbours.tensor_digest, 0

    def reading(tensor: torch.Tensor) -> str:
        nonlocal reads
        reads += 1
        if reads - 1 in bad:
            tensor = tensor.clone()
            tensor[0] ^= 1
        return plain(tensor)

    neighbours.tensor_digest = reading
    warnings.simplefilter("ignore")
    for number in numbers:
        try:
            version = borrower.catch_up(model, number)
            results.send((version, fingerprint(model), [refusal.bucket for refusal in borrower.refusals]))
        except RefusedWeights as error:
            results.send((error.worker, error.torn, borrower.version))
            return
