"""How weights get from the trainer to workers, beside the shelf that is always there: where both ends are told of a
place to lend at, or of a tree to send through, they are made for it here."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.stream.neighbours import Borrower, Lender
from slipstream.stream.publisher import Publisher
from slipstream.stream.receiver import Receiver
from slipstream.stream.relay import TreeChannel, TreePlan


@dataclass(frozen=True, slots=True)
class Ways:
    lending_place: Path | None = None
    """For a socket, at which the trainer lends to workers on its own device."""
    tree: TreePlan | None = None
    """Of machines that do not see the shelf; the trainer is its root."""

    def publisher(self, folder: Path, dtype: torch.dtype) -> Publisher:
        """Waits for the members of the tree; without one that does not come there is none, and a warning; as if
        nothing can be lent there."""
        channels = []
        if self.tree is not None:
            try:
                group = self.tree.group(self.tree.tree.root, self.tree.address)
                channels.append(TreeChannel(group, self.tree.tree, self.tree.ranks))
            except RuntimeError as error:
                first_line = str(error).partition("\n")[0]
                warnings.warn(f"weights go through no tree, its members could not meet ({first_line})", stacklevel=2)
        lender = None
        if self.lending_place is not None:
            try:
                lender = Lender(self.lending_place)
            except OSError as error:
                warnings.warn(f"weights go through files, none are lent ({self.lending_place}: {error})", stacklevel=2)
        return Publisher(folder, dtype=dtype, channels=channels, lender=lender)

    def receiver(self, folder: Path, worker_name: str) -> Receiver:
        borrower = None if self.lending_place is None else Borrower(self.lending_place)
        return Receiver(folder, worker_name, borrower=borrower)
