"""Whatever is wrong with what comes from outside: a clear sentence, and the worker goes on."""

import json
import random
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

from kvlift.cli.main import main
from kvlift.core.ids import Attempt, Rid
from kvlift.effects import wire
from kvlift.effects.wire_security import SharedSecret
from kvlift.runtime.worker.generation import FinishKind
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.layouts import whole_layout
from kvlift.runtime.worker.model_config import tiny
from tests.effects.raw_wire import RawRank
from tests.real.harm_server import Server, refused, serving
from tests.real.harm_world import (
    PAGE,
    WAIT_S,
    prompt_of,
    ranks_at_rest,
    run,
    settings_of,
    until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

SECRET = "a secret of thirty-two letters.."
DEVICE_PAGES = 64
KNOWN = prompt_of(800, 60)


@attrs.define(eq=False)
class Place:
    """A server, the address of its prefill node, and what it says about KNOWN."""

    server: Server
    prefill: str
    known_ids: list[int] = attrs.field(factory=list)

    def answer_known(self) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
        body = {"input_ids": list(KNOWN), "sampling_params": sampling}
        answer = self.server.call("/generate", body)
        ids: list[int] = answer["output_ids"]
        return ids


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    address = f"tcp://127.0.0.1:{free_port()}"
    home = tmp_path_factory.mktemp("bad-input")
    options = ("--prefill-bind", address, "--device-pages", str(DEVICE_PAGES))
    with serving(home, *options, secret=SECRET) as server:
        made = Place(server, address)
        made.known_ids = made.answer_known()
        yield made


@pytest.fixture
def server(place: Place) -> Iterator[Server]:
    """Whatever a test does to it: afterwards nothing is held, and the answers are the same."""
    yield place.server
    place.server.ranks_at_rest()
    assert place.answer_known() == place.known_ids
    assert place.server.process.poll() is None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--config prefech=deadline", "did you mean 'prefetch'"),
        ("--config prefetch=never", "wait_complete, deadline, best_effort"),
        ("--config ballot_slots=many", "must be a whole number"),
        ("--config ballot_slots=-5", "must be from 8 to 65536"),
        ("--config write=back --host-pages 0", "write=back needs host_pages above 0"),
        ("--config decode_reserve_pages=512", "must be below device_pages"),
        ("--config journal=file", "needs a journal_path"),
        ("--config page_tokens=4", "--page-tokens"),
        ("--ranks 4", "choose a number of ranks"),
        ("--ranks 0", "not in the range"),
        ("--page-tokens 99999", "not in the range"),
        ("--storage-gib -1", "not in the range"),
        ("--model /nowhere", "give a Hugging Face folder or `tiny`"),
        ("--role decode", "give --peer"),
        ("--role decode --peer here", "write tcp://HOST:PORT"),
        ("--role prefill", "give --prefill-bind"),
        ("--role everything", "not one of"),
        ("--host 256.1.1.1", "cannot listen"),
        ("--storage /etc/passwd", "is a file"),
        ("--frobnicate", "No such option"),
    ],
)
def test_a_call_that_cannot_work_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    words: str,
) -> None:
    monkeypatch.setenv("KVLIFT_SECRET", SECRET)
    assert main(["serve", "--port", "0", *options.split()]) == 2
    told = capsys.readouterr()
    assert not told.out
    [line] = told.err.splitlines()
    assert line.startswith("kvlift: ")
    assert words in line
    assert SECRET not in line


def test_a_secret_that_is_missing_or_short_is_asked_for_and_never_shown() -> None:
    options = ("serve", "--role", "prefill", "--prefill-bind", "tcp://127.0.0.1:1")
    code, told = refused(*options)
    assert (code, told.count("\n")) == (2, 1)
    assert "set KVLIFT_SECRET" in told
    code, told = refused(*options, secret="hunter2")
    assert (code, told.count("\n")) == (2, 1)
    assert "less than 16 bytes" in told
    assert "hunter2" not in told


# -- HTTP -----------------------------------------------------------------------------------------


