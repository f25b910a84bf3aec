"""The prefix index beside a twin that keeps a record for every page."""

from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.index import Hit, Index, Segment, device_pages, host_pages, match, walk
from kvlift.core.index_edit import IndexEdit
from kvlift.core.policy import EvictionPolicy, Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Tier
from tests.core.dumb_index import DumbIndex

PAGE = 2
RED, BLUE = b"r" * 32, b"b" * 32
TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST])
PROMPTS = st.builds(
    lambda namespace, pages, odd: Prompt(
        namespace, token_bytes([t for page in pages for t in (7, page)] + [1] * odd), PAGE
    ),
    st.sampled_from([RED, RED, RED, BLUE]),
    st.lists(st.integers(0, 1), max_size=6),
    st.integers(0, 1),
)


class TwinIndexes(RuleBasedStateMachine):
    """Both are told the same; both must say the same. Each rule is one edit, then frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.twin = DumbIndex()
        self.now = 0
        self.next_handle = 0
        self.pinned: list[tuple[Tier, Prompt, int, int]] = []
        self.seen: list[Prompt] = []

    def edit(self) -> IndexEdit:
        self.before, self.before_repr = self.index, _picture(self.index)
        return IndexEdit(self.index)

    def freeze(self, edit: IndexEdit, freed: dict[Tier, set[int]] | None = None) -> None:
        freed = freed or {}
        assert set(edit.freed_device) == freed.get(Tier.DEVICE, set())
        assert set(edit.freed_host) == freed.get(Tier.HOST, set())
        self.index = edit.frozen()
        assert _picture(self.before) == self.before_repr, "the old index has changed"

    @rule(tier=TIERS, prompt=PROMPTS, start=st.integers(0, 5))
    def fill(self, tier: Tier, prompt: Prompt, start: int) -> None:
        """Pages [start, end) get a place in a tier where they have none."""
        self.now += 1
        self.seen.append(prompt)
        stop = prompt.n_pages_full
        edit = self.edit()
        if start < stop:
            edit.extend(prompt, stop, now=self.now, priority=0)
            page = start
            for covered in list(edit.cover(prompt, start, stop)):
                segment = edit.segments[covered.id]
                has = segment.device if tier is Tier.DEVICE else segment.host
                if has is None:
                    handles = [self.next_handle + n for n in range(segment.n_pages)]
                    self.next_handle += segment.n_pages
                    _set(edit, tier, segment, handles)
                    self.twin.fill(tier, prompt, page, handles)
                page += covered.n_pages
        self.freeze(edit)

    @rule(tier=TIERS, choice=st.integers(0, 99), start=st.integers(0, 5), n=st.integers(1, 6))
    def pin(self, tier: Tier, choice: int, start: int, n: int) -> None:
        if not self.seen:
            return
        prompt = self.seen[choice % len(self.seen)]
        stop = min(start + n, self.twin.n_known(prompt))
        if start < stop:
            edit = self.edit()
            edit.pin(tier, prompt, start, stop)
            self.twin.pin(tier, prompt, start, stop)
            self.pinned.append((tier, prompt, start, stop))
            self.freeze(edit)

    @rule(choice=st.integers(0, 99))
    def unpin(self, choice: int) -> None:
        if self.pinned:
            tier, prompt, start, stop = self.pinned.pop(choice % len(self.pinned))
            edit = self.edit()
            edit.unpin(tier, prompt, start, stop)
            self.freeze(edit, {tier: self.twin.unpin(tier, prompt, start, stop)})

    @rule(tier=TIERS)
    def flush(self, tier: Tier) -> None:
        edit = self.edit()
        edit.flush(tier)
        self.freeze(edit, {tier: self.twin.flush(tier)})

    @rule(tier=TIERS, n=st.integers(1, 8), policy=st.sampled_from(list(EvictionPolicy)))
    def evict(self, tier: Tier, n: int, policy: EvictionPolicy) -> None:
        n_idle = self.twin.tiers[tier].n_idle()
        edit = self.edit()
        assert edit.evict(tier, n, policy) == min(n, n_idle), "exactly as many as there are"
        gone = {*edit.freed_device, *edit.freed_host}
        assert len(gone) == min(n, n_idle)
        assert self.twin.is_leaf_first(tier, gone)
        self.twin.forget(tier, gone)
        self.freeze(edit, {tier: gone})

    @rule(choice=st.integers(0, 99), known=st.sampled_from(list(Switch)))
    def touch_and_mark(self, choice: int, known: Switch) -> None:
        """Neither changes what is found."""
        if self.seen:
            self.now += 1
            prompt = self.seen[choice % len(self.seen)]
            edit = self.edit()
            edit.touch(prompt, prompt.n_pages_full, now=self.now, priority=1)
            for segment, _start, _n in list(walk(edit.view(), prompt)):
                edit.mark_stored(segment, known)
            self.freeze(edit)

    @invariant()
    def both_find_the_same(self) -> None:
        for prompt in self.seen:
            hit = match(self.index, prompt)
            assert (hit.device, hit.host) == self.twin.hit(prompt)
            handles: list[int] = [*device_pages(self.index, prompt, hit.device)]
            handles += host_pages(self.index, prompt, hit.device, hit.host)
            tiers = [Tier.DEVICE] * hit.device + [Tier.HOST] * (hit.host - hit.device)
            for page, (tier, handle) in enumerate(zip(tiers, handles, strict=True)):
                assert self.twin.tiers[tier].pages[self.twin.place(prompt, page)] == handle

    @invariant()
    def counts_are_those_of_the_pages(self) -> None:
        device, host = self.twin.tiers[Tier.DEVICE], self.twin.tiers[Tier.HOST]
        assert self.index.n_device == len(device.pages)
        assert self.index.n_device_idle == device.n_idle()
        assert self.index.n_host == len(host.pages)
        assert self.index.n_host_idle == host.n_idle()

    @invariant()
    def the_tree_has_no_dead_wood(self) -> None:
        assert not [s for s in self.index.segments.values() if s.is_bare()]
        assert len(self.index.child_by_key) == len(self.index.segments)


def _set(edit: IndexEdit, tier: Tier, segment: Segment, handles: list[int]) -> None:
    if tier is Tier.DEVICE:
        edit.set_device(segment, tuple(DeviceHandle(h) for h in handles))
    else:
        edit.set_host(segment, tuple(HostHandle(h) for h in handles))


def _picture(index: Index) -> Any:
    return repr(evolve(index, segments=dict(index.segments), child_by_key={})), len(
        index.child_by_key
    )


TwinIndexes.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_index_says_what_its_twin_says = TwinIndexes.TestCase


def _prompt(*pages: int, namespace: bytes = RED) -> Prompt:
    return Prompt(namespace, token_bytes([t for page in pages for t in (page, page)]), PAGE)


def _with(prompt: Prompt, n_device: int) -> Index:
    edit = IndexEdit(Index())
    edit.extend(prompt, n_device, now=1, priority=0)
    for segment in list(edit.cover(prompt, 0, n_device)):
        edit.set_device(segment, tuple(DeviceHandle(n) for n in range(segment.n_pages)))
    return edit.frozen()


def test_a_prompt_in_another_namespace_finds_nothing() -> None:
    index = _with(_prompt(1, 2, 3), 3)
    assert match(index, _prompt(1, 2, 3)) == Hit(3, 3)
    assert match(index, _prompt(1, 2, 3, namespace=BLUE)) == Hit(0, 0)


def test_half_of_a_segment_is_found_without_a_split() -> None:
    index = _with(_prompt(1, 2, 3, 4), 4)
    assert match(index, _prompt(1, 2, 9)) == Hit(2, 2)
    assert match(index, _prompt(1, 2)) == Hit(2, 2)
    assert len(index.segments) == 1
    assert device_pages(index, _prompt(1, 2, 9), 2) == (0, 1)


def test_an_edit_that_changes_nothing_gives_the_same_index() -> None:
    index = _with(_prompt(1, 2), 2)
    assert IndexEdit(index).frozen() is index


def test_pages_that_are_not_there_are_an_error_not_a_guess() -> None:
    index = _with(_prompt(1, 2), 2)
    with pytest.raises(AssertionError, match="3 device pages asked for, the index has 2"):
        device_pages(index, _prompt(1, 2, 3), 3)
