"""What a host may say of an answer when it gives its request up."""

from kvlift.core.agreed import Agreed
from kvlift.core.ids import Rid
from kvlift.core.keys import TOKEN_BYTES
from kvlift.core.prompt import n_pages_covering
from kvlift.runtime.config import Config
from kvlift.runtime.errors import PromptTooLong


def check_comes_back(agreed: Agreed, config: Config, rid: str, output: bytes) -> None:
    """Raises `PromptTooLong` where the request could never come back: it would wait for more pages
    than the device has, and after `bypass_max` others nobody behind it would be admitted."""
    attempt = agreed.attempt_by_rid.get(Rid(rid))
    if attempt is None:
        return
    # The last token has no KV yet.
    n_tokens = agreed.requests[attempt].n_tokens_prompt + len(output) // TOKEN_BYTES - 1
    n_pages = n_pages_covering(n_tokens, config.page_tokens)
    if n_pages > config.device_pages:
        raise PromptTooLong(rid, n_pages, config.device_pages)
