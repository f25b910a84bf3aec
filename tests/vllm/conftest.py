"""Tests with real vLLM servers run where they are asked for by name: `make test-vllm`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.harness import Server, Sizes, running, server, vllm_python
from tests.vllm.harness_client import Answer, Client, Script
from tests.vllm.harness_model import write_model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = str(config.getoption("markexpr") or "")
    mine = [item for item in items if item.get_closest_marker("vllm")]
    if mine and "vllm" not in asked:
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if not item.get_closest_marker("vllm")]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if vllm_python() is None:
        pytest.fail("there is no environment with vLLM: run them by `make test-vllm`")
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM without any connector: its answers are the measure."""
    sizes = Sizes(model, max_len=2048, n_blocks=128)
    single = server("alone", sizes, tmp_path_factory.mktemp("alone"))
    with running(single):
        yield single


class Reference:
    """What `alone` answers to a conversation, asked once and kept."""

    def __init__(self, server: Server) -> None:
        self.client = Client(server.url)
        self._kept: dict[str, list[Answer]] = {}

    def __call__(self, script: Script) -> list[Answer]:
        key = json.dumps([script.turns, script.n_answer])
        if key not in self._kept:
            self._kept[key] = script.play(self.client)
        return self._kept[key]


@pytest.fixture(scope="session")
def reference(alone: Server) -> Reference:
    return Reference(alone)
