"""Pinned host memory: no registration outlives its mapping, no mapping in use goes away."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from attrs import define, field

from kvlift.effects import host_mapping
from kvlift.effects.host_pool import HostPool


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return True
    return False


@define
class SimulatedRegistry:
    """Registrations as CUDA keeps them: by address, whatever becomes of the memory."""

    live: dict[int, int] = field(factory=dict)
    n_unregistered: int = 0
    unregister_answer: int | None = None

    def register(self, address: int, size_bytes: int) -> int:
        assert is_mapped(address)
        if any(a < address + size_bytes and address < a + n for a, n in self.live.items()):
            return 712
        self.live[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        assert is_mapped(address), "unmapped before it was unregistered"
        if self.unregister_answer is not None:
            return self.unregister_answer
        if address not in self.live:
            return 713
        del self.live[address]
        self.n_unregistered += 1
        return 0


def pool_with(registry: SimulatedRegistry, n_pages: int = 3) -> HostPool:
    return HostPool(n_pages, 4096, pinned=True, registry=registry)


def test_a_closed_pool_is_unregistered_and_then_unmapped() -> None:
    registry = SimulatedRegistry()
    pool = pool_with(registry)
    address = pool.address
    assert registry.live == {address: 3 * 4096}
    assert pool.close()
    assert not pool.is_pinned
    assert registry.live == {}
    assert not is_mapped(address)
    assert pool.close()
    assert registry.n_unregistered == 1


def test_a_lost_pool_is_unregistered_before_its_memory_goes() -> None:
    registry = SimulatedRegistry()
    address = pool_with(registry).address
    gc.collect()
    assert registry.live == {}
    assert registry.n_unregistered == 1
    assert not is_mapped(address)


def test_pools_that_are_lost_one_after_the_other_can_all_be_pinned() -> None:
    registry = SimulatedRegistry()
    addresses = {pool_with(registry).address for _ in range(20)}
    # The same addresses come back: that is what a registration left behind would meet.
    assert len(addresses) < 20


def test_a_lost_pool_in_a_cycle_is_unregistered_too() -> None:
    registry = SimulatedRegistry()
    pool = pool_with(registry)
    pool.itself = pool  # type: ignore[attr-defined]
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert registry.live == {}


def test_a_view_keeps_the_memory_mapped_after_close_but_not_registered() -> None:
    registry = SimulatedRegistry()
    pool = pool_with(registry)
    address = pool.address
    view, tensor = pool.page_view(1), pool.tensor()[2]
    assert not pool.close()
    assert registry.live == {}
    view[:2] = b"ab"
    tensor.fill_(7)
    assert is_mapped(address)
    view.release()
    assert not pool.close()
    assert int(tensor.sum(dtype=torch.int64)) == 7 * 4096
    del tensor
    assert pool.close()
    assert not is_mapped(address)


def test_a_tensor_of_a_lost_pool_keeps_the_memory_mapped_but_not_registered() -> None:
    registry = SimulatedRegistry()
    pool = pool_with(registry)
    address = pool.address
    tensor = pool.tensor()[1:]
    del pool
    gc.collect()
    assert registry.live == {}
    assert is_mapped(address)
    assert int(tensor.fill_(3).sum(dtype=torch.int64)) == 3 * 2 * 4096
    del tensor
    gc.collect()
    assert not is_mapped(address)


def test_a_pool_that_is_lost_with_a_copy_running_stays_mapped_and_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[host_mapping.HostMapping] = []
    monkeypatch.setattr(host_mapping, "_kept", kept)
    registry = SimulatedRegistry()
    pool = pool_with(registry)
    address = pool.address
    pool.lend()
    assert not pool.close()
    assert pool.is_pinned
    del pool
    gc.collect()
    assert registry.live == {address: 3 * 4096}
    assert is_mapped(address)
    assert "lost in use" in caplog.text
    (mapping,) = kept
    mapping.take_back()
    assert mapping.retire()


def test_memory_that_the_driver_will_not_unregister_stays_mapped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = SimulatedRegistry(unregister_answer=700)
    pool = pool_with(registry)
    assert not pool.close()
    assert is_mapped(pool.address)
    assert "error 700" in caplog.text
    registry.unregister_answer = None
    assert pool.close()


@define
class _StaleRegistry(SimulatedRegistry):
    """Something was registered at `offset` from the next pool and unmapped without a word."""

    offset: int = 0
    is_clean: bool = False

    def register(self, address: int, size_bytes: int) -> int:
        if not self.is_clean:
            self.is_clean = True
            self.live[address + self.offset] = 4096
        return SimulatedRegistry.register(self, address, size_bytes)


def test_a_stale_registration_at_the_pools_address_is_taken_over() -> None:
    registry = _StaleRegistry()
    pool = pool_with(registry)
    assert pool.is_pinned
    assert registry.live == {pool.address: 3 * 4096}
    assert pool.close()
    assert registry.live == {}


def test_a_stale_registration_elsewhere_is_explained() -> None:
    with pytest.raises(RuntimeError, match=r"error 712.*cudaHostUnregister"):
        pool_with(_StaleRegistry(offset=4096))


def test_a_refused_registration_says_what_to_do_and_leaves_nothing_behind() -> None:
    class Full(SimulatedRegistry):
        def register(self, address: int, size_bytes: int) -> int:
            return 2

    registry = Full()
    with pytest.raises(RuntimeError, match="ulimit -l"):
        pool_with(registry)
    gc.collect()
    assert registry.n_unregistered == 0
