"""What makes two pages the same page."""

import hashlib
import struct

import hypothesis.strategies as st
import pytest
from attrs import asdict
from hypothesis import given

from kvlift.core.keys import KEY_BYTES, Namespace, page_keys
from kvlift.core.prompt import Prompt, n_pages_covering, n_pages_filled, token_bytes

TEXT = st.text(alphabet="ab=:1\0", max_size=4)
NAMESPACES = st.builds(
    Namespace,
    tenant=TEXT,
    salt=TEXT,
    lora=TEXT,
    model=TEXT,
    weights=TEXT,
    dtype=TEXT,
    layout=TEXT,
    page_tokens=st.integers(1, 128),
    shard=TEXT,
)


@given(NAMESPACES, NAMESPACES)
def test_two_namespaces_have_one_digest_only_if_they_are_equal(
    one: Namespace, other: Namespace
) -> None:
    assert (one.digest() == other.digest()) == (asdict(one) == asdict(other))


@given(st.text(max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_moving_a_letter_from_one_field_to_the_next_is_another_namespace(
    text: str, cut: int, other: int
) -> None:
    a, b = min(cut, len(text)), min(other, len(text))
    one = Namespace(tenant=text[:a], salt=text[a:])
    two = Namespace(tenant=text[:b], salt=text[b:])
    assert (one.digest() == two.digest()) == (a == b)


def test_keys_are_what_they_were_in_the_first_version() -> None:
    """Golden: a change here makes every stored page of every user a miss."""
    namespace = Namespace(tenant="acme", model="llama", page_tokens=2, shard="tp0of2")
    digest = namespace.digest()
    encoded = b"kvlift namespace 1\0" + b"".join(
        b"%s=%d:%s" % (name, len(value), value)
        for name, value in (
            (b"tenant", b"acme"),
            (b"salt", b""),
            (b"lora", b""),
            (b"model", b"llama"),
            (b"weights", b""),
            (b"dtype", b""),
            (b"layout", b""),
            (b"page_tokens", b"2"),
            (b"shard", b"tp0of2"),
        )
    )
    assert digest == hashlib.sha256(encoded).digest()
    assert digest.hex() == "b71664ce97122bb5ea2281e28c20a7bb67dce56bdacef25aae39f72004ef1bf2"
    keys = [key.hex() for key in page_keys(digest, token_bytes([1, 2, 3, 4, 5]), 2)]
    assert keys == [
        "e4d0de70710302db90e0fa5d70454ea2846425af005b8e5aa4622a870e2fd7b4",
        "f92a2f9d530833f2765320ae682af43ed4a015f3a73019f5122b6e28f11a657d",
    ]


def test_a_key_holds_everything_in_front_of_its_page() -> None:
    seed = bytes(KEY_BYTES)
    first, second = page_keys(seed, token_bytes([1, 2, 3, 4]), 2)
    assert first == hashlib.sha256(seed + struct.pack("<2i", 1, 2)).digest()
    assert second == hashlib.sha256(first + struct.pack("<2i", 3, 4)).digest()
    other = list(page_keys(seed, token_bytes([9, 2, 3, 4]), 2))
    assert other[1] != second, "the same tokens behind another page are another page"


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), st.integers(1, 5))
def test_only_full_pages_have_keys_and_a_longer_prompt_keeps_them(
    tokens: list[int], page_tokens: int
) -> None:
    seed = bytes(KEY_BYTES)
    keys = list(page_keys(seed, token_bytes(tokens), page_tokens))
    assert len(keys) == n_pages_filled(len(tokens), page_tokens)
    longer = list(page_keys(seed, token_bytes([*tokens, 1, 2, 3]), page_tokens))
    assert longer[: len(keys)] == keys


@given(st.integers(0, 1000), st.integers(1, 64))
def test_the_two_roundings_differ_by_the_partial_page(n_tokens: int, page_tokens: int) -> None:
    full, all_pages = n_pages_filled(n_tokens, page_tokens), n_pages_covering(n_tokens, page_tokens)
    assert all_pages - full == (n_tokens % page_tokens != 0)
    assert full * page_tokens <= n_tokens <= all_pages * page_tokens


def test_a_prompt_shows_neither_tokens_nor_namespace() -> None:
    prompt = Prompt(b"s" * 32, token_bytes([4242]), 4)
    assert repr(prompt) == "Prompt(n_tokens=1, page_tokens=4)"


def test_a_namespace_that_is_no_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, this has 3"):
        Prompt(b"abc", b"", 4)
