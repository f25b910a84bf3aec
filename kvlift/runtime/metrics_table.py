"""Every metric of a driver as data: the registry and `docs/metrics.md` are both made from it."""

from typing import Final

from attrs import frozen

SECONDS: Final = (
    0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""Upper edges of all histograms, from an idle tick to a ballot's deadline."""


@frozen
class Spec:
    """`kind`: counter, gauge or histogram. `doc` is the help text and the row of the manual."""

    name: str
    kind: str
    labels: tuple[str, ...]
    doc: str


METRICS: Final = (
    Spec("kvlift_ticks_total", "counter", (), "Ticks."),
    Spec(
        "kvlift_tick_seconds",
        "histogram",
        (),
        "Time from the host's call of tick() to its return, the wait for a ballot included.",
    ),
    Spec("kvlift_ballots_total", "counter", (), "Ballots whose verdict was taken: reductions."),
    Spec(
        "kvlift_ballot_wait_seconds",
        "histogram",
        (),
        "Time that a tick waited for the verdict of the ballot that was sent in the last one.",
    ),
    Spec(
        "kvlift_calls_total", "counter", ("call",), "Calls of the host that took effect, by name."
    ),
    Spec(
        "kvlift_calls_refused_total",
        "counter",
        ("call",),
        "Calls that came too late for their request; nothing happened.",
    ),
    Spec(
        "kvlift_requests_ended_total",
        "counter",
        ("outcome", "cause"),
        "Requests that have ended; cause: the prefill node's failure, none where there was none.",
    ),
    Spec(
        "kvlift_tokens_promised_total",
        "counter",
        ("tier",),
        "Tokens that prefill nodes were told not to send, by the tier that has them.",
    ),
    Spec(
        "kvlift_tokens_restored_total",
        "counter",
        ("tier",),
        "Tokens of requests that became ready whose pages came from a tier"
        " (device: they were in place, or another request brought them).",
    ),
    Spec(
        "kvlift_tokens_received_total",
        "counter",
        (),
        "Tokens of requests that became ready whose pages came from a prefill node.",
    ),
    Spec(
        "kvlift_tokens_recomputed_total",
        "counter",
        (),
        "Tokens of resumed requests whose pages were gone: the host computes them again.",
    ),
    Spec(
        "kvlift_tokens_lost_total",
        "counter",
        ("tier", "cause"),
        "Tokens that were promised from a tier and had to be asked of the prefill node after all;"
        " cause: late (deadline), read (missing or damaged in storage), copy (a restore failed),"
        " leader (another request was to bring them).",
    ),
    Spec(
        "kvlift_transfer_waited_for_restore_seconds",
        "histogram",
        (),
        "Time from the tick in which everything had come from the prefill node, first token"
        " included, to the tick in which the request became ready.",
    ),
    Spec(
        "kvlift_pages_unwritten_total",
        "counter",
        ("tier",),
        "Pages that could not be copied down to a tier.",
    ),
    Spec(
        "kvlift_port_failures_total",
        "counter",
        ("effect",),
        "Effects whose port raised: faults of this rank.",
    ),
    Spec(
        "kvlift_reports_stale_total",
        "counter",
        (),
        "Reports of ports under a ticket that nobody watched any more.",
    ),
    Spec("kvlift_requests", "gauge", ("phase",), "Requests by phase of their machine."),
    Spec(
        "kvlift_pages",
        "gauge",
        ("tier", "state"),
        "Pages of the device and host tiers by state, as all ranks have agreed;"
        " the states of a tier add up to the room of the poorest rank.",
    ),
    Spec(
        "kvlift_in_flight",
        "gauge",
        ("work",),
        "Reads, copies and writes that this rank's ports have and that have not ended.",
    ),
    Spec(
        "kvlift_queued",
        "gauge",
        ("work",),
        "Reads, copies and writes that wait for their turn on this rank.",
    ),
    Spec("kvlift_tickets", "gauge", (), "Open tickets: what ranks have to agree about."),
    Spec(
        "kvlift_measured_microseconds_per_page",
        "gauge",
        ("way",),
        "What the cost model goes by: the slowest rank's storage, the fastest rank's prefill node;"
        " 0 until measured.",
    ),
)


def manual() -> str:
    """The table of `docs/metrics.md`."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.doc} |")
    return "\n".join(rows) + "\n"
