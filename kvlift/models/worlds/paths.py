"""The pages of an index by what they hold, counted anew: shares no code with eviction."""

from collections.abc import Iterator

from attrs import frozen

from kvlift.core.agreed import Agreed
from kvlift.core.index import Segment
from kvlift.models.worlds.ghost import Tag


@frozen
class Page:
    """One page of the index: what it holds (namespace and all tokens up to its end), and where."""

    tag: Tag
    segment: Segment

    @property
    def is_idle_on_device(self) -> bool:
        return self.segment.device is not None and self.segment.device_pins == 0


def tokens_before(agreed: Agreed, segment: Segment) -> bytes:
    """The tokens of the pages in front of a segment."""
    before = b""
    while segment.parent:
        segment = agreed.index.segments[segment.parent]
        before = segment.tokens + before
    return before


def pages_of(agreed: Agreed) -> Iterator[Page]:
    """Every page that has a place in the index."""
    for segment in agreed.index.segments.values():
        front = segment.namespace + tokens_before(agreed, segment)
        size = len(segment.tokens) // segment.n_pages
        for at in range(segment.n_pages):
            yield Page(front + segment.tokens[: (at + 1) * size], segment)
