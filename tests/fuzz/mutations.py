"""Seeded changes of valid inputs: of their bytes, of their values, of their lines."""

from random import Random
from typing import Any, Final

ODD_INTS: Final = (
    *(0, 1, -1, 7, 255, 256, 65_535, 65_536, 1_000_000),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
)
ODD_FLOATS: Final = (0.0, -0.0, 0.5, -1.0, 1e-300, 1e300, float("inf"), float("-inf"))
ODD_TEXTS: Final = (
    *("", "x", "\x00", "a\nb", "\u202e", "\U0001f600" * 40, "../../etc/passwd", "%s%n", "-1"),
    *("1e400", "null", "x" * 257, "y" * 4_000, "\ud7ff", "A[0:4]", "rank 0", "device"),
)
ODD_BYTES: Final = (b"", b"\x00", bytes(32), bytes(31), bytes(33), b"\xff" * 64, b"\x80" * 9)

CLAIMS: Final = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdd\x0f\xff\xff\xff", b"\x91" * 900),
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\xc1", b"\xc0"),
    *(b"[" * 700, b'{"a":' * 300, b"99999999999999999999", b"1e999", b'"\\ud800"', b"\xff\xfe"),
)
"""Pieces that promise much more than follows (2**32 - 1 elements), or that lead deep down."""


def mutated_bytes(draw: Random, data: bytes, n_changes_max: int = 4) -> bytes:
    """One to `n_changes_max` changes anywhere: bits, bytes, runs, cuts, claims."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, n_changes_max)):
        at = draw.randint(0, len(changed))
        match draw.randrange(8):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(changed):
                changed[at] = draw.randrange(256)
            case 2:
                del changed[at : at + draw.randint(1, 8)]
            case 3:
                changed[at:at] = draw.randbytes(draw.randint(1, 8))
            case 4:
                del changed[at:]
            case 5:
                changed[at : at + draw.choice((0, 1, 5))] = draw.choice(CLAIMS)
            case 6:
                start = draw.randint(0, len(changed))
                changed[at:at] = changed[start : start + draw.randint(1, 64)]
            case _:
                changed[at : at + 8] = draw.choice(ODD_INTS).to_bytes(9, "little", signed=True)[:8]
    return bytes(changed)


def odd_value(draw: Random) -> Any:
    """A plain value that is hardly ever what its place asks for."""
    match draw.randrange(8):
        case 0 | 1:
            return draw.choice(ODD_INTS)
        case 2:
            return draw.choice(ODD_FLOATS)
        case 3:
            return draw.choice(ODD_TEXTS)
        case 4:
            return draw.choice(([], {}, [[]], [[[[]]]], {"a": {}}, [1, 2, 3], ["x"], [None]))
        case 5:
            return draw.choice((None, True, False))
        case 6:
            return [draw.choice(ODD_INTS)] * draw.choice((1, 3, 300))
        case _:
            return {draw.choice(ODD_TEXTS): draw.choice(ODD_INTS)}


def mutated_value(draw: Random, value: Any) -> Any:
    """The same nested value with one place changed, dropped, doubled or swapped."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        return _mutated_mapping(draw, value)
    if isinstance(value, list | tuple) and value and draw.random() < 0.9:
        return _mutated_row(draw, list(value))
    if isinstance(value, bytes) and draw.random() < 0.7:
        return draw.choice((draw.choice(ODD_BYTES), mutated_bytes(draw, value, 1)))
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 2, -2, 1000))
    return odd_value(draw)


def _mutated_mapping(draw: Random, value: dict[Any, Any]) -> dict[Any, Any]:
    changed = dict(value)
    name = draw.choice(list(changed))
    match draw.randrange(6):
        case 0:
            del changed[name]
        case 1:
            changed[draw.choice(ODD_TEXTS)] = odd_value(draw)
        case 2:
            other = draw.choice(list(changed))
            changed[name], changed[other] = changed[other], changed[name]
        case _:
            changed[name] = mutated_value(draw, changed[name])
    return changed


def _mutated_row(draw: Random, value: list[Any]) -> list[Any]:
    at = draw.randrange(len(value))
    match draw.randrange(7):
        case 0:
            del value[at]
        case 1:
            value.insert(at, odd_value(draw))
        case 2:
            value.insert(at, value[at])
        case 3:
            other = draw.randrange(len(value))
            value[at], value[other] = value[other], value[at]
        case _:
            value[at] = mutated_value(draw, value[at])
    return value


def mutated_lines(draw: Random, lines: list[bytes]) -> list[bytes]:
    """One line dropped, doubled, moved, cut or changed."""
    changed = list(lines)
    at = draw.randrange(len(changed)) if changed else 0
    match draw.randrange(6) if changed else 5:
        case 0:
            del changed[at]
        case 1:
            changed.insert(at, changed[at])
        case 2:
            changed.insert(draw.randint(0, len(changed) - 1), changed.pop(at))
        case 3:
            del changed[at:]
        case 4:
            changed[at] = mutated_bytes(draw, changed[at])
        case _:
            changed.insert(at, draw.randbytes(draw.randint(0, 40)))
    return changed
