"""The weights that a run keeps: one Hugging Face checkpoint folder a kept version."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rz.models.dense import DenseConfig
from rz.models.hf import save_checkpoint


def version_folder(run: Path, version: int) -> Path:
    """Where a run keeps the weights of a version."""
    return run / "checkpoints" / f"version-{version:06d}"


def kept_versions(run: Path) -> dict[int, Path]:
    """The versions whose weights a run kept, in ascending order."""
    found = {}
    for folder in sorted((run / "checkpoints").glob("version-*")):
        if match := re.fullmatch(r"version-(\d+)", folder.name):
            found[int(match[1])] = folder
    return found


def save_version(
    run: Path, version: int, params: Mapping[str, Tensor], config: DenseConfig, *, source: Path, keep: int | None
) -> Path:
    """Write float32 masters as a checkpoint, whole or not at all; then remove the oldest beyond `keep`.

    Args:
        source: the folder whose config, tokenizer and generation settings go with the weights.
        keep: >= 1 newest versions to hold, or None: all.
    """
    folder = version_folder(run, version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, params, config, source=source)
    for old in [] if keep is None else list(kept_versions(run).values())[:-keep]:
        shutil.rmtree(old)
    return folder
