"""The kinds of faults, how often each strikes in a run, and how often it has struck.

Every kind draws from a stream of its own, so that leaving one out changes the others as little as
possible: that is what makes a failing run worth shrinking.
"""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Final

from attrs import define, field

KINDS: Final[Mapping[str, str]] = {
    "store_slow": "a lookup, read or write takes many times as long",
    "store_late": "a read or a lookup answers after its deadline",
    "store_fail": "a lookup or a read brings nothing",
    "store_short": "a read brings its first pages only",
    "store_damaged": "a stored page is corrupt or cut off on one rank",
    "store_lost": "a stored page is gone on one rank",
    "store_full": "one rank's storage has no room for a while",
    "store_silent": "one rank's storage answers nothing for a while, then again",
    "persist_fail": "a write to storage fails",
    "copy_slow": "a copy between device and host takes many times as long",
    "restore_fail": "a copy from host to device fails",
    "mirror_fail": "a copy from device to host fails",
    "peer_slow": "pages, tokens and confirmations of a prefill node take long, within deadlines",
    "peer_pieces": "pages come one by one",
    "peer_late": "pages, a token or a confirmation come after their deadline",
    "peer_rejects": "a prefill node refuses a request",
    "peer_fails": "a prefill node can't send the rest to one rank",
    "peer_expires": "a lease ends early",
    "peer_dies": "a prefill node is gone and comes back as a new incarnation",
    "peer_silent": "a prefill node says nothing for a while, then again",
    "abort": "the user hangs up",
    "flush": "the host asks to forget a tier",
    "detach": "storage is detached, and attached later",
    "set_aside": "pages of a tier are somebody else's on one rank for a while",
    "duplicate": "an answer comes twice",
    "late_answer": "an answer of something that is long over comes again",
    "pause": "all ranks stand still for a while",
}
"""By name: what happens."""

HARMS_PEER: Final = ("peer_late", "peer_rejects", "peer_fails", "peer_expires", "peer_dies")
A_TICK: Final = frozenset(
    {
        "store_damaged", "store_lost", "store_full", "store_silent", "peer_rejects", "peer_fails",
        "peer_expires", "peer_dies", "peer_silent", "abort", "flush", "detach", "set_aside",
        "late_answer", "pause",
    }
)  # fmt: skip
"""Kinds that may strike once a tick; the others may strike at every operation."""

RATES_A_TICK: Final = (0.005, 0.02, 0.06)
RATES_AN_OPERATION: Final = (0.02, 0.05, 0.2, 0.5)
CALM_SHARE: Final = 0.1
"""Runs without any fault, where faults are drawn."""


@define(eq=False)
class Faults:
    """`rates`: how often each kind strikes; nothing strikes any more once `is_healed`."""

    rates: Mapping[str, float]
    streams: Mapping[str, Random]
    struck: "Counter[str]" = field(factory=Counter)
    is_healed: bool = False

    @classmethod
    def drawn(cls, seed: int, wanted: tuple[str, ...] | None) -> "Faults":
        """`wanted` None: a mix of kinds that belongs to the seed; some seeds have none."""
        streams = {kind: Random(f"{seed}/faults/{kind}") for kind in KINDS}
        mix = Random(f"{seed}/mix")
        share = 0.0 if mix.random() < CALM_SHARE else mix.choice((0.15, 0.4, 0.8))
        drawn = [kind for kind in KINDS if mix.random() < share]
        rates = {}
        for kind in KINDS:
            rate = streams[kind].choice(RATES_A_TICK if kind in A_TICK else RATES_AN_OPERATION)
            if kind in (drawn if wanted is None else wanted):
                rates[kind] = rate
        return cls(rates, streams)

    def strikes(self, kind: str) -> bool:
        """Whether this fault strikes here; the caller then makes it happen."""
        rate = self.rates.get(kind, 0.0)
        if self.is_healed or rate == 0.0 or self.streams[kind].random() >= rate:
            return False
        self.struck[kind] += 1
        return True

    def take_back(self, kind: str) -> None:
        """There was nothing to strike."""
        self.struck[kind] -= 1

    def stream(self, kind: str) -> Random:
        return self.streams[kind]
