"""A rollout worker's part in the drafter: it drafts with the newest version, and learns when it is told to.

A plain class: it knows no process and no pipe. What it is told to do about the drafter it does in pieces, an update or
the reading of a few texts each, so that whoever calls it hears between two of them that there is something to sample. A
fault in any of it is told and costs the drafter, never a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from safetensors import SafetensorError

from slipstream.draft.reading import Reader
from slipstream.draft.saved import DrafterState
from slipstream.draft.together import Member, Share
from slipstream.runtime.drafter_messages import (
    AverageShares,
    DrafterFailed,
    DrafterStopped,
    DrafterTaken,
    DrafterTrained,
    FromMember,
    SharesAveraged,
    StopDrafter,
    TakeDrafter,
    ToMember,
    TrainDrafter,
)
from slipstream.types import Rollout, WeightVersion

FAULTS = (OSError, SafetensorError, ValueError, RuntimeError)
"""What may go wrong with a drafter: its files, what is in them, its device."""


class DrafterWorker:
    def __init__(
        self,
        member: Member,
        reader: Reader,
        draft_as: Callable[[DrafterState], None],
        say: Callable[[FromMember], None],
    ) -> None:
        """`draft_as`: gives the engine a version, from its next step on; at once the newest."""
        self._member, self._reader, self._draft_as, self._say = member, reader, draft_as, say
        self._task: Iterator[None] | None = None
        self._round: int | None = None
        self.version = self._take_newest()
        """That the engine drafts with."""

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    def obey(self, message: ToMember) -> None:
        match message:
            case TrainDrafter():
                self._task, self._round = self._train(message), message.round
            case AverageShares():
                self._task, self._round = self._average(message), message.round
            case StopDrafter():
                self._end_task()
                self._say(DrafterStopped(self._member.give_up()))
            case TakeDrafter():
                try:
                    self.version = self._take_newest()
                    self._say(DrafterTaken(self.version))
                except FAULTS as error:
                    self._say(DrafterFailed(None, f"version {message.version} of the drafter: {error}"))

    def advance(self) -> None:
        """A piece of what it is at."""
        assert self._task is not None, "there is nothing to do about the drafter"
        try:
            next(self._task)
        except StopIteration:
            self._end_task()
        except FAULTS as error:
            self._say(DrafterFailed(self._round, str(error)))
            self._end_task()
            self._member.give_up()

    def add_text(self, rollout: Rollout) -> None:
        """It was sampled here, and is learned from in the next round."""
        self._reader.add(rollout)

    def make_way(self) -> None:
        """The policy's weights are about to change."""
        self._member.trainer.finish()

    def new_policy(self, version: WeightVersion) -> None:
        """They have."""
        self._member.target_digest = version.digest
        self._reader.new_policy()

    def close(self) -> None:
        self._end_task()
        self._member.close()

    def _train(self, message: TrainDrafter) -> Iterator[None]:
        yield from self._reader.read()
        num_updates = yield from self._member.train(message.version, message.num_updates, message.share_folder)
        self._member.give_up()  # it is whole
        metrics = self._member.trainer.take_metrics()
        metrics.pop("drafter/updates", None)  # its own; those that count are the session's
        self._say(DrafterTrained(message.round, num_updates, metrics))

    def _average(self, message: AverageShares) -> Iterator[None]:
        shares = [Share(folder, num_updates) for folder, num_updates in message.shares]
        version, num_updates = yield from self._member.lead(shares)
        self._say(SharesAveraged(message.round, version, num_updates))

    def _take_newest(self) -> int:
        state = self._member.newest()
        self._draft_as(state)
        return state.step

    def _end_task(self) -> None:
        self._task = self._round = None
