"""What a wrong call, a missing file and a run cut short say, command by command."""

import socket
import stat
from pathlib import Path

import pytest
from attrs import evolve

from kvlift.cli.main import main
from kvlift.cli.plan import _remarks
from kvlift.testing.plan.run import Row
from kvlift.testing.plan.sizes import Sizes


def refused(capfd: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line of a call that ends with exit code 2."""
    assert main([str(arg) for arg in args]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert "Errno" not in line
    return line


def test_a_folder_for_stories_is_made_private(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "found" / "stories"
    asked = ["simulate", "--seeds", "1", "--ticks", "5", "--jobs", "1", "--repeat-every", "0"]
    assert main([*asked, "--stories", str(folder)]) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    capfd.readouterr()
    (tmp_path / "file").write_text("")
    line = refused(capfd, *asked, "--stories", tmp_path / "file" / "stories")
    assert "(Not a directory): name a folder for stories elsewhere" in line


def test_a_field_that_no_config_has_is_answered_with_those_there_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = refused(capfd, "serve", "--config", "foo=1")
    assert "no field 'foo'; there are prefetch, " in line
    assert "eviction, " in line
    assert "device_pages" not in line, "has an option of its own"
    assert "did you mean 'eviction'?" in refused(capfd, "serve", "--config", "evction=lru")
    assert "FIELD=VALUE, not 'eviction'" in refused(capfd, "serve", "--config", "eviction")


def test_storage_that_cannot_be_used_is_told_once(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    line = refused(capfd, "serve", "--port", 0, "--storage", tmp_path / "file" / "kv")
    assert line.count("Not a directory") == line.count(str(tmp_path)) == 1
    assert "name a folder that this user may write to" in line


def test_an_address_that_is_taken_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(capfd, "serve", "--port", port)
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose" in line
    assert line.count(str(port)) == 1
    line = refused(capfd, "serve", "--host", "256.1.1.1", "--port", port)
    assert line.startswith(f"kvlift: cannot listen on 256.1.1.1:{port} (")


def test_a_story_that_is_not_there_or_no_text_is_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.story").write_bytes(b"\xd0\x01")
    for name, why in (
        ("nope.story", "cannot be read (No such file or directory): name the file of a story"),
        ("", "cannot be read (Is a directory): name the file of a story"),
        ("binary.story", "cannot be read: a story is text in UTF-8"),
    ):
        assert main(["story", str(tmp_path / name)]) == 2
        assert capfd.readouterr().out == f"ERROR {tmp_path / name}:1  {why}\n"


def test_a_document_that_is_no_text_is_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.md").write_bytes(b"\xd0\x01")
    line = refused(capfd, "draw", "--check", "--readme", tmp_path / "binary.md")
    assert "is no text in UTF-8: name a document" in line


def test_a_bench_is_told_where_it_cannot_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLIFT_BENCH_DIR", str(tmp_path / "nowhere"))
    for name in ("store", "copies", "ttft"):
        line = refused(capfd, "bench", name)
        assert "KVLIFT_BENCH_DIR=" in line
        assert "(No such file or directory): set it to a folder" in line


def row(device_gib: float, host_gib: float, n_refused: int) -> Row:
    return Row(
        sizes=Sizes(device_gib=device_gib, host_gib=host_gib, storage_gib=0),
        hit={},
        ttft_s={},
        peer_bytes=0,
        n_requests=9,
        n_refused=n_refused,
        n_failed=0,
        n_retracted=0,
        seconds=1.0,
    )


def test_a_plan_says_once_what_a_device_cannot_hold() -> None:
    rows = [row(1, host, 3) for host in (0, 8, 64)] + [row(40, 0, 0), row(2, 0, 1)]
    assert [line.partition(" and ")[0] for line in _remarks(rows)] == [
        "1 GiB of device: 3 requests are larger than that",
        "2 GiB of device: 1 requests are larger than that",
    ]
    assert len(_remarks([rows[0], evolve(rows[1], n_failed=1)])) == 2
