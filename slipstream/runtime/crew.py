"""The processes that train, as the run sees them: what they are told, what they say, and whether they still work.

A process that works says so between two pieces of work, and one that waits says so now and then. From the thread that
works, and from no other: one that hangs in a kernel, in a collective or on a disk that does not answer is silent. If
one is gone or silent too long they are all lost, for none can go on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.runtime.kept import KeptRollout
from slipstream.runtime.pool import LONGEST_LOOK_S, START_S, WorkerLink
from slipstream.runtime.trainer_messages import ToTrainer, TrainerBroke, TrainerReady

BLAME_S = 10.0
"""How long one that has lost another is first to notice: a connection is reset before a process is seen to be gone."""


class TrainerLost(Exception):
    """A process that trains was killed or hangs: the run goes on from its last checkpoint."""

    under_way: Sequence[KeptRollout] = ()
    """What was known of rollouts by then."""


class TrainerCrew:
    def __init__(
        self, links: Sequence[WorkerLink], silence_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`links`: by rank; the first speaks for all."""
        self.links = links
        self._silence_s, self._clock = silence_s, clock
        self._looked_s = clock()
        self._silent_s = {link.name: 0.0 for link in links}
        self._is_ready = dict.fromkeys(self._silent_s, False)
        self._broke: tuple[WorkerLink, TrainerBroke] | None = None
        """Who told of an error first, while it may be another's end that it tells of."""
        self._broke_s = 0.0
        self._told: set[str] = set()
        """Who has told of an error."""

    @property
    def first(self) -> WorkerLink:
        return self.links[0]

    def tell(self, message: ToTrainer) -> None:
        for link in self.links:
            link.send(message)

    def hear(self) -> list[tuple[WorkerLink, Any]]:
        """What each has said by now."""
        gone = [link for link in self.links if link.is_gone]
        heard = {link.name: link.receive() for link in self.links}
        self._told |= {name for name, said in heard.items() if any(isinstance(one, TrainerBroke) for one in said)}
        for link in gone:
            if link.name not in self._told:  # without a word; if there are others, they may complain of it
                raise TrainerLost(link.how_it_ended())
        now_s = self._clock()
        looked_s, self._looked_s = self._looked_s, now_s
        for link in self.links:
            self._is_ready[link.name] |= any(isinstance(message, TrainerReady) for message in heard[link.name])
            self._silent_s[link.name] += min(LONGEST_LOOK_S, now_s - looked_s)
            if heard[link.name]:
                self._silent_s[link.name] = 0.0
            self._look_after(link)
        said = [(link, message) for link in self.links for message in heard[link.name]]
        return said if len(self.links) == 1 else self._with_blame(said, now_s)

    def _with_blame(self, said: list[tuple[WorkerLink, Any]], now_s: float) -> list[tuple[WorkerLink, Any]]:
        """An error of one among several is held back until it is clear that none of the others is gone."""
        for link, message in said:
            if isinstance(message, TrainerBroke) and self._broke is None:
                self._broke, self._broke_s = (link, message), now_s
        others = [(link, message) for link, message in said if not isinstance(message, TrainerBroke)]
        is_clear = len(self._told) == len(self.links) or now_s - self._broke_s >= BLAME_S
        return [*others, self._broke] if self._broke is not None and is_clear else others

    def _look_after(self, link: WorkerLink) -> None:
        limit_s = self._silence_s if self._is_ready[link.name] else START_S
        if self._silent_s[link.name] <= limit_s:
            return
        link.kill()
        setting = " (train.silence_s)" if self._is_ready[link.name] else ""
        raise TrainerLost(
            f"{link.name} hangs: it said nothing for {limit_s:.0f} s{setting} and was killed\n{link.how_it_ended()}"
        )
