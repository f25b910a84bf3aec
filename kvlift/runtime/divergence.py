"""After a divergence: a second, rare exchange finds the first thing in which the ranks differ."""

import msgspec

from kvlift.core.agreed import Agreed
from kvlift.core.ballot import RanksDiverged, digest_of_requests
from kvlift.effects.ports import RankLate, RankLost, Ranks

REPORT_BYTES_MAX = 4096
N_REQUESTS_NAMED = 16


def report_of(agreed: Agreed) -> bytes:
    """What this rank has to say of its state: bounded, without tokens."""
    named = [
        f"{request.rid[:64]}/{request.attempt}:{type(request.phase).__name__}"
        for request in list(agreed.requests.values())[:N_REQUESTS_NAMED]
    ]
    report = {
        "tick": agreed.tick,
        "requests": digest_of_requests(agreed),
        "n_requests": len(agreed.requests),
        "n_tickets": len(agreed.tickets),
        "next_ticket": agreed.next_ticket,
        "device_live": agreed.ledger.device_live,
        "host_live": agreed.ledger.host_live,
        "phases": named,
        "state": agreed.digest.hex(),
    }
    encoded = msgspec.json.encode(report)
    if len(encoded) <= REPORT_BYTES_MAX:
        return encoded
    del report["phases"]
    return msgspec.json.encode(report)


def explained(error: RanksDiverged, agreed: Agreed, ranks: Ranks) -> RanksDiverged:
    """The same error, naming the first field in which any two ranks differ and their values."""
    try:
        reports = ranks.exchange(report_of(agreed))
    except (RankLate, RankLost) as late:
        return RanksDiverged(error.field, error.tick, str(late))
    told = [_decoded(report) for report in reports]
    for name in max(told, key=len):
        values = [report.get(name) for report in told]
        if any(value != values[0] for value in values):
            said = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            return RanksDiverged(error.field, error.tick, f"{name} differs ({said})")
    return RanksDiverged(error.field, error.tick, "the ranks' reports are equal")


def _decoded(report: bytes) -> dict[str, object]:
    """A rank that had nothing (readable) to say differs in everything, which is the truth."""
    try:
        return msgspec.json.decode(report, type=dict[str, object])
    except msgspec.DecodeError:
        return {}
