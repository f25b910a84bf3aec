"""The observers that a config asks for, in one place."""

from pathlib import Path

from attrs import frozen

from kvlift.runtime.config import Config, ConfigError, JournalMode
from kvlift.runtime.interpret import Ports
from kvlift.runtime.journal import Journal, Ring, header_of, path_of_rank
from kvlift.runtime.journal_file import FileSink
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
    journal = journal_for(config, ports)
    metrics = metrics_for(config, rank=ports.ranks.rank)
    log = DriverLog(rank=ports.ranks.rank)
    parts: tuple[Observer, ...] = (log, metrics)
    if journal is not None:
        parts = (journal, *parts)
    return Observers(observer=Several(parts), journal=journal, metrics=metrics)


def journal_for(config: Config, ports: Ports) -> Journal | None:
    """Raises `ConfigError`."""
    rank, n_ranks = ports.ranks.rank, ports.ranks.n_ranks
    header = header_of(config, has_storage=ports.store is not None, rank=rank, n_ranks=n_ranks)
    path = path_of_rank(Path(config.journal_path), rank, n_ranks) if config.journal_path else None
    match config.journal:
        case JournalMode.OFF:
            return None
        case JournalMode.RING:
            return Journal(header, Ring(config.journal_ring_ticks), path)
        case JournalMode.FILE:
            assert path is not None, "Config sees to it that there is a path"
            try:
                sink = FileSink(path, header, config.close_deadline_ms / 1000)
            except OSError as error:
                raise ConfigError(
                    f"the journal {path} cannot be written ({error.strerror}):"
                    " name another journal_path, or set journal=off"
                ) from error
            return Journal(header, sink)
