"""Mooncake-format traces: one JSON object a line, lengths and block hashes instead of text.

Equal `hash_ids` mean equal whole prefixes of 512-token blocks, so tokens are made up per block id.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvlift.runtime.demo.workload import DemoRefused, Turn, Workload, drawn

BLOCK_TOKENS: Final = 512
LINE_BYTES_MAX: Final = 4 << 20
ROUNDS: Final = 6
PAGE_TOKENS_MOST: Final = 64
ACTS: Final = 2

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Length = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
Hashes = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=200_000)]


class TraceError(DemoRefused):
    """A line that cannot be read; the message names file, line and what is wrong with it."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`timestamp` in ms from the start; lengths in tokens; a hash id a block of 512 tokens."""

    timestamp: Count
    input_length: Length
    output_length: Count
    hash_ids: Hashes


def read_trace(path: Path, n_requests: int) -> list[TraceRequest]:
    """The first `n_requests` of a trace, in order of time; fewer where it has fewer.

    Raises `TraceError`. Later lines are not looked at.
    """
    try:
        requests = list(_requests(path, n_requests))
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    if not requests:
        raise TraceError(f"the trace {path} holds no request")
    return sorted(requests, key=lambda request: request.timestamp)


def _requests(path: Path, n_requests: int) -> Iterator[TraceRequest]:
    n_read = 0
    with path.open("rb") as opened:
        number = 0
        while n_read < n_requests:
            line = opened.readline(LINE_BYTES_MAX + 1)
            if not line:
                return
            number += 1
            if len(line) > LINE_BYTES_MAX:
                raise TraceError(f"{path}, line {number} is longer than {LINE_BYTES_MAX} bytes")
            if not line.strip():
                continue
            yield _request(line, f"{path}, line {number}")
            n_read += 1


def _request(line: bytes, where: str) -> TraceRequest:
    try:
        request = msgspec.json.decode(line, type=TraceRequest)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where} is not JSON: {error}") from error
    n_blocks = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != n_blocks:
        raise TraceError(
            f"{where}: {request.input_length} tokens are {n_blocks} blocks of {BLOCK_TOKENS}, "
            f"but hash_ids has {len(request.hash_ids)}"
        )
    return request


def block_tokens_of(scale: float) -> int:
    """Tokens of a whole block after scaling."""
    return max(1, round(BLOCK_TOKENS * scale))


def page_tokens_of(scale: float) -> int:
    """The largest page, up to 64 tokens, that cuts a scaled block evenly: a trace shares blocks."""
    block = block_tokens_of(scale)
    return max(size for size in range(1, PAGE_TOKENS_MOST + 1) if block % size == 0)


def prompt_tokens(request: TraceRequest, *, scale: float, vocab: int, seed: int) -> tuple[int, ...]:
    """A scaled prompt: whole blocks by their ids, the last one cut as in the trace."""
    block = block_tokens_of(scale)
    *whole, last = request.hash_ids
    n_last = request.input_length - BLOCK_TOKENS * len(whole)
    n_cut = block if n_last == BLOCK_TOKENS else max(1, min(block, round(n_last * scale)))
    tokens: list[int] = []
    for block_id in whole:
        tokens.extend(drawn(f"{seed}/block/{block_id}", block, vocab))
    return (*tokens, *drawn(f"{seed}/block/{last}", block, vocab)[:n_cut])


def trace_workload(
    path: Path, *, n_requests: int, scale: float, vocab: int, positions_max: int, seed: int
) -> Workload:
    """The first requests of a trace at their own times, a flush between the two halves.

    Raises `DemoRefused` for a bad line, or for a request that the model cannot take.
    """
    requests = read_trace(path, n_requests)
    n_all = len(requests)
    n_first = max(1, n_all // ACTS)
    acts: list[tuple[Turn, ...]] = []
    for start, stop in ((0, n_first), (n_first, n_all)):
        act = []
        for place in range(start, stop):
            request = requests[place]
            n_tokens = round((request.input_length + request.output_length) * scale)
            if n_tokens > positions_max:
                raise DemoRefused(
                    f"request {place + 1} of {path} has about {n_tokens} tokens after scaling, "
                    f"the model takes {positions_max}; give a smaller --scale than {scale:g}"
                )
            turn = Turn(
                name=f"request {place + 1}",
                round_number=1 + place * ROUNDS // n_all,
                new_tokens=prompt_tokens(request, scale=scale, vocab=vocab, seed=seed),
                n_output=max(1, round(request.output_length * scale)),
                delay_s=(request.timestamp - requests[start].timestamp) / 1000,
            )
            act.append(turn)
        if act:
            acts.append(tuple(act))
    return Workload(
        what=f"{n_all} requests of {path.name}, lengths x {scale:g}",
        page_tokens=page_tokens_of(scale),
        acts=tuple(acts),
        flush_before=1,
    )
