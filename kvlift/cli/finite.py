"""Numbers of the command line that have to be numbers."""

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A range without `nan`, which lies in every range, and without `inf`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no number that can be counted to: give a finite one", param, ctx)
        return number
