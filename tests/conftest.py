"""What all tests share: quiet thread pools, one hypothesis profile, GPU tests without a GPU."""

import os
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and so would be whatever tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported anywhere, and inherited by the processes that tests start.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

try:
    import hypothesis
except ImportError:
    pass
else:
    hypothesis.settings.register_profile("kvlift", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("kvlift")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_deep(config, items)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _leave_out_deep(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Minutes long, so they run only where `-m` names them: `make deep`."""
    if "deep" in config.option.markexpr:
        return
    deep = [item for item in items if item.get_closest_marker("deep")]
    if deep:
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if item not in deep]
