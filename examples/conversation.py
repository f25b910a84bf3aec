"""Four turns of one conversation over all tiers: `python -m examples.conversation`.

The driver of `embed` and the prefill node of `prefill`, in one process, over a real socket."""

import tempfile

from examples.embed import PAGE, open_driver, serve
from examples.prefill import MadeUpEngine
from kvlift import Driver, Outcome, Tier


def rest(driver: Driver) -> None:
    """Until everything has gone down: to the host and to storage."""
    while driver.tick().is_busy:
        driver.wait(0.002)


def main() -> None:
    talk = list(range(100))
    flushed_before: dict[int, list[Tier]] = {3: [Tier.DEVICE], 4: [Tier.DEVICE, Tier.HOST]}
    with (
        tempfile.TemporaryDirectory() as folder,
        MadeUpEngine(PAGE) as engine,
        open_driver(folder) as driver,
    ):
        for turn in range(1, 5):
            driver.flush(flushed_before.get(turn, []))
            ended = serve(driver, f"turn-{turn}", talk, engine.address)
            if ended.outcome is not Outcome.DONE:
                raise SystemExit(ended.reason)
            talk += [5, 7, 8, *range(1000 * turn, 1000 * turn + 30)]
            rest(driver)


if __name__ == "__main__":
    main()
