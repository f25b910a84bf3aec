"""The journal reader, and what is built on it: replay and explain. An input is a journal."""

import functools
import io
import zlib
from random import Random
from typing import Any, Final

import msgspec

from kvlift.runtime.explain import explain
from kvlift.runtime.journal_lines import AdoptLine, TickLine
from kvlift.runtime.journal_read import JournalError, JournalReader, file_lines
from kvlift.runtime.replay import replay
from tests.fuzz.mutations import mutated_bytes, mutated_lines, mutated_value
from tests.runtime.journal_world import JournalWorld

N_JOURNALS: Final = 12
REPLAYED_ONE_IN: Final = 16
"""Deciding again costs a hundred times as much as reading."""


@functools.cache
def journals() -> tuple[tuple[bytes, ...], ...]:
    """Short lives of a driver with bad weather, as real journals."""
    made = []
    for seed in range(N_JOURNALS):
        world = JournalWorld()
        world.act_by_chance(Random(seed), 1 + seed)
        lines = world.journal()
        world.close()
        made.append(tuple(lines[: 4 + 2 * seed]))
    return tuple(made)


class JournalSurface:
    name = "journal"

    def __init__(self) -> None:
        journals()

    def close(self) -> None: ...

    def made(self, draw: Random) -> bytes:
        lines = list(draw.choice(journals()))
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            lines = lines or [b"{}\n"]
            at = draw.randrange(len(lines))
            match draw.randrange(4):
                case 0:
                    lines = mutated_lines(draw, lines)
                case 1:
                    return mutated_bytes(draw, b"".join(lines))
                case _:
                    lines[at] = _changed(draw, lines[at])
        return b"".join(lines)

    def fed(self, data: bytes) -> str:
        try:
            reader = JournalReader.of(file_lines(io.BytesIO(data)))
            for line in reader:
                if isinstance(line, TickLine):
                    for value in line.calls:
                        reader.call(value)
                    for value in line.reports:
                        reader.report(value)
                    for value in line.decided.notices:
                        reader.notice(value)
                elif isinstance(line, AdoptLine):
                    reader.prompt(line.prompt)
            word = "read, cut short" if reader.is_cut else "read"
        except JournalError:
            word = "refused"
        if zlib.crc32(data) % REPLAYED_ONE_IN == 0:
            return self._decided_again(data)
        return word

    def _decided_again(self, data: bytes) -> str:
        lines = data.splitlines(keepends=True)
        try:
            for rid in ("r0", "nobody"):
                explain(lines, rid)
        except JournalError:
            pass
        try:
            result = replay(lines)
        except JournalError:
            return "not replayed"
        assert result.identical == (result.first_difference is None)
        return "replayed, identical" if result.identical else "replayed, a difference"


def _changed(draw: Random, line: bytes) -> bytes:
    try:
        value: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return mutated_bytes(draw, line)
    return msgspec.json.encode(mutated_value(draw, value)) + b"\n"
