"""What other processes do in tests of the stream; importable by their names."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tiny_models import small_llama

from slipstream.models.weights import fingerprint
from slipstream.stream.neighbours import Borrower
from slipstream.stream.receiver import Receiver


def borrow(orders: Connection, address: Path, folder: Path, dtype: torch.dtype, device: str) -> None:
    """Take the versions whose numbers are heard, and tell of each what the model holds then."""
    torch.set_num_threads(1)
    model = small_llama(9, dtype=dtype).to(device)
    receiver = Receiver(folder, "neighbour", borrower=Borrower(address))
    while (number := orders.recv()) is not None:
        orders.send((receiver.catch_up(model, number), fingerprint(model)))
