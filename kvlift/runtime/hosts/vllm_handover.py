"""What a prefill instance says of a prompt that it keeps, and what a decode instance reads of that.

vLLM's proxies carry it from one to the other as `kv_transfer_params`, through the client's hands.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvlift.runtime.hosts.vllm_peers import peer_words

_log = logging.getLogger(__name__)

ADDRESSES_MAX: Final = 1024
WORD_CHARS_MAX: Final = 512


def is_asked_for(params: Mapping[str, Any] | None) -> bool:
    """The client wants this prompt to be kept for a decode instance."""
    return bool(params) and bool((params or {}).get("do_remote_decode"))


def params_of(rid: str, addresses: Sequence[str], namespace: bytes, n_ranks: int) -> dict[str, Any]:
    """For the decode instance: who keeps the prompt, where, and under which name."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": rid,
        "kvlift_addresses": list(addresses),
        "kvlift_namespace": namespace.hex(),
        "tp_size": n_ranks,
    }


def peer_of(params: Mapping[str, Any] | None, namespace: bytes) -> str:
    """The prefill instance that keeps this prompt, or an empty word where there is none.

    What a client sends is looked at: a word of the wrong kind is no peer."""
    if not params or not params.get("do_remote_prefill"):
        return ""
    addresses, rid = params.get("kvlift_addresses"), params.get("remote_request_id")
    if not isinstance(addresses, list) or not 0 < len(addresses) <= ADDRESSES_MAX:
        addresses = [None]
    words = [word for word in (*addresses, rid) if isinstance(word, str)]
    are_good = all(0 < len(word) <= WORD_CHARS_MAX and word.isprintable() for word in words)
    if len(words) <= len(addresses) or not are_good:
        _log.warning("kv_transfer_params without addresses and a request id: computed here")
        return ""
    if params.get("kvlift_namespace") != namespace.hex():
        _log.warning("the prefill instance has another model, salt or adapter: computed here")
        return ""
    return peer_words(words[:-1], words[-1])
