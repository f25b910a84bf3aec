import gc
import sys
import threading
import weakref

import pytest

from kvlift.core import keys
from kvlift.core.keys import Namespace, page_keys
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects import keyring
from kvlift.effects.keyring import KeyRing


def prompt_of(n_pages: int, first: int = 0) -> Prompt:
    namespace = Namespace(page_tokens=2).digest()
    return Prompt(namespace, token_bytes(range(first, first + 2 * n_pages)), 2)


def expected(prompt: Prompt) -> list[bytes]:
    return list(page_keys(prompt.namespace, prompt.tokens, prompt.page_tokens))


@pytest.fixture
def n_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each key that is computed."""
    seen: list[int] = []

    def counted(*args: object) -> object:
        for number, key in enumerate(keys.page_keys(*args)):  # type: ignore[arg-type]
            seen.append(number)
            yield key

    monkeypatch.setattr(keyring, "page_keys", counted)
    return seen


def test_keys_are_those_of_the_core_in_the_order_asked() -> None:
    prompt = prompt_of(6)
    every = expected(prompt)
    ring = KeyRing()
    assert ring.keys(prompt, (4, 0, 2)) == [every[4], every[0], every[2]]
    assert ring.keys(prompt, range(6)) == every
    assert ring.keys(prompt, ()) == []


def test_a_prompt_is_hashed_once_and_no_further_than_asked(n_hashed: list[int]) -> None:
    prompt, ring = prompt_of(6), KeyRing()
    ring.keys(prompt, (2,))
    assert n_hashed == [0, 1, 2]
    ring.keys(prompt, (0, 1))
    ring.keys(prompt, (5,))
    ring.keys(prompt, range(6))
    assert n_hashed == [0, 1, 2, 3, 4, 5]


def test_many_threads_get_the_same_keys_and_hash_once(n_hashed: list[int]) -> None:
    prompt, ring = prompt_of(300), KeyRing()
    every = expected(prompt)
    answers: list[list[bytes]] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=lambda: answers.append(ring.keys(prompt, range(300))))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert answers == [every] * 8
    assert n_hashed == list(range(300))


def test_a_page_without_a_key_is_a_bug() -> None:
    with pytest.raises(IndexError, match="6 full pages"):
        KeyRing().keys(prompt_of(6), (6,))
    with pytest.raises(IndexError):
        KeyRing().keys(prompt_of(6), (-1,))


def test_the_ring_is_bounded_and_forgets_what_was_used_longest_ago(n_hashed: list[int]) -> None:
    first, second, third = prompt_of(1), prompt_of(1, 10), prompt_of(1, 20)
    ring = KeyRing(n_prompts_max=2)
    for prompt in (first, second, first, third):
        ring.keys(prompt, (0,))
    assert len(n_hashed) == 3
    ring.keys(first, (0,))
    assert len(n_hashed) == 3
    ring.keys(second, (0,))
    assert len(n_hashed) == 4


def test_the_ring_keeps_no_prompt_alive_and_is_not_fooled_by_its_successor() -> None:
    ring = KeyRing()
    for first in range(50):
        prompt = prompt_of(3, first)
        assert ring.keys(prompt, range(3)) == expected(prompt)
        reference = weakref.ref(prompt)
        del prompt
        gc.collect()
        assert reference() is None
