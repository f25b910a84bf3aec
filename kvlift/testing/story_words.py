"""Words of one story line: splitting them, taking them in turn, saying what is wrong."""

import re
from collections.abc import Iterable
from typing import NoReturn

from attrs import define, field

from kvlift.core.tier import Tier
from kvlift.testing.story_lines import Bound, Pages

NUMBER_MAX = 1_000_000
"""No count in a story may be larger, so that a slip of the finger does not fill the memory."""

_WORD = re.compile(r"""(?:[^\s"#]|"[^"]*")+""")
_OPTION = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)(=|>=|<=)(.*)", re.DOTALL)
_PAGES = re.compile(r"([A-Za-z_][\w.-]*?)(?:\[(\d*)(:?)(\d*)\])?")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s)")
_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


class StoryError(Exception):
    """A line that is not in the language, or asks for what cannot be. `line` counts from 1."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


@define
class Words:
    """The words of one line, taken from the left; options may stand anywhere."""

    number: int
    plain: list[str] = field(factory=list)
    options: dict[str, tuple[str, str]] = field(factory=dict)

    def fail(self, reason: str) -> NoReturn:
        raise StoryError(self.number, reason)

    def next_word(self, what: str) -> str:
        if not self.plain:
            self.fail(f"{what} is missing")
        return self.plain.pop(0)

    def next_of(self, what: str, choices: Iterable[str]) -> str:
        word = self.next_word(what)
        known = list(choices)
        if word not in known:
            self.fail(f"{word!r} is no {what}; it can be {', '.join(known)}")
        return word

    def next_is(self, word: str) -> bool:
        """Take the next word if it is this one."""
        if self.plain[:1] != [word]:
            return False
        self.plain.pop(0)
        return True

    def literal(self, word: str) -> None:
        found = self.next_word(f"the word {word!r}")
        if found != word:
            self.fail(f"{word!r} should stand where {found!r} stands")

    def name(self, what: str = "the name of a prompt") -> str:
        word = self.next_word(what)
        if not _NAME.fullmatch(word):
            self.fail(f"{word!r} is not {what}: letters, digits, '_', '-' and '.' make one")
        return word

    def number_word(self, what: str) -> int:
        return self.parsed_number(self.next_word(what), what)

    def parsed_number(self, word: str, what: str) -> int:
        if not re.fullmatch(r"\d{1,7}", word) or int(word) > NUMBER_MAX:
            self.fail(f"{what} must be a number from 0 to {NUMBER_MAX}, not {word!r}")
        return int(word)

    def tier(self, choices: Iterable[str] = ("device", "host", "storage")) -> Tier:
        return Tier(self.next_of("tier", choices))

    def pages(self, word: str | None = None) -> Pages:
        """`A[0:4]`, `A[2]` or `A`."""
        word = self.next_word("a range of pages such as A[0:4]") if word is None else word
        found = _PAGES.fullmatch(word)
        if found is None:
            self.fail(f"{word!r} is no range of pages; write A[0:4], A[2] or A")
        name, start, colon, stop = found.groups()
        if start is None:
            return Pages(name)
        if not colon and not start:
            self.fail(f"{word!r} names no page; write A[0:4], A[2] or A")
        first = self.parsed_number(start or "0", "a page")
        if not colon:
            return Pages(name, first, first + 1)
        last = self.parsed_number(stop, "a page") if stop else None
        if last is not None and last < first:
            self.fail(f"{word!r} ends before it begins")
        return Pages(name, first, last)

    def span_ns(self) -> int:
        word = self.next_word("a span of time such as 250ms")
        found = _SPAN.fullmatch(word)
        if found is None:
            self.fail(f"{word!r} is no span of time; write 250ms, 3s or 10us")
        return round(float(found[1]) * _NS[found[2]])

    def text(self, what: str) -> str:
        """A text in double quotes, or one word."""
        return _unquoted(self.next_word(what))

    def option(self, name: str) -> str | None:
        """Take `name=value`; None where it isn't given."""
        found = self.options.pop(name, None)
        if found is None:
            return None
        relation, value = found
        if relation != "=":
            self.fail(f"{name} can only be given with '='")
        return _unquoted(value)

    def number_option(self, name: str) -> int | None:
        value = self.option(name)
        return None if value is None else self.parsed_number(value, name)

    def rank(self) -> int | None:
        return self.number_option("rank")

    def bounds(self, names: Iterable[str]) -> tuple[Bound, ...]:
        """All options as bounds on counts."""
        known = list(names)
        found = []
        for name, (relation, value) in self.options.items():
            if name not in known:
                self.fail(f"{name!r} is not counted here; it can be {', '.join(known)}")
            found.append(self.bound(name, relation, value))
        self.options.clear()
        return tuple(found)

    def bound(self, name: str, relation: str, value: str) -> Bound:
        n = self.parsed_number(value, name)
        match relation:
            case ">=":
                return Bound(name, ">=", n)
            case "<=":
                return Bound(name, "<=", n)
            case _:
                return Bound(name, "=", n)

    def count(self, name: str, what: str) -> Bound:
        """`1`, `=1`, `<=2` or `>=1` as a bound."""
        word = self.next_word(what)
        found = re.fullmatch(r"(=|<=|>=)?(\d+)", word)
        if found is None:
            self.fail(f"{what} must be a number, '<=' or '>=' and a number, not {word!r}")
        return self.bound(name, found[1] or "=", found[2])

    def end(self) -> None:
        """Nothing may be left over."""
        if self.plain:
            self.fail(f"{self.plain[0]!r} is too much on this line")
        if self.options:
            self.fail(f"the option {next(iter(self.options))!r} is not known here")


def words_of(number: int, text: str) -> Words:
    """The words of a line, without its comment."""
    words = Words(number)
    plain_text = text
    in_quotes = False
    for place, letter in enumerate(text):
        in_quotes ^= letter == '"'
        if letter == "#" and not in_quotes:
            plain_text = text[:place]
            break
    if plain_text.count('"') % 2:
        words.fail("a quotation mark is not closed")
    for word in _WORD.findall(plain_text):
        found = _OPTION.fullmatch(word)
        if found is None:
            words.plain.append(word)
        elif found[1] in words.options:
            words.fail(f"the option {found[1]!r} stands twice")
        else:
            words.options[found[1]] = (found[2], found[3])
    return words


def _unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] == '"' else word
