"""Running stories: line by line, to PASS, FAIL or ERROR."""

from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from kvlift.testing.story_land import NothingThereError
from kvlift.testing.story_lines import Expect, ExpectThat, Line, Story, World
from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_play import Player
from kvlift.testing.story_stage import Stage, StoryFailedError
from kvlift.testing.story_words import StoryError

STORY_BYTES_MAX = 1_000_000


@frozen
class Verdict:
    """How a story ended. `line` is None where it passed; `exit_code` is 0, 1 or 2."""

    file: str
    exit_code: int
    line: int | None
    message: str

    def __str__(self) -> str:
        if self.exit_code == 0:
            return f"PASS {self.file}"
        word = "FAIL" if self.exit_code == 1 else "ERROR"
        return f"{word} {self.file}:{self.line}  {self.message}"


def run_file(path: Path, trace: Callable[[str], None] | None = None) -> Verdict:
    """Read, parse and run one story. A file that cannot be read is an ERROR of its first line."""
    try:
        if path.stat().st_size > STORY_BYTES_MAX:
            return Verdict(str(path), 2, 1, f"a story has at most {STORY_BYTES_MAX} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or type(error).__name__
        return Verdict(str(path), 2, 1, f"cannot be read ({why}): name the file of a story")
    except UnicodeDecodeError:
        return Verdict(str(path), 2, 1, "cannot be read: a story is text in UTF-8")
    return run_text(text, str(path), trace)


def run_text(text: str, file: str, trace: Callable[[str], None] | None = None) -> Verdict:
    """Parse and run one story."""
    try:
        story = parse_story(text)
        return run_story(story, file, trace)
    except StoryError as error:
        return Verdict(file, 2, error.line, error.reason)


def run_story(story: Story, file: str, trace: Callable[[str], None] | None = None) -> Verdict:
    """Run a parsed story. Raises `StoryError` where a line asks for what cannot be."""
    first = story.lines[0].statement if story.lines else None
    stage = Stage(first if isinstance(first, World) else World(), trace)
    expects_divergence = any(_expects_divergence(line) for line in story.lines)
    for line in story.lines:
        try:
            Player(stage).play(line)
            if stage.diverged is not None and not expects_divergence:
                raise StoryFailedError(f"the ranks diverged: {stage.diverged}")
        except StoryFailedError as failed:
            return Verdict(file, 1, line.number, str(failed))
        except StoryError:
            raise
        except NothingThereError as nothing:
            raise StoryError(line.number, str(nothing)) from nothing
        except Exception as error:  # noqa: BLE001  a bug of kvlift is a finding of the story
            what = f"{type(error).__name__}: {error}"
            return Verdict(file, 1, line.number, f"expected no error of kvlift, found {what}")
    return Verdict(file, 0, None, "")


def _expects_divergence(line: Line) -> bool:
    said = line.statement
    return isinstance(said, Expect) and said.expectation == ExpectThat("diverged")
