"""Reading a journal that anybody may have written: every size is bounded, every error has a line.

A journal whose process was killed may end in half a line: that line is left out, and `is_cut` of
the reader says so.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from attrs import define, field

from kvlift.core.keys import TOKEN_BYTES
from kvlift.core.landed import Landed
from kvlift.core.notice import Notice
from kvlift.core.prompt import Prompt
from kvlift.core.submission import Finish, Retract, Submission, Submit
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.journal_lines import (
    FORMAT,
    ConfigLine,
    Entry,
    Header,
    Line,
    Named,
)

LINE_BYTES_MAX: Final = 128 << 20
"""A tick with some dozens of the longest prompts that exist, in base64."""

HEADER_BYTES_MAX: Final = 1 << 20

PAGES_MAX: Final = 1 << 24
"""Device and host pages of a config that is replayed: a thousand times a large machine's."""

SIZES: Final = ("page_tokens", "device_pages", "host_pages", "ballot_slots")

NOTICES: Final = {kind.__name__: kind for kind in Notice.__args__}
REPORTS: Final = {kind.__name__: kind for kind in Landed.__args__}
CALLS: Final = {kind.__name__: kind for kind in Submission.__args__}

_DECODER: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Line)


class JournalError(ValueError):
    """This is no journal, or one that can't be used. The message names the line."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line


def file_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a binary file, none longer than the reader would take."""
    while line := file.readline(LINE_BYTES_MAX + 1):
        yield line


def header_in(path: Path) -> Header | None:
    """The first line of a file if it is a journal's. Raises `OSError`."""
    with path.open("rb") as file:
        first = file.readline(HEADER_BYTES_MAX)
    try:
        line = _DECODER.decode(first)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return line if isinstance(line, Header) else None


@define(eq=False)
class JournalReader:
    """`header` is read at once, the other lines on demand. Raises `JournalError`.

    `config` is the one that holds at the line that was read last."""

    _lines: Iterator[bytes]
    header: Header = field(init=False)
    config: Config = field(init=False)
    number: int = field(default=0, init=False)
    is_cut: bool = field(default=False, init=False)
    n_entries: int = field(default=0, init=False)
    _part: int = field(default=1, init=False)

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> "JournalReader":
        return cls(iter(lines))

    def __attrs_post_init__(self) -> None:
        header = next(self._decoded(), None)
        if not isinstance(header, Header):
            raise JournalError(1, "a journal begins with a line of kind 'journal'; this does not")
        if header.format != FORMAT:
            raise JournalError(
                1, f"this journal has format {header.format}, only {FORMAT} can be read here"
            )
        self.header = header
        self._part = header.part
        self.config = _config(header.config, 1)

    def __iter__(self) -> Iterator[Entry]:
        for line in self._decoded():
            if isinstance(line, Header):
                self._go_on(line)
                continue
            self.n_entries += 1
            if isinstance(line, ConfigLine):
                self._take_config(_config(line.config, self.number))
            yield line

    def _go_on(self, header: Header) -> None:
        """The next part of the same journal."""
        if not header.begun_ns or header.begun_ns != self.header.begun_ns:
            raise self.error("a second header: these are two journals in one")
        if header.n_lost != self.header.n_lost + self.n_entries or header.part != self._part + 1:
            raise self.error(
                f"part {header.part} of this journal follows part {self._part} with"
                f" {header.n_lost - self.header.n_lost - self.n_entries} lines between them missing"
            )
        self._part = header.part

    def _take_config(self, config: Config) -> None:
        for name in SIZES:
            if getattr(config, name) != getattr(self.config, name):
                raise self.error(f"{name} can't change while a driver runs")
        self.config = config

    def error(self, problem: str) -> JournalError:
        """About the line that was read last."""
        return JournalError(self.number, problem)

    def _decoded(self) -> Iterator[Line]:
        for raw in self._lines:
            self.number += 1
            if len(raw) > LINE_BYTES_MAX:
                raise self.error(f"longer than {LINE_BYTES_MAX} bytes: this is no journal")
            try:
                yield _DECODER.decode(raw)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                if not raw.endswith(b"\n") and self.number > 1:
                    self.is_cut = True
                    return
                raise self.error(str(error)) from None

    def call(self, value: Named) -> Submission:
        """One call of a tick line, as the driver would have taken it."""
        made: Submission = self._named(value, CALLS, "call")
        if isinstance(made, Submit):
            self.check_prompt(made.prompt)
            n_pages = made.prompt.n_pages + made.n_pages_output
            if made.n_pages_output < 0 or n_pages > self.config.device_pages:
                raise self.error(f"request {made.rid!r} is larger than the device")
        if isinstance(made, Finish | Retract) and len(made.output) % TOKEN_BYTES:
            raise self.error(f"the output of {made.rid!r} is not a whole number of tokens")
        return made

    def report(self, value: Named) -> Landed:
        made: Landed = self._named(value, REPORTS, "report")
        return made

    def notice(self, value: Named) -> Notice:
        made: Notice = self._named(value, NOTICES, "notice")
        return made

    def prompt(self, value: object) -> Prompt:
        made: Prompt = self._converted(value, Prompt)
        self.check_prompt(made)
        return made

    def check_prompt(self, prompt: Prompt) -> None:
        if prompt.page_tokens != self.config.page_tokens:
            raise self.error(f"a prompt with pages of {prompt.page_tokens} tokens")
        if prompt.n_tokens == 0 or len(prompt.tokens) % TOKEN_BYTES:
            raise self.error("a prompt that is empty or not a whole number of tokens")

    def _named(self, value: Named, kinds: dict[str, type], what: str) -> Any:
        name = next(iter(value), "")
        if len(value) != 1 or name not in kinds:
            raise self.error(f"there is no {what} {name[:40]!r}")
        return self._converted(value[name], kinds[name])

    def _converted(self, value: object, kind: type) -> Any:
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self.error(f"{kind.__name__}: {error}") from None


def _config(fields: dict[str, int | str], number: int) -> Config:
    try:
        config = Config.parse(dict(fields))
    except (ConfigError, TypeError) as error:
        raise JournalError(number, f"the config in it can't be used: {error}") from None
    if max(config.device_pages, config.host_pages) > PAGES_MAX:
        raise JournalError(number, f"more than {PAGES_MAX} pages in a tier")
    return config
