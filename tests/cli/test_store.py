import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvlift.cli.store import store
from kvlift.core.keys import page_keys
from kvlift.effects.stores.files import FileStore
from kvlift.effects.stores.folder import Folder
from tests.effects.store_conformance import N_PAGES, PlainPages, new_ticket, prompt_of, whole

PAGE_BYTES = 500
FILE_BYTES = 4096 + PAGE_BYTES


def call(*arguments: object, answer: str | None = None) -> Result:
    return CliRunner().invoke(store, [str(argument) for argument in arguments], input=answer)


def as_json(*arguments: object, code: int = 0) -> dict[str, object]:
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def counts(found: dict[str, object]) -> tuple[object, ...]:
    return tuple(found[name] for name in ("pages", "bytes", "damaged", "orphans"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with the pages of one prompt."""
    host = PlainPages(N_PAGES, PAGE_BYTES)
    for place in range(N_PAGES):
        host.fill(place, place)
    files = FileStore(tmp_path / "store", host)
    files.start_persist(new_ticket(), whole(prompt_of(1)), tuple(range(N_PAGES)))
    assert files.close(10)
    return tmp_path / "store"


def page_path(folder: Path, position: int) -> Path:
    prompt = prompt_of(1)
    keys = list(page_keys(prompt.namespace, prompt.tokens, prompt.page_tokens))
    return Path(Folder(folder).page_path(keys[position]))


def leftover(folder: Path) -> Path:
    path = Path(Folder(folder).new_temporary())
    gone = path.with_name(path.name.replace(f"-{os.getpid()}-", "-4194303999-"))
    gone.write_bytes(b"x" * 10)
    return gone


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_stat_counts_pages_bytes_damage_and_leftovers(folder: Path) -> None:
    assert counts(as_json("stat", folder)) == (N_PAGES, N_PAGES * FILE_BYTES, 0, 0)
    leftover(folder)
    os.truncate(page_path(folder, 2), 100)
    expected = (N_PAGES, (N_PAGES - 1) * FILE_BYTES + 110, 1, 1)
    assert counts(as_json("stat", folder)) == expected
    assert "8 pages" in call("stat", folder).stdout


def test_what_has_not_been_read_is_not_called_sound(folder: Path) -> None:
    flip_a_byte(page_path(folder, 3))
    for command in ("stat", "ls", "gc"):
        told = call(command, folder).stdout
        assert "contents not read" in told or "contents were not read" in told
        assert "0 damaged," not in told
        assert as_json(command, folder)["contents_read"] is False
    assert as_json("verify", folder, code=1)["contents_read"] is True
    told = call("verify", folder).stdout
    assert "1 damaged" in told
    assert f"`kvlift store gc {folder} --contents` removes them" in told
    assert "not read" not in call("gc", folder, "--contents").stdout
    assert "0 damaged" in call("verify", folder).stdout


def test_verify_finds_a_flipped_byte_that_stat_does_not(folder: Path) -> None:
    assert counts(as_json("verify", folder))[2] == 0
    flip_a_byte(page_path(folder, 3))
    assert counts(as_json("stat", folder))[2] == 0
    found = as_json("verify", folder, code=1)
    assert counts(found) == (N_PAGES, N_PAGES * FILE_BYTES, 1, 0)
    result = call("verify", folder)
    assert result.exit_code == 1
    assert str(page_path(folder, 3)) in result.stdout
    assert page_path(folder, 3).exists(), "verify removes nothing"


def test_ls_lists_the_page_used_last_first(folder: Path) -> None:
    files = as_json("ls", folder, "--limit", "3")["files"]
    assert isinstance(files, list)
    assert [row["key"] for row in files] == [page_path(folder, n).stem for n in range(3)]
    assert "damage" in call("ls", folder).stdout


def test_gc_removes_damage_and_leftovers_and_puts_the_account_right(folder: Path) -> None:
    gone = leftover(folder)
    os.truncate(page_path(folder, 2), 100)
    flip_a_byte(page_path(folder, 3))
    assert counts(as_json("gc", folder)) == (N_PAGES - 1, (N_PAGES - 1) * FILE_BYTES, 1, 1)
    assert not gone.exists()
    assert counts(as_json("gc", folder, "--contents"))[0:3:2] == (N_PAGES - 2, 1)
    assert counts(as_json("verify", folder)) == (N_PAGES - 2, (N_PAGES - 2) * FILE_BYTES, 0, 0)


def test_clear_asks_and_removes_only_what_is_kvlifts(folder: Path) -> None:
    mine = [
        folder / "notes.txt",
        folder / "v1" / "pages" / "notes.txt",
        page_path(folder, 0).parent,
    ]
    mine[2] = mine[2] / "notes.page"
    for path in mine:
        path.write_text("mine")
    refused = call("clear", folder, answer="n\n")
    assert refused.exit_code == 2
    assert call("clear", folder).exit_code == 2, "nobody is there to answer"
    assert counts(as_json("stat", folder))[0] == N_PAGES
    found = as_json("clear", folder, "--yes")
    assert counts(found) == (0, 0, 0, 0)
    assert found["removed"] == N_PAGES
    assert all(path.read_text() == "mine" for path in mine)
    assert call("clear", folder, answer="y\n").exit_code == 0


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear"])
def test_what_is_no_store_is_refused_with_one_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "plain").mkdir()
    for name in ("file", "plain", "missing"):
        result = call(command, tmp_path / name)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert "name the folder" in result.stderr


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear"])
def test_help_has_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"kvlift store {command} /" in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_folder_is_not_blamed_for_output_that_finds_no_room(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvlift", "store", "stat", str(folder)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvlift: No space left on device: make room for the output")
