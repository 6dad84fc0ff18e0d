"""Systems to compare: those of others as they were published, and ours. Pure.

What drafts are worth, by the number of sequences: of TLT and RhymeRL as published (for a 32B model split over 4 GPUs,
and up to 1.86 times whatever the batch), ours as measured on an H200 with texts of which the history could give 75 %
(docs/log.md: later runs gave a little more), or 90 % where it says so. A trained drafter and both together are reckoned
with TLT's figures until ours is measured. StreamRL has a ranker that tells lengths of new prompts: here it knows them,
which is more.
"""

from __future__ import annotations

from slipstream.schedule.rules import Rules
from slipstream.simulate.system import System

TLT_DRAFTS = ((1, 3.62), (2, 3.39), (4, 3.13), (8, 2.73), (16, 2.67), (32, 2.48), (33, 1.0))
"""Beyond 32 sequences it decodes without."""
RHYME_DRAFTS = ((1, 1.86), (64, 1.8), (256, 1.5))
OUR_DRAFTS = ((1, 2.8), (16, 2.32), (64, 2.09), (256, 1.17), (512, 1.0))
OUR_DRAFTS_90 = ((1, 4.35), (16, 4.3), (64, 2.77), (256, 1.34), (512, 1.0))
BOTH_DRAFTS = ((1, 3.62), (8, 2.73), (32, 2.48), (64, 2.09), (256, 1.17), (512, 1.0))

PUBLISHED: dict[str, System] = {
    "colocated": System(Rules("round robin"), colocated=True),
    "one step behind": System(Rules("round robin", staleness=1, mixes_steps=False)),
    "partial rollouts": System(Rules("round robin", "carry", staleness=2, mixes_steps=False)),
    "over-sampling": System(Rules("round robin", "oversample", staleness=2)),
    "StreamRL, in step": System(Rules("skewness split"), streams=True, foresees=True),
    "StreamRL": System(Rules("skewness split", staleness=1, mixes_steps=False), streams=True, foresees=True),
    "RhymeRL": System(Rules("two tiers", "move", staleness=1, mixes_steps=False), drafts=RHYME_DRAFTS),
    "TLT": System(Rules("round robin", lends_idle=True), colocated=True, drafts=TLT_DRAFTS),
}
IN_STEP = Rules(tail="move", lends_idle=True)
BEHIND = Rules(tail="move", staleness=1, lends_idle=True)
OURS: dict[str, System] = {
    "Slipstream, in step": System(IN_STEP, streams=True, drafts=OUR_DRAFTS),
    "Slipstream": System(BEHIND, streams=True, drafts=OUR_DRAFTS),
    "Slipstream, both drafts": System(BEHIND, streams=True, drafts=BOTH_DRAFTS),
    "Slipstream, 90% alike": System(BEHIND, streams=True, drafts=OUR_DRAFTS_90),
}
SYSTEMS = PUBLISHED | OURS
