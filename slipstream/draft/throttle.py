"""When an update of the drafter may run beside the engine's steps, so that these slow down by no more than a bound.

Told how long each step took, of which kind it was and whether an update ran beside it. Since steps get faster as
sequences end, each is compared with the last ones of its kind without an update, and such a one is waited for now and
then. What steps beside updates took more than these is what a tail has lost; the next update may start if, with what
the last ones cost, the loss stays below the bound with some to spare. What is not known yet is taken to be expensive.

Invariants, asserted by `tests/test_draft_throttle.py`: the slow-down of a tail exceeds the bound by one update at most;
with steps and updates as uneven as on a GPU it is below the bound on average; updates that cost far less than the bound
wait for nothing but that step to compare with.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from statistics import median

REMEMBERED_QUIET, REMEMBERED_BUSY = 9, 15
"""Steps of a kind without an update, and of any beside one, that the medians are of."""
LEAST_QUIET = 4
"""Steps of a kind without an update in a tail, before one starts beside such steps, or is judged by them."""
LONGEST_BUSY = 16
"""Steps after which one without an update is waited for."""
ALIKE = "alike"
"""The kind of steps that nobody tells apart."""
TO_SPARE = 0.25
"""Of the bound: steps vary, and whoever looks for room for an update finds it where those to compare with were slow by
chance; the last update of a tail may cost more than most."""
ASSUMED_COST = 1.0
"""Of an update, as long as none was measured: steps beside it take twice as long."""


class Throttle:
    def __init__(self, bound: float) -> None:
        self._aim = (1 - TO_SPARE) * bound
        self._quiet_s: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED_QUIET))
        """By kind."""
        self._kind: Hashable = ALIKE
        """Of the last step."""
        self._ratios: deque[float] = deque(maxlen=REMEMBERED_BUSY)
        """Of steps beside an update to those without one at that time."""
        self._steps_each = 1.0
        """Steps that an update runs beside."""
        self.begin_tail()

    def begin_tail(self) -> None:
        """Each tail keeps the bound by itself; what updates cost is remembered."""
        self.num_steps = self.num_busy = self.num_updates = 0
        self._since_quiet = 0
        self._usual_s = self.lost_s = 0.0
        """What its steps would have taken without updates, and what they took more."""
        self.busy_s = 0.0
        """Of its steps beside an update."""
        self._quiet_s.clear()

    @property
    def cost(self) -> float | None:
        """By how much steps beside an update take longer; None before any were measured."""
        return median(self._ratios) - 1.0 if self._ratios else None

    @property
    def _usual_step_s(self) -> float | None:
        """Of a step like the last one, without an update; a single one may have taken any time, e.g. while a graph was
        made, so None before there were some."""
        quiet_s = self._quiet_s.get(self._kind, ())
        return median(quiet_s) if len(quiet_s) >= LEAST_QUIET else None

    @property
    def _expected_cost(self) -> float:
        return ASSUMED_COST if self.cost is None else self.cost

    @property
    def slowdown(self) -> float:
        """Of the tail so far, all its steps together."""
        return self.lost_s / self._usual_s if self._usual_s else 0.0

    def step_took(self, seconds: float, *, beside_update: bool, kind: Hashable = ALIKE) -> None:
        """`kind`: steps of one kind take as long as each other; None: as no other."""
        self.num_steps += 1
        self._kind = kind
        if not beside_update:
            if kind is not None:
                self._since_quiet = 0
                self._quiet_s[kind].append(seconds)
            self._usual_s += seconds
            return
        self.num_busy += 1
        self.busy_s += seconds
        self._since_quiet += 1
        usual_s = self._usual_step_s
        if usual_s is not None:
            self._ratios.append(seconds / usual_s)
        else:
            usual_s = seconds / (1.0 + max(0.0, self._expected_cost))
        self._usual_s += usual_s
        self.lost_s += seconds - usual_s

    def may_start(self) -> bool:
        """Another update; to be asked while none runs."""
        if self.num_updates:
            self._steps_each = max(1.0, self.num_busy / self.num_updates)
        usual_s = self._usual_step_s
        if usual_s is None or self._since_quiet >= LONGEST_BUSY:
            return False
        cost = self._expected_cost
        if cost <= self._aim and self.slowdown <= self._aim:
            return True
        next_s = self._steps_each * usual_s
        return self.lost_s + cost * next_s <= self._aim * (self._usual_s + next_s)

    def started(self) -> None:
        self.num_updates += 1
