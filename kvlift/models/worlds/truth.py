"""What is claimed against what is there: the ghost's tags under a notice, and under the index."""

from kvlift.core.agreed import Agreed
from kvlift.core.ids import DeviceHandle
from kvlift.core.notice import BecameReady
from kvlift.models.worlds.ghost import Bench, Tag, tag_of


def is_right(agreed: Agreed, notice: BecameReady, device: dict[DeviceHandle, Tag | None]) -> bool:
    """Every position that the notice calls good holds what the prompt says.

    What the host's own cache has is the host's affair."""
    request = agreed.requests[notice.attempt]
    prompt = request.prompt
    n_kept = len(notice.pages)
    if notice.n_tokens_kept is not None:
        n_kept = -(-notice.n_tokens_kept // prompt.page_tokens)
    return len(notice.pages) == prompt.n_pages and all(
        at < request.n_pages_given or device.get(page) == tag_of(prompt, at)
        for at, page in enumerate(notice.pages[:n_kept])
    )


def is_true(agreed: Agreed, bench: Bench) -> bool:
    """Every page of the index holds on this rank what its tokens say."""
    path_by_segment: dict[int, bytes] = {0: b""}
    todo = list(agreed.index.segments.values())
    while todo:
        waiting = []
        for segment in todo:
            if segment.parent not in path_by_segment:
                waiting.append(segment)
                continue
            path = path_by_segment[segment.parent]
            path_by_segment[segment.id] = path + segment.tokens
            size = len(segment.tokens) // segment.n_pages
            tags = [
                segment.namespace + path + segment.tokens[: (at + 1) * size]
                for at in range(segment.n_pages)
            ]
            pairs_up = zip(segment.device or (), tags, strict=False)
            pairs_down = zip(segment.host or (), tags, strict=False)
            if any(bench.device.get(page) != tag for page, tag in pairs_up):
                return False
            if any(bench.host.get(page) != tag for page, tag in pairs_down):
                return False
        if len(waiting) == len(todo):
            return False
        todo = waiting
    return True
