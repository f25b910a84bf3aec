"""The words of `explain`: one sentence for each effect, report, event and notice."""

from collections.abc import Mapping
from typing import Final, assert_never

from kvlift.core.agreed import Rates
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    MirrorEnded,
    PagesArrived,
    PeerFailed,
    PeerLetGo,
    PersistEnded,
    PrefetchEnded,
    PrefetchProgressed,
    RestoreEnded,
    TokenArrived,
)
from kvlift.core.notice import (
    BecameReady,
    HasEnded,
    HasGrown,
    HasShrunk,
    Notice,
    PageLost,
    WasPromised,
    WasRefused,
    WasRetracted,
)
from kvlift.core.plan import Plan
from kvlift.core.policy import Switch
from kvlift.core.tier import Source
from kvlift.runtime.config import Config
from kvlift.runtime.journal_lines import EffectRow
from kvlift.runtime.log import plain
from kvlift.runtime.telling import WORDS

ARROWS: Final[Mapping[str, str]] = {
    "StorageAnswered": "storage is asked no more",
    "ReadShort": "some rank could not read all of it from storage",
    "ReadOverdue": "the read from storage is given up",
    "ReadEnded": "the read from storage has ended on all ranks",
    "CopyShort": "a restore came up short on some rank",
    "CopyEnded": "a restore has ended on all ranks",
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
}
"""By event. What is missing here is told by a call or a notice."""

WHY_SHRUNK: Final[Mapping[str, str]] = {
    "ReadShort": "a page was missing or damaged in storage on some rank",
    "ReadOverdue": "the read from storage was given up",
    "CopyShort": "a copy to the device failed on some rank",
    "LeaderLost": "the request that was to bring these pages has ended",
    "HandedOver": "the request that was to bring these pages has ended",
    "ReadEnded": "the read from storage ended early on some rank",
    "CopyEnded": "a copy to the device ended early on some rank",
}
"""By event, the surest reason first."""


TOO_SLOW: Final = "it took too long on some rank"
DETACHED: Final = "storage is detached"
ENOUGH: Final = "everything else is here"
"""Why a read is given up, where the core's state is known."""


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
        case "CancelPersist":
            return "a write that does not move must let go of the device's pages"
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
        case RestoreEnded(n_pages=n_pages, start=start) if start + n_pages < row.n_pages:
            return (
                f"a copy to the device has ended, {start + n_pages} of {pages(row.n_pages)} landed"
            )
        case RestoreEnded(n_pages=n_pages, start=start):
            return f"the restore has ended, {pages(start + n_pages)} landed"
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


def notice_words(notice: Notice, why_shrunk: str) -> str:
    match notice:
        case WasPromised(plan=plan):
            return f"admitted: {plan_words(plan)}; {_promise_words(plan.promise)}"
        case HasShrunk(page=page):
            why = f": {why_shrunk}" if why_shrunk else ""
            return f"the cached prefix ends at page {page} now{why}"
        case BecameReady(plan=plan):
            return f"ready: {plan_words(plan)}"
        case WasRetracted():
            return "retracted: its full pages stay in the cache"
        case HasGrown(pages=handles):
            return f"its growth by {pages(len(handles))} is granted" if handles else _NO_GROWTH
        case WasRefused(call=call, phase=phase):
            return f"{plain(call)} is refused in phase {plain(phase)}"
        case HasEnded(outcome=outcome, cause=None):
            return f"ended: {outcome.value}"
        case HasEnded(outcome=outcome, cause=cause, peer=peer):
            assert cause is not None
            return f"ended: {outcome.value}, prefill node {plain(peer)} {WORDS[cause]}"
        case PageLost(tier=tier, n_pages=n_pages):
            return f"{pages(n_pages)} could not be written to {plain(tier)}"
        case _:
            assert_never(notice)


_NO_GROWTH: Final = "its growth is refused"


def why_not_read(rates: Rates, config: Config, n_read: int, n_left: int) -> str:
    """Why an admission reads `n_read` pages and leaves `n_left` that storage has as well."""
    measured = f"a read has taken {rates.prefetch_us} us a page, a transfer {rates.transfer_us}"
    is_dearer = rates.is_read_dearer(config.cost_threshold_percent)
    if n_read == 0 and n_left < config.prefetch_min_pages:
        return f"fewer than {pages(config.prefetch_min_pages)} are not worth a read"
    if n_read == 0 and config.cost_model is Switch.ON and is_dearer:
        return f"by what was measured they come sooner from the prefill node ({measured})"
    return "the host has no room for them"


def plan_words(plan: Plan) -> str:
    bounds = plan.bounds
    edges = (bounds.device, bounds.shared, bounds.host, bounds.storage, plan.n_pages)
    rest = "computed again" if plan.rest is Source.RECOMPUTE else "from the prefill node"
    where = ("on the device", "from another request", "from the host", "from storage", rest)
    parts = [
        f"{span(start, stop - start)} {words}"
        for start, stop, words in zip((0, *edges), edges, where, strict=False)
        if stop > start
    ]
    return ", ".join(parts)


def _promise_words(promise: int) -> str:
    if promise == 0:
        return "the prefill node sends everything"
    return f"the prefill node was promised that it need not send the first {pages(promise)}"
