"""What the examples say to a wrong call."""

import httpx
import pytest

from examples.vllm_proxy import kept_in, main, url

DECODE = ["--decode", "http://127.0.0.1:8200"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--decode", "127.0.0.1:8200"], "'127.0.0.1:8200' is no address: write http://HOST:PORT"),
        ([*DECODE, "--prefill", "http://"], "'http://' is no address"),
        ([*DECODE, "--prefill", "http://[::1"], "is no address"),
        ([*DECODE, "--port", "99999"], "'99999' is no port: write one from 1 to 65535"),
        ([*DECODE, "--port", "-1"], "is no port"),
        ([*DECODE, "--timeout-s", "nan"], "'nan' is no time"),
        ([*DECODE, "--connect-timeout-s", "0"], "'0' is no time"),
        ([], "--decode"),
    ],
)
def test_the_proxy_refuses_what_it_could_not_use(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_slash_at_the_end_of_an_address_is_not_doubled() -> None:
    assert (
        url("http://127.0.0.1:8200/") + "/v1/completions" == "http://127.0.0.1:8200/v1/completions"
    )


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"{}", b'{"kv_transfer_params": "x"}'])
def test_an_answer_without_kv_lets_decode_compute(content: bytes) -> None:
    assert kept_in(httpx.Response(200, content=content)) is None
