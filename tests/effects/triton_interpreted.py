"""Run by test_copies.py with TRITON_INTERPRET=1: the kernel against plain page reads."""

import torch

from kvlift.effects.copies_scatter import SliceMover
from kvlift.effects.device_memory import LayeredMemory
from kvlift.effects.layout import PageLayout


def check(layout: PageLayout) -> None:
    memory = LayeredMemory.allocate(layout, 7)
    mover = SliceMover(memory, n_programs=3)
    ring = torch.randint(0, 256, (6, layout.page_bytes), dtype=torch.uint8)
    pages = torch.tensor([9, 5, 0, 3, 9])
    mover.warm_up(ring)
    mover.scatter(ring, 2, pages, 1, 3)
    into = bytearray(layout.page_bytes)
    for slot, page in zip((2, 3, 4), (5, 0, 3), strict=True):
        memory.read_page(page, memoryview(into))
        assert bytes(into) == ring[slot].numpy().tobytes()
    memory.read_page(1, memoryview(into))
    assert not any(into)
    gathered = torch.zeros_like(ring)
    mover.gather(gathered, 1, pages, 1, 3)
    assert torch.equal(gathered[1:4], ring[2:5])
    assert not gathered[0].any()
    assert not gathered[4:].any()


def main() -> None:
    torch.set_num_threads(1)
    for kind, n_heads, dim, page_tokens, dtype in (
        ("mha", 2, 8, 4, "bfloat16"),
        ("mla", 1, 5, 3, "float8_e4m3fn"),
        ("mha", 2, 64, 256, "float16"),
        ("mla", 1, 576, 64, "bfloat16"),
    ):
        check(
            PageLayout(
                kind="mha" if kind == "mha" else "mla",
                n_layers=2,
                n_kv_heads=n_heads,
                head_dim=dim,
                dtype=dtype,
                page_tokens=page_tokens,
            )
        )


if __name__ == "__main__":
    main()
