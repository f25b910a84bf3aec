"""A model folder whose config says float32, so that comparisons may be strict."""

import json
from pathlib import Path

from kvlift.runtime.worker.loading import ModelSource


def in_float32(model: str, folder: Path) -> str:
    """`model` itself where it computes in float32 already; else a folder of links below `folder`.

    Weights are widened when they are loaded. Raises `ModelRefusedError`.
    """
    source = ModelSource(model)
    config = source.config()
    if source.is_tiny or config.dtype == "float32":
        return model
    origin = Path(model).resolve()
    wide = folder / config.name
    wide.mkdir(mode=0o700)
    for path in origin.iterdir():
        if path.name != "config.json":
            (wide / path.name).symlink_to(path)
    raw = json.loads((origin / "config.json").read_text())
    raw.pop("dtype", None)
    raw["torch_dtype"] = "float32"
    (wide / "config.json").write_text(json.dumps(raw))
    return str(wide)
