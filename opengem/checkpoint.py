"""Checkpoints that are complete or ignored.

A checkpoint is written with torch.distributed.checkpoint into a hidden folder, marked complete, and only then renamed
to `step-<n>`. A run killed at any moment therefore leaves the previous checkpoint usable, and a folder without the
marker is never loaded.
"""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import torch.distributed.checkpoint as dcp

from opengem import mesh
from opengem.errors import UserError

MARKER = "COMPLETE"


def save(folder: Path, step: int, state: dict, keep: int) -> Path:
    """Write `state` (nested dict of tensors and plain values) as `folder/step-<step>`; keep the newest `keep`.

    Collective: every process writes what it holds, and one what they hold alike, into a folder that all of them see.
    Raises UserError when the disk is full or not writable; earlier checkpoints are untouched then.
    """
    target, building = folder / f"step-{step:09d}", folder / f".step-{step:09d}.building"
    first = mesh.rank() == 0
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(building, ignore_errors=True)
        mesh.barrier()
        with redirect_stderr(io.StringIO()):  # "torch.distributed is not initialised": one process is a legal job
            dcp.save(state, checkpoint_id=building)
        if first:
            (building / MARKER).write_text(f"{step}\n")
            shutil.rmtree(target, ignore_errors=True)
            building.rename(target)
            for old in complete(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, dcp.api.CheckpointException, RuntimeError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise UserError(
            f"checkpoint of step {step} could not be written to {folder}: {_cause(error)}; free some space or choose "
            "another --out. The last complete checkpoint is intact and `--resume auto` continues from it"
        ) from error
    return target


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / MARKER).is_file())


def find(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None. Says which newer folders were passed over because incomplete."""
    usable = complete(folder)
    newest = usable[-1].name if usable else ""
    for path in sorted(folder.glob("*step-*")):
        if not (path / MARKER).is_file() and path.name.lstrip(".") > newest:
            print(f"checkpoint {path} is incomplete (the run ended while saving) and is ignored")
    return usable[-1] if usable else None


def load(path: Path, state: dict) -> None:
    """Fill `state` in place from a complete checkpoint. Raises UserError if it is incomplete or does not fit."""
    if not (path / MARKER).is_file():
        raise UserError(
            f"{path} is no complete checkpoint (no {MARKER} file); wanted one like RUN/checkpoints/step-000001000"
        )
    try:
        with redirect_stderr(io.StringIO()):
            dcp.load(state, checkpoint_id=path)
    except (dcp.api.CheckpointException, KeyError, ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"checkpoint {path} cannot be loaded: {_cause(error)}; use the config and the data set it was made with; "
            "remove it if it is damaged"
        ) from error


def _cause(error: BaseException) -> str:
    """One sentence for an error of the checkpoint library, which wraps the cause of each rank, an interrupt as well."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, KeyboardInterrupt):
        raise error
    return " ".join(str(error).split()).split(". ")[0][:300].rstrip(".") or type(error).__name__
