"""The net itself is tested: mypy, as configured here, must catch the case that people forget."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import ROOT

pytestmark = pytest.mark.slow

COMPLETE = """
from typing import assert_never
from kvlift.core.tier import Tier

def letter(tier: Tier) -> str:
    match tier:
        case Tier.DEVICE:
            return "d"
        case Tier.HOST:
            return "h"
        case Tier.STORAGE:
            return "s"

def note(tier: Tier) -> None:
    match tier:
        case Tier.DEVICE:
            print("d")
        case Tier.HOST | Tier.STORAGE:
            print("below")
        case _:
            assert_never(tier)
"""

WRONG = {
    "a forgotten case that falls through": (
        COMPLETE.replace("case Tier.HOST | Tier.STORAGE:", "case Tier.HOST:").replace(
            "        case _:\n            assert_never(tier)\n", ""
        ),
        "exhaustive-match",
    ),
    "a forgotten case before assert_never": (
        COMPLETE.replace("case Tier.HOST | Tier.STORAGE:", "case Tier.HOST:"),
        "arg-type",
    ),
    "a device handle where a host handle is due": (
        "from kvlift.core.ids import DeviceHandle as D, HostHandle as H\nhandle: H = D(1)\n",
        "assignment",
    ),
    "a name that may not be bound": (
        "def f(n: int) -> int:\n    if n:\n        found = n\n    return found\n",
        "possibly-undefined",
    ),
}


@pytest.fixture(scope="module")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy-cache")


def mypy_says(snippet: str, folder: Path, cache: Path) -> str:
    file = folder / "snippet.py"
    file.write_text(snippet)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(cache), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_a_complete_match_passes(tmp_path: Path, mypy_cache: Path) -> None:
    assert "Success" in mypy_says(COMPLETE, tmp_path, mypy_cache)


@pytest.mark.parametrize("what", sorted(WRONG))
def test_mypy_refuses(what: str, tmp_path: Path, mypy_cache: Path) -> None:
    snippet, code = WRONG[what]
    assert f"[{code}]" in mypy_says(snippet, tmp_path, mypy_cache)
