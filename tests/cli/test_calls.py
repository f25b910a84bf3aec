"""What a wrong call, a missing file and a run cut short say, command by command."""

import socket
import stat
from pathlib import Path

import pytest
from attrs import evolve

from kvlift.cli.doctor import Absent, _storage
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


@pytest.mark.parametrize(
    "call",
    [
        "serve --storage-gib",
        "serve --link-gbps",
        "demo --scale",
        "demo --link-gbps",
        "check --seconds",
        "plan --trace /dev/null --link-gbps",
        "plan --trace /dev/null --step-ms",
    ],
)
def test_what_is_no_number_is_in_no_range(call: str, capfd: pytest.CaptureFixture[str]) -> None:
    option = call.rpartition(" ")[2]
    for word in ("nan", "inf", "-inf", "1e400"):
        assert f"Invalid value for '{option}': " in refused(capfd, *call.split(), word)


@pytest.mark.parametrize(
    ("option", "size"),
    [
        ("--storage-gib", 1e30),
        ("--device-pages", 1 << 40),
        ("--host-pages", 1 << 40),
        ("--max-running", 1 << 40),
        ("--max-requests", 1 << 40),
        ("--link-gbps", 1e30),
    ],
)
def test_a_size_beyond_all_bounds_is_refused_by_the_name_of_its_option(
    option: str, size: float, capfd: pytest.CaptureFixture[str]
) -> None:
    assert f"Invalid value for '{option}': " in refused(capfd, "serve", "--port", 0, option, size)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--prefill-bind tcp://127.0.0.1:*", "'tcp://127.0.0.1:*' is no address of a prefill node"),
        ("--role prefill --prefill-bind tcp://127.0.0.1:0", "from 1 to 65535"),
        ("--role decode --peer tcp://127.0.0.1:99999", "'tcp://127.0.0.1:99999' is no address"),
        ("--peer tcp://127.0.0.1:1", "--peer is for --role decode alone"),
        ("--role decode --prefill-bind tcp://127.0.0.1:1", "a decode worker takes --peer"),
    ],
)
def test_an_address_that_nobody_could_come_to_is_refused(
    options: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capfd, "serve", "--port", 0, *options.split())


def test_kinds_of_faults_do_not_go_with_all_or_none(capfd: pytest.CaptureFixture[str]) -> None:
    for kinds, word in (("none,peer_dies", "none"), ("peer_dies,all", "all")):
        assert f"'{word}' stands alone" in refused(capfd, "simulate", "--faults", kinds)
    assert "no fault is called ''" in refused(capfd, "simulate", "--faults", "")


def test_limits_and_questions_are_in_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    assert "[300; with --deep 3,600]" in capfd.readouterr().out
    assert main(["bench", "--help"]) == 0
    assert "\n  index     What do match, insert and evict cost" in capfd.readouterr().out


def test_a_report_that_could_not_be_written_is_told_before_anything_is_played(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert "cannot write to /proc (" in refused(capfd, "demo", "--out", "/proc")


def test_the_doctor_says_in_words_that_a_folder_cannot_be_used() -> None:
    with pytest.raises(Absent, match=r"/proc can't be written to \(.*name another with --storage"):
        _storage(Path("/proc"))


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


def test_storage_without_a_host_tier_is_warned_of(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["serve", "--port", "0", "--storage", str(tmp_path / "kv"), "--ranks", "3"]
    assert main([*options, "--host-pages", "0"]) == 2
    assert "warning: without --host-pages storage is written and never" in capfd.readouterr().err
    assert main(options) == 2
    assert "warning" not in capfd.readouterr().err