def generate(**fields: Any) -> bytes:
    return json.dumps({"input_ids": [1, 2, 3], **fields}).encode()


def sampling(**fields: Any) -> bytes:
    return generate(sampling_params=fields)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", b"", 400, "not JSON"),
        ("/generate", b"{", 400, "not JSON"),
        ("/generate", b"\xff\xfe{}", 400, "not JSON"),
        ("/generate", b"[1, 2]", 400, "JSON object"),
        ("/generate", b"[" * 100_000, 400, "not JSON"),
        ("/generate", b'{"input_ids": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, ""),
        ("/generate", b'{"text": NaN}', 400, "not JSON"),
        ("/generate", b"x" * (17 << 20), 413, "larger than"),
        ("/generate", generate(input_ids=[-1]), 400, "malformed"),
        ("/generate", generate(input_ids=[1024]), 400, "below 1024"),
        ("/generate", generate(input_ids=[1 << 40]), 400, "malformed"),
        ("/generate", generate(input_ids=[1.5]), 400, "malformed"),
        ("/generate", generate(input_ids=[]), 400, "empty"),
        ("/generate", generate(input_ids=[[1], []]), 400, "empty"),
        ("/generate", generate(input_ids="abc"), 400, "malformed"),
        ("/generate", generate(input_ids=[[1]] * 300), 400, "1 to 256 prompts"),
        ("/generate", generate(text="both"), 400, "exactly one of"),
        ("/generate", generate(rid="x" * 300), 400, "malformed"),
        ("/generate", generate(rid=""), 400, "malformed"),
        ("/generate", generate(rid=["a", "b"]), 400, "2 entries for 1 prompts"),
        ("/generate", generate(input_ids=[[1], [2]], rid=["a", "a"]), 400, "in use"),
        ("/generate", generate(unheard_of=1), 400, "`unheard_of`"),
        ("/generate", generate(priority="high"), 400, "malformed"),
        ("/generate", generate(priority=1 << 80), 400, "malformed"),
        ("/generate", generate(priority=-(1 << 40)), 400, "malformed"),
        ("/generate", generate(logprob_start_len=1 << 80, return_logprob=True), 400, "malformed"),
        ("/generate", generate(extra_key="x" * 5000), 400, "malformed"),
        ("/generate", generate(tenant="x" * 5000), 400, "malformed"),
        ("/generate", b'{"input_ids": [1], "extra_key": "\\ud800"}', 400, "not JSON"),
        ("/generate", b'{"text": "\\udfff"}', 400, "not JSON"),
        ("/generate", sampling(max_new_tokens=-1), 400, "malformed"),
        ("/generate", sampling(max_new_tokens=0), 400, "malformed"),
        ("/generate", sampling(max_new_tokens=10**30), 400, "at most"),
        ("/generate", sampling(sampling_seed=-1), 400, "malformed"),
        ("/generate", sampling(temperature=-0.5), 400, "temperature"),
        ("/generate", sampling(top_p=0), 400, "top_p"),
        ("/generate", sampling(top_k=-2), 400, "top_k"),
        ("/generate", sampling(stop=["x" * 2000]), 400, "stop texts"),
        ("/generate", sampling(stop_token_ids=[-1]), 400, "malformed"),
        ("/generate", sampling(max_new_tokens=DEVICE_PAGES * PAGE), 400, "shorten it"),
        ("/generate", generate(input_ids=[7] * (DEVICE_PAGES * PAGE + 1)), 400, "shorten it"),
        ("/generate", generate(input_ids=[7] * 200_000), 400, "the model takes"),
        ("/abort_request", b'{"rid": "nobody"}', 404, "no request nobody"),
        ("/abort_request", b'{"rid": 5}', 400, "malformed"),
        ("/abort_request", b"{}", 400, "malformed"),
        ("/flush_cache?tiers=attic", b"{}", 400, "device, host, storage"),
        ("/v1/completions", b'{"model": "gpt-9", "prompt": "a"}', 404, "gpt-9"),
        ("/v1/completions", b'{"prompt": [[]]}', 400, "empty"),
        ("/v1/completions", b'{"prompt": {"a": 1}}', 400, "malformed"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": -3}', 400, "malformed"),
        ("/v1/completions", b'{"prompt": "a", "n": 5}', 400, "`n`"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "empty"),
        ("/v1/chat/completions", b'{"messages": "hi"}', 400, "malformed"),
        ("/v1/chat/completions", b'{"messages": [{"content": "x"}]}', 400, "role"),
        ("/nowhere", b"{}", 404, "/nowhere"),
        ("/server_info", b"{}", 405, "POST"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else None,
)
def test_a_bad_call_is_answered_with_a_sentence(
    place: Place, path: str, body: bytes, status: int, words: str
) -> None:
    found, answer = place.server.answer(path, body)
    assert found == status, answer
    message = answer["error"]["message"]
    assert words in message
    assert 0 < len(message) < 500
    assert "Traceback" not in message


def test_after_all_bad_calls_nothing_is_held(server: Server) -> None:
    info = server.call("/server_info")
    assert info["requests_live"] == 0


def test_what_is_no_http_at_all_hurts_nobody(server: Server) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    draw = random.Random(3)
    words = (
        b"",
        draw.randbytes(4096),
        b"GET " + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n{",
        b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n" + generate()[:9],
    )
    left_open = []
    for said in words:
        for is_left_open in (False, True):
            rude = socket.create_connection((host, int(port)), timeout=5)
            rude.sendall(said)
            if is_left_open:
                left_open.append(rude)
            else:
                rude.close()
    assert server.answer("/health") == (200, "")
    for rude in left_open:
        rude.close()


def test_an_id_in_use_is_refused_until_its_request_has_ended(server: Server) -> None:
    body = {"input_ids": list(prompt_of(801, 20)), "rid": "twice", "stream": True}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    request = urllib.request.Request(f"{server.address}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=WAIT_S) as first:
        assert first.readline().startswith(b"data: ")
        status, answer = server.answer("/generate", generate(rid="twice"))
        assert status == 400
        assert "the request id twice is in use" in answer["error"]["message"]
        assert server.call("/abort_request", {"rid": "twice"}) == {"aborted": "twice"}
        last = [line for line in first if line.strip()][-2]
        reason = json.loads(last.removeprefix(b"data: "))["meta_info"]["finish_reason"]
        assert reason["type"] == "abort"
    server.ranks_at_rest()
    status, _ = server.answer("/abort_request", b'{"rid": "twice"}')
    assert status == 404
    again = generate(rid="twice", sampling_params={"max_new_tokens": 1, "ignore_eos": True})
    assert server.answer("/generate", again)[0] == 200


# -- the wire between decode and prefill ----------------------------------------------------------


def rank_of(place: Place, **changes: Any) -> RawRank:
    """A decode rank that would fit, but for `changes`."""
    page_bytes = whole_layout(tiny(), PAGE).page_bytes
    rank = RawRank(place.prefill, page_bytes=page_bytes)
    fitting = {"layout": whole_layout(tiny(), PAGE).fingerprint(), "model": "tiny/random-0"}
    rank.hello = msgspec.structs.replace(rank.hello, **fitting | changes)
    return rank


def test_raw_bytes_at_the_prefill_port_hurt_nobody(place: Place, server: Server) -> None:
    host, port = place.prefill.removeprefix("tcp://").split(":")
    draw = random.Random(4)
    greeting = b"\xff" + bytes(8) + b"\x7f"
    for said in (
        b"",
        draw.randbytes(10_000),
        b"GET / HTTP/1.1\r\n\r\n",
        greeting + draw.randbytes(500),
        greeting + b"\x03\x00NULL" + bytes(48) + draw.randbytes(500),
        # A frame of 2^62 bytes is announced after a whole ZMTP greeting.
        greeting + b"\x03\x00NULL" + bytes(48) + b"\x02" + (1 << 62).to_bytes(8, "big"),
    ):
        with socket.create_connection((host, int(port)), timeout=5) as rude:
            rude.sendall(said)
    assert place.answer_known() == place.known_ids


def test_messages_outside_of_the_protocol_hurt_nobody(place: Place, server: Server) -> None:
    draw = random.Random(5)
    with rank_of(place) as rude:
        for _ in range(200):
            n_frames = draw.randint(1, 5)
            rude.say_raw(*(draw.randbytes(draw.randint(0, 300)) for _ in range(n_frames)))
        rude.hold("stranger", bytes(64))
        refusal = rude.hear().message
        assert isinstance(refusal, wire.Refused)
        answer = rude.greet(SharedSecret(SECRET.encode()))
        assert isinstance(answer, wire.Welcome)
        header = wire.encoded(wire.Hold(Rid("odd"), Attempt(1), bytes(32), PAGE))
        for frames in ([header], [header, b"odd"], [header[:-1]], [b"\xc1" * 9_000]):
            rude.say_raw(*frames)
        rude.want("unknown", 0, 1 << 19, 0)
        assert isinstance(rude.hear().message, wire.Gone)
    with rank_of(place) as huge:
        assert isinstance(huge.greet(SharedSecret(SECRET.encode())), wire.Welcome)
        huge.say_raw(b"x" * (64 << 20))
        huge.hold("after-it", bytes(64))
        # That connection is over; what comes on the next one has not been greeted.
        refusal = huge.hear().message
        assert isinstance(refusal, wire.Refused)
        assert refusal.cause == "session"


@pytest.mark.parametrize(
    ("tokens", "page_tokens", "words"),
    [
        ((5, 1024, 7), PAGE, "outside the vocabulary"),
        ((5, -1, 7), PAGE, "outside the vocabulary"),
        ((5, 6, 7), 2 * PAGE, "pages of 8 tokens"),
        ((), PAGE, "at least one token"),
        ((1,) * (1 << 20), PAGE, "the model takes"),
    ],
    ids=["too-high", "negative", "other-pages", "empty", "endless"],
)
def test_a_prompt_that_prefill_cannot_compute_is_rejected_with_the_reason(
    place: Place, tokens: tuple[int, ...], page_tokens: int, words: str
) -> None:
    data = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
    with rank_of(place) as rank:
        assert isinstance(rank.greet(SharedSecret(SECRET.encode())), wire.Welcome)
        rank.hold("wrong", data, page_tokens=page_tokens)
        rejected = rank.hear().message
        assert isinstance(rejected, wire.Rejected)
        assert words in rejected.reason


def test_a_stranger_with_another_secret_is_refused(place: Place, server: Server) -> None:
    with rank_of(place) as stranger:
        refusal = stranger.greet(SharedSecret(b"another secret of enough letters"))
        assert isinstance(refusal, wire.Refused)
        assert refusal.cause == "auth"
        assert SECRET not in refusal.reason
    with rank_of(place, layout="of another model") as other:
        refusal = other.greet(SharedSecret(SECRET.encode()))
        assert isinstance(refusal, wire.Refused)
        assert refusal.cause == "mismatch"
        assert "layout" in refusal.reason


def test_a_decode_worker_with_other_pages_is_told_so_for_each_request_and_lives(
    place: Place, server: Server, tmp_path: Path
) -> None:
    other = settings_of(
        tmp_path / "kv", role="decode", n_ranks=1, page_tokens=2 * PAGE, peers=(place.prefill,)
    )
    with Cluster(other, SECRET) as cluster:
        for turn in range(3):
            finish = run(cluster, f"mismatched-{turn}", prompt_of(820 + turn, 50)).finish
            assert finish.kind is FinishKind.ERROR
            assert f"prefill node {place.prefill}" in finish.message
            assert "layout" in finish.message
        ranks_at_rest(cluster)
        assert not cluster.died.is_set()
    until(lambda: place.answer_known() == place.known_ids, "the server serves its own")
