"""A config is parsed once, and what is wrong with it is a sentence that says what to change."""

import attrs
import pytest

from kvlift.core.policy import EvictionPolicy, PrefetchPolicy, Switch, WritePolicy
from kvlift.runtime.config import Config, ConfigError, JournalMode


def test_words_become_choices_and_text_becomes_numbers() -> None:
    config = Config.parse(
        {
            "prefetch": "deadline",
            "write": "back",
            "persist": "off",
            "eviction": "lfu",
            "device_pages": "128",
            "journal": "ring",
        }
    )
    assert config.prefetch is PrefetchPolicy.DEADLINE
    assert config.write is WritePolicy.BACK
    assert config.persist is Switch.OFF
    assert config.eviction is EvictionPolicy.LFU
    assert config.device_pages == 128
    assert config.journal is JournalMode.RING


def test_nothing_said_is_the_default() -> None:
    assert Config.parse({}) == Config()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"device_page": 4}, "there is no field 'device_page'; did you mean 'device_pages'?"),
        ({"zzz": 4}, "there is no field 'zzz'"),
        ({"device_pages": 0}, "device_pages must be from 1"),
        ({"device_pages": -3}, "device_pages must be from 1"),
        ({"device_pages": True}, "must be a whole number, not True"),
        ({"device_pages": 1.5}, "must be a whole number, not 1.5"),
        ({"device_pages": "many"}, "must be a whole number, not 'many'"),
        ({"device_pages": 2**40}, "device_pages must be from 1 to"),
        ({"host_pages": -1}, "host_pages must be from 0"),
        ({"ballot_slots": 7}, "ballot_slots must be from 8"),
        ({"prefetch": "sometimes"}, "is not one of: wait_complete, deadline, best_effort"),
        ({"eviction": "mru"}, "is not one of: lru, lfu, fifo, priority"),
        ({"write": "back", "host_pages": 0}, "write=back needs host_pages above 0"),
        ({"write_back_low_water_pages": 2}, "needs write=back"),
        ({"decode_reserve_pages": 64}, "decode_reserve_pages must be below device_pages"),
        ({"journal": "file"}, "journal=file needs a journal_path"),
        (
            {"write": "back", "write_back_low_water_pages": 65},
            "write_back_low_water_pages is above device_pages",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(
    fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Config.parse(fields)
    assert sentence in str(error.value)


def test_policy_and_limits_say_what_the_config_says() -> None:
    """Every field of both that the config has too has its value."""
    config = Config(
        prefetch=PrefetchPolicy.BEST_EFFORT,
        prefetch_deadline_ms=11,
        prefetch_stall_ms=12,
        transfer_deadline_ms=13,
        quarantine_max_ms=14,
        prefetch_min_pages=3,
        prefetches_in_flight_max=5,
        restores_in_flight_max=6,
        mirrors_in_flight_max=7,
        persists_in_flight_max=8,
        write=WritePolicy.NONE,
        persist=Switch.OFF,
        eviction=EvictionPolicy.FIFO,
        decode_reserve_pages=4,
        bypass_max=9,
        first_token=Switch.OFF,
        cost_model=Switch.OFF,
        cost_threshold_percent=70,
        lookups_again_max=2,
        ballot_slots=10,
    )
    names = {a.name for a in attrs.fields(Config)}
    for made in (config.policy(), config.limits()):
        for name, value in attrs.asdict(made).items():
            if name in names:
                assert value == getattr(config, name), name
    assert config.policy().n_device_pages == config.device_pages
    assert config.policy().n_host_pages == config.host_pages


def test_a_deadline_counts_only_under_the_policy_that_has_one() -> None:
    fields = {"prefetch_deadline_ms": 5, "prefetch_stall_ms": 9}
    patient = Config.parse({**fields, "prefetch": "wait_complete"})
    hasty = Config.parse({**fields, "prefetch": "deadline"})
    assert patient.limits().read_deadline_ms() == 9
    assert hasty.limits().read_deadline_ms() == 5
