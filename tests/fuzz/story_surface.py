"""The language of stories. An input is the text of a story."""

import functools
from pathlib import Path
from random import Random
from typing import Final

from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_words import StoryError
from tests.fuzz.mutations import ODD_INTS, mutated_bytes, mutated_lines

FOLDER: Final = Path(__file__).resolve().parents[1] / "stories"
N_LINES_MAX: Final = 14
ODD_WORDS: Final = (
    *("A", "B", "A[0:4]", "A[:]", "A[]", "A[9:1]", "0:1000000", "0:1000000,0:1000000", "nothing"),
    *("rank=0", "rank=63", "rank=64", "pages=1000000", "pages=", "from=A[0:2]", "like=A", '"a b"'),
    *('"', "#", "250ms", "1e9s", "999999999999999999s", "held", "auto", "store", "peer", "all"),
    *("expect", "within", "ticks", "=1", "<=2", ">=x", "device", "host", "storage", "free=0"),
)


@functools.cache
def texts() -> tuple[tuple[bytes, ...], ...]:
    """The beginnings of all stories, without their remarks."""
    made = []
    for path in sorted(FOLDER.glob("*.story")):
        lines = [
            line + b"\n"
            for line in path.read_bytes().splitlines()
            if line.strip() and not line.startswith(b"#")
        ]
        made.append(tuple(lines[:N_LINES_MAX]))
    return tuple(made)


class StorySurface:
    name = "story"

    def __init__(self) -> None:
        texts()

    def close(self) -> None: ...

    def made(self, draw: Random) -> bytes:
        lines = list(draw.choice(texts()))
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            lines = lines or [b"tick\n"]
            at = draw.randrange(len(lines))
            match draw.randrange(6):
                case 0:
                    lines = mutated_lines(draw, lines)
                case 1:
                    return mutated_bytes(draw, b"".join(lines))
                case 2:
                    lines[at] = draw.choice(draw.choice(texts()))
                case 3:
                    lines.append(_expected(draw))
                case _:
                    lines[at] = _reworded(draw, lines[at])
        return b"".join(lines)

    def fed(self, data: bytes) -> str:
        text = data.decode(errors="replace")
        try:
            story = parse_story(text)
        except StoryError as error:
            found = error
        else:
            assert story.lines
            return "understood"
        assert 1 <= found.line <= 1 + len(text.splitlines())
        assert found.reason
        return "refused"


def _expected(draw: Random) -> bytes:
    """An expectation put together from words that need not fit."""
    what = draw.choice(("wants", "hit", "sources", "tier", "count", "bytes", "error", "promise=1"))
    words = [draw.choice(ODD_WORDS) for _ in range(draw.randint(0, 3))]
    joined = draw.choice((" ", ",", "|")).join(words)
    return (
        f"expect {draw.choice(('A', 'B', 'tier', 'within 2 ticks A'))} {what} {joined}\n".encode()
    )


def _reworded(draw: Random, line: bytes) -> bytes:
    words = line.decode(errors="replace").split()
    word = draw.choice((draw.choice(ODD_WORDS), str(draw.choice(ODD_INTS))))
    at = draw.randint(0, len(words))
    match draw.randrange(4):
        case 0:
            words.insert(at, word)
        case 1:
            del words[at : at + 1]
        case 2:
            words[at : at + 1] = [word]
        case _:
            words = words or ["tick"]
            name, equals, _value = draw.choice(words).partition("=")
            words[at : at + 1] = [f"{name}{equals or '='}{word}"]
    return " ".join(words).encode() + b"\n"
