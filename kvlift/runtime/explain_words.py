"""The words of `explain`: one sentence for each effect, report, event and notice."""

from collections.abc import Mapping
from typing import Any, Final, assert_never

from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    MirrorEnded,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    PersistEnded,
    PrefetchEnded,
    PrefetchProgressed,
    RestoreEnded,
    TokenArrived,
)
from kvlift.runtime.journal_lines import EffectRow
from kvlift.runtime.log import plain
from kvlift.runtime.telling import WORDS

ARROWS: Final[Mapping[str, str]] = {
    "StorageAnswered": "all ranks know what storage has",
    "AskedAgain": "storage is asked",
    "ReadShort": "some rank could not read all of it from storage",
    "ReadOverdue": "the read from storage took too long on some rank and is given up",
    "ReadEnded": "the read from storage has ended on all ranks",
    "CopyShort": "a restore came up short on some rank",
    "CopyEnded": "a restore has landed on all ranks",
    "PagesCame": "more pages from the prefill node are on all ranks",
    "TokenCame": "the first token is on all ranks",
    "PeerStopped": "the prefill node can give no more",
    "SharedCame": "pages that another request brought are shared now",
    "LeaderLost": "the request that was to bring shared pages has ended: its own prefill node must",
    "HandedOver": "takes over the restores of a request that has ended",
    "Widened": "the prefill node is asked for pages that it had been told to keep",
    "AllLanded": "everything is in place on all ranks",
    "Started": "runs",
    "Grown": "has more pages",
    "TailEnded": "the copy of its last page has ended",
    "WantedBack": "is wanted back",
    "Drained": "its last pages are given back",
}
"""By event. What is missing here is told by a call or a notice."""

WHY_SHRUNK: Final[Mapping[str, str]] = {
    "ReadShort": "a page was missing or damaged in storage on some rank",
    "ReadOverdue": "the read from storage was too slow on some rank",
    "CopyShort": "a copy to the device failed on some rank",
    "LeaderLost": "the request that was to bring these pages has ended",
    "HandedOver": "the request that was to bring these pages has ended",
    "ReadEnded": "the read from storage ended early on some rank",
    "CopyEnded": "a copy to the device ended early on some rank",
}
"""By event, the surest reason first."""


def pages(n_pages: int) -> str:
    return "1 page" if n_pages == 1 else f"{n_pages} pages"


def span(start: int, n_pages: int) -> str:
    if n_pages == 1:
        return f"page {start}"
    return f"pages {start} to {start + n_pages - 1}"


def started_words(row: EffectRow) -> str:
    """An effect of the request; it may still wait for its turn on this rank."""
    match row.what:
        case "SendHold":
            return "its prefill node hears of it"
        case "StartLookup":
            return f"storage is asked for {span(row.start, row.n_pages)}"
        case "StartPrefetch":
            return f"read {span(row.start, row.n_pages)} from storage [ticket {row.ticket}]"
        case "StartRestore":
            return f"copy {pages(row.n_pages)} from host to device [ticket {row.ticket}]"
        case "StartMirror":
            return f"copy {pages(row.n_pages)} from device to host [ticket {row.ticket}]"
        case "SendWant" if row.n_pages:
            return f"the prefill node is asked for {span(row.start, row.n_pages)}"
        case "SendWant":
            return "the prefill node is asked for the first token alone"
        case "CancelPrefetch":
            return f"the read from storage is called off, {pages(row.n_pages)} of it are kept"
        case "CancelRestore":
            return "the restore is dropped where it has not begun"
        case "SendCommitted":
            return "the prefill node may let go"
        case "SendAborted":
            return "the prefill node is told to stop"
        case "ClosePeer":
            return "the connection to the silent prefill node is closed"
        case _:
            return f"{row.what}: {pages(row.n_pages)}"


def report_words(report: Landed, row: EffectRow) -> str:
    """`row`: the effect that began it. The token itself is not told."""
    match report:
        case LookupAnswered(n_pages=n_pages):
            return f"storage has {n_pages} of {pages(row.n_pages)}"
        case PrefetchProgressed(n_pages=n_pages):
            return f"{n_pages} of {pages(row.n_pages)} have been read from storage"
        case PrefetchEnded(n_pages=n_pages):
            return f"the read from storage has ended, {n_pages} of {pages(row.n_pages)} are good"
        case RestoreEnded(n_pages=n_pages):
            return f"the restore has ended, {pages(n_pages)} landed"
        case MirrorEnded(n_pages=n_pages):
            return f"the copy to the host has ended, {pages(n_pages)} landed"
        case PersistEnded(n_pages=n_pages):
            return f"the write to storage has ended, {pages(n_pages)} are stored"
        case PagesArrived(n_pages=n_pages):
            return f"{pages(n_pages)} in all have come from the prefill node"
        case TokenArrived():
            return "the first token has come from the prefill node"
        case PeerFailed(cause=cause, reason=reason):
            return f"the prefill node {WORDS[cause]}: {plain(reason)}"
        case PeerLetGo():
            return "the prefill node has let go: it writes nothing any more"
        case _:
            assert_never(report)


def notice_words(name: str, fields: Mapping[str, Any], why_shrunk: str) -> str:
    """Of a recorded notice; `fields` may be anything that a stranger wrote."""
    match name:
        case "WasPromised":
            return f"admitted: {_plan_words(fields)}; {_promise_words(fields)}"
        case "HasShrunk":
            why = f": {why_shrunk}" if why_shrunk else ""
            return f"the cached prefix ends at page {fields.get('page')} now{why}"
        case "BecameReady":
            return f"ready: {_plan_words(fields)}"
        case "WasRetracted":
            return "retracted: its full pages stay in the cache"
        case "HasGrown" if fields.get("pages"):
            return "its growth is granted"
        case "HasGrown":
            return "its growth is refused"
        case "WasRefused":
            return f"{fields.get('call')} is refused in phase {fields.get('phase')}"
        case "HasEnded":
            return f"ended: {fields.get('outcome')}{_cause_words(fields)}"
        case _:
            return name


def _plan_words(fields: Mapping[str, Any]) -> str:
    plan = fields.get("plan", {})
    bounds = plan.get("bounds", {})
    edges = [bounds.get(name, 0) for name in ("device", "shared", "host", "storage")]
    edges.append(plan.get("n_pages", 0))
    rest = "computed again" if plan.get("rest") == "recompute" else "from the prefill node"
    where = ("on the device", "from another request", "from the host", "from storage", rest)
    starts = [0, *edges[:-1]]
    parts = [
        f"{span(start, stop - start)} {words}"
        for start, stop, words in zip(starts, edges, where, strict=True)
        if stop > start
    ]
    return ", ".join(parts) or "no page"


def _promise_words(fields: Mapping[str, Any]) -> str:
    promise = fields.get("plan", {}).get("promise", 0)
    if not promise:
        return "the prefill node sends everything"
    return f"the prefill node was promised that it need not send the first {pages(promise)}"


def _cause_words(fields: Mapping[str, Any]) -> str:
    cause = fields.get("cause")
    if cause is None:
        return ""
    return f", prefill node {plain(str(fields.get('peer')))} {WORDS[PeerCause(cause)]}"
