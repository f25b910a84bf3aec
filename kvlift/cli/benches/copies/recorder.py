"""Where the cases of the bench put their rows."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from attrs import define, field

from kvlift.cli.benches.row import Row


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


@define(eq=False)
class Recorder:
    """`n_rounds`: timed rounds of each case. `on_row` is told each row when it is there."""

    n_rounds: int
    on_row: Callable[[Row], None] = lambda _row: None
    rows: list[Row] = field(factory=list)
    n_errors: int = 0

    def add(
        self,
        case: str,
        value: float,
        unit: str,
        *,
        ceiling: float | None = None,
        ratio: float | None = None,
        note: str = "",
        **more: object,
    ) -> None:
        row = Row(
            case=case,
            value=round(value, 4),
            unit=unit,
            ceiling=None if ceiling is None else round(ceiling, 4),
            ratio=None if ratio is None else round(ratio, 4),
            note=note,
            more={name: _rounded(each) for name, each in more.items()},
        )
        self.rows.append(row)
        self.on_row(row)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """A failure inside is a row, not the end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cases still count
            traceback.print_exc()
            self.n_errors += 1
            self.add(name, 0.0, "", error=f"{type(error).__name__}: {error}")
        finally:
            gc.collect()
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
