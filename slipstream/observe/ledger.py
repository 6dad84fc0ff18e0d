"""Where every device-second of a run went: each to one account, so that they add up to the time the devices were there.

Pure. Whoever runs something on a device books its seconds; what nobody booked was idle. Seconds of a step may be told
of in the next one, and then make up for what was taken for idle; more than that was booked twice, and the accounts come
to more than the time there was, which `balance` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ACCOUNTS = {
    "start": "loading, and whatever else comes before a process can work",
    "prefill": "computing the keys of prompts, and of sequences that moved",
    "decode": "sampling tokens that were no drafts",
    "accepted drafts": "verifying drafts that were right",
    "rejected drafts": "verifying drafts that were wrong",
    "graphs": "making CUDA graphs, and steps without one",
    "tail wait": "a rollout worker without work while others finish the step",
    "rollout wait": "a trainer without groups to train on",
    "reward wait": "waiting for grades, with nothing else to do",
    "training wait": "a rollout worker without work until new weights are trained",
    "weight sync": "bringing new weights to where rollouts are sampled",
    "training": "gradients and updates of the policy",
    "drafter training": "the same of the drafter",
    "evaluation": "rollouts of held-out prompts; beside others, by their share of the sequences",
    "checkpoint": "writing a checkpoint",
    "idle": "nothing of the above",
}
IDLE = "idle"
KEPT_WAITS = 64
"""Changes of what is waited for: a worker tells of its seconds every half second."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Seconds of one device on one account, in one step."""

    step: int
    device: str
    account: str
    seconds: float


class Ledger:
    def __init__(self) -> None:
        self._rest: dict[str, str] = {}
        """By device: the account of what nobody booked."""
        self._since_s: dict[str, float] = {}
        """By device that is here: from when on its time has not been closed."""
        self._present_s: dict[str, float] = defaultdict(float)
        """Of devices that left since the last closing."""
        self._booked: dict[tuple[str, str], float] = defaultdict(float)
        self._owed_s: dict[str, float] = defaultdict(float)
        """Booked beyond the time there was: of a step that was closed before its last seconds were told of. What rests
        of later steps makes up for it."""
        self._rested_s: dict[str, float] = defaultdict(float)
        """What nobody had booked when steps were closed, and was not made up for: no more can be owed."""

    def arrive(self, device: str, now_s: float, rest: str = IDLE) -> None:
        """`rest`: the account of what nobody books."""
        assert device not in self._since_s, f"{device} is here already"
        self._since_s[device] = now_s
        self.rest_on(device, rest, now_s)

    def rest_on(self, device: str, account: str, now_s: float) -> None:
        """From now on; what nobody has booked until now is on the account on which it rested before."""
        before, self._rest[device] = self._rest.get(device, account), account
        present_s = self._present_s[device] + now_s - self._since_s[device]
        self._booked[device, before] += max(0.0, present_s - _seconds_of(device, self._booked))

    def leave(self, device: str, now_s: float) -> None:
        self._present_s[device] += now_s - self._since_s.pop(device)

    def book(self, device: str, account: str, seconds: float) -> None:
        """What it spent since it was last booked; a device that has left may still be told of."""
        assert account in ACCOUNTS and account != IDLE, f"no account of that name: {account}"
        self._booked[device, account] += seconds

    def close(self, step: int, now_s: float) -> list[Entry]:
        """The entries of a step, and begin the next one."""
        present_s, self._present_s = self._present_s, defaultdict(float)
        for device, since_s in self._since_s.items():
            present_s[device] += now_s - since_s
            self._since_s[device] = now_s
        booked, self._booked = self._booked, defaultdict(float)
        for device, there_s in present_s.items():
            left_s = there_s - _seconds_of(device, booked)
            made_up_s = min(max(0.0, left_s), self._owed_s[device])
            rest_s = max(0.0, left_s) - made_up_s
            self._rested_s[device] += rest_s - made_up_s
            self._owed_s[device] = min(self._owed_s[device] - made_up_s + max(0.0, -left_s), self._rested_s[device])
            booked[device, self._rest[device]] += rest_s
        return [Entry(step, device, account, seconds) for (device, account), seconds in booked.items() if seconds]


def _seconds_of(device: str, booked: Mapping[tuple[str, str], float]) -> float:
    return sum(seconds for (one, _), seconds in booked.items() if one == device)


class Waits:
    """What whoever waits is waiting for, from when on; so that seconds told of later find their account."""

    def __init__(self) -> None:
        self._since: list[tuple[float, str]] = []

    def note(self, account: str, now_s: float) -> None:
        if not self._since or self._since[-1][1] != account:
            self._since = [*self._since[-KEPT_WAITS:], (now_s, account)]

    def split(self, from_s: float, to_s: float) -> dict[str, float]:
        """{account: seconds} of this while; what was before the first note was as that."""
        found: dict[str, float] = {}
        ends = [since_s for since_s, _ in self._since[1:]]
        begins = [float("-inf"), *ends]
        for begin_s, end_s, (_, account) in zip(begins, [*ends, float("inf")], self._since, strict=True):
            seconds = min(end_s, to_s) - max(begin_s, from_s)
            if seconds > 0:
                found[account] = found.get(account, 0.0) + seconds
        return found


def split_decoding(seconds: float, num_tokens: int, num_accepted: int, num_drafted: int) -> dict[str, float]:
    """Seconds of steps that verified drafts, by account: each token that ran costs the same. `num_tokens` were sampled,
    the accepted drafts among them."""
    parts = {
        "decode": num_tokens - num_accepted,
        "accepted drafts": num_accepted,
        "rejected drafts": num_drafted - num_accepted,
    }
    total = sum(parts.values())
    if not total:
        return {"decode": seconds}
    return {account: seconds * count / total for account, count in parts.items() if count}


def shares(entries: Iterable[Entry]) -> dict[str, dict[str, float]]:
    """{device: {account: share of the device's time}}, accounts in their order."""
    seconds: dict[str, dict[str, float]] = {}
    for entry in entries:
        seconds.setdefault(entry.device, defaultdict(float))[entry.account] += entry.seconds
    return {
        device: {name: spent[name] / total for name in ACCOUNTS if spent[name]}
        for device, spent in sorted(seconds.items())
        if (total := sum(spent.values()))
    }


def balance(entries: Iterable[Entry], present_s: float) -> float:
    """All accounts over the time the devices were there: 1.0, unless something was booked twice."""
    return sum(entry.seconds for entry in entries) / present_s
