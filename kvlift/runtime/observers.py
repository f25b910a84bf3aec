"""The observers that a config asks for, in one place."""

import time
from pathlib import Path

from attrs import frozen

from kvlift.core.policy import Switch
from kvlift.runtime.config import Config, ConfigError, JournalMode
from kvlift.runtime.interpret import Ports
from kvlift.runtime.journal import Journal, Ring, header_of, path_of_rank
from kvlift.runtime.journal_file import Bounds, FileSink
from kvlift.runtime.journal_lines import Header
from kvlift.runtime.log import DriverLog
from kvlift.runtime.metrics import Metrics, NoMetrics, metrics_for
from kvlift.runtime.observer import Observer, Several


@frozen
class Observers:
    """`observer` goes to the driver; the parts are there to be asked."""

    observer: Observer
    journal: Journal | None
    metrics: Metrics | NoMetrics


def observers_for(config: Config, ports: Ports) -> Observers:
    """Log, metrics and, unless it is off, the journal of one driver.

    Raises `ConfigError` when the journal's file can't be made."""
    rank, n_ranks = ports.ranks.rank, ports.ranks.n_ranks
    header = header_of(
        config,
        has_storage=ports.store is not None,
        rank=rank,
        n_ranks=n_ranks,
        begun_ns=time.time_ns(),
    )
    return _observers(config, header)


def observers_of_scheduler(config: Config, *, storage: Switch, n_workers: int) -> Observers:
    """The same for `hosted.Scheduler`, which speaks for all its workers: one journal, rank 0.

    Raises `ConfigError` when the journal's file can't be made."""
    header = header_of(
        config,
        has_storage=storage is Switch.ON,
        rank=0,
        n_ranks=n_workers,
        begun_ns=time.time_ns(),
        is_hosted=True,
    )
    return _observers(config, header)


def _observers(config: Config, header: Header) -> Observers:
    journal = journal_of(config, header)
    metrics = metrics_for(config, rank=header.rank)
    parts: tuple[Observer, ...] = (DriverLog(rank=header.rank), metrics)
    if journal is not None:
        parts = (journal, *parts)
    return Observers(observer=Several(parts), journal=journal, metrics=metrics)


def journal_of(config: Config, header: Header) -> Journal | None:
    """Raises `ConfigError`."""
    path = None
    if config.journal_path:
        n_files = 1 if header.is_hosted else header.n_ranks
        path = path_of_rank(Path(config.journal_path), header.rank, n_files)
    match config.journal:
        case JournalMode.OFF:
            return None
        case JournalMode.RING:
            return Journal(header, Ring(config.journal_ring_ticks), path)
        case JournalMode.FILE:
            assert path is not None, "Config sees to it that there is a path"
            bounds = Bounds(
                n_bytes_max=config.journal_bytes_max, n_files_max=config.journal_files_max
            )
            try:
                sink = FileSink(path, header, bounds, config.close_deadline_ms / 1000)
            except OSError as error:
                raise ConfigError(
                    f"the journal {path} cannot be written ({error.strerror}):"
                    " name another journal_path, or set journal=off"
                ) from error
            return Journal(header, sink)
