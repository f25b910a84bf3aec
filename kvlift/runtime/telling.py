"""From the core's notices to what the host reads: physical pages, tokens, reasons in words."""

from typing import Final

from kvlift.core.advance import Decision, State
from kvlift.core.landed import PeerCause
from kvlift.core.local import Local
from kvlift.core.notice import (
    BecameReady,
    HasEnded,
    HasGrown,
    HasShrunk,
    WasRefused,
    WasRetracted,
)
from kvlift.core.phase import Outcome
from kvlift.core.policy import Switch
from kvlift.core.tier import Source
from kvlift.effects.pages import PageTable
from kvlift.runtime.tick import Ended, Grew, Ready, Refused, Shrunk, Tick

WORDS: Final = {
    PeerCause.SILENT: "has not confirmed the end of an aborted transfer",
    PeerCause.LOST: "is gone",
    PeerCause.REFUSED: "refused the request",
    PeerCause.MISMATCH: "has another model or page layout",
    PeerCause.GONE: "has freed the pages: the lease had ended",
    PeerCause.TOKEN_OVERDUE: "has not sent the first token in time",
    PeerCause.OVERDUE: "has not sent the pages in time",
}


def reason_of(notice: HasEnded, local: Local) -> str:
    """Why a request ended. The rank that saw it quotes the peer; the others know the cause."""
    if notice.cause is None:
        return ""
    said = local.reasons.get(notice.hold)
    node = f"prefill node {notice.peer}"
    what = f"{node} {WORDS[notice.cause]}"
    # The wire names the node as well, for its own log.
    return f"{what}: {said.removeprefix(f'{node}: ')}" if said else what


def tick_of(
    state: State,
    before: Local,
    decision: Decision,
    device: PageTable,
    *,
    is_busy: bool,
    first_token: Switch = Switch.ON,
) -> Tick:
    """The host's view of one decision. `before`: what peers had said until this tick.

    With `first_token` off no rank tells a token that nobody waited for: some may lack it yet."""
    ready: list[Ready] = []
    ended: list[Ended] = []
    shrunk: list[Shrunk] = []
    grown: list[Grew] = []
    retracted: list[str] = []
    refused: list[Refused] = []
    for notice in decision.notices:
        match notice:
            case BecameReady():
                ready.append(_ready(notice, before, device, first_token))
            case HasEnded(rid=rid, outcome=outcome, n_pages_landed=n_landed):
                ended.append(
                    Ended(
                        rid=rid,
                        outcome=outcome,
                        reason=reason_of(notice, before),
                        retryable=outcome is Outcome.FAILED,
                        n_pages_landed=n_landed,
                    )
                )
            case HasShrunk(rid=rid, page=page):
                shrunk.append(Shrunk(rid=rid, page=page))
            case HasGrown(rid=rid, pages=pages):
                grown.append(Grew(rid=rid, device_pages=tuple(device.resolve(pages))))
            case WasRetracted(rid=rid):
                retracted.append(rid)
            case WasRefused(rid=rid, call=call, phase=phase):
                refused.append(Refused(rid=rid, call=call, phase=phase))
            case _:
                pass
    return Tick(
        number=state.agreed.tick,
        ready=tuple(ready),
        ended=tuple(ended),
        shrunk=tuple(shrunk),
        grown=tuple(grown),
        retracted=tuple(retracted),
        refused=tuple(refused),
        is_busy=is_busy,
    )


def _ready(notice: BecameReady, before: Local, device: PageTable, first_token: Switch) -> Ready:
    token, logprob = None, None
    is_resumed = notice.plan.rest is Source.RECOMPUTE
    if first_token is Switch.ON and not is_resumed:
        token, logprob = before.tokens.get(notice.hold, (None, None))
    return Ready(
        rid=notice.rid,
        device_pages=tuple(device.resolve(notice.pages)),
        token=token,
        logprob=logprob,
        needs_prefill_from=notice.n_tokens_kept,
        n_pages_by_source=notice.plan.n_pages_by_source(),
    )
