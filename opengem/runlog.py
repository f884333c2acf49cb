"""What a run leaves behind (config.json, metrics.jsonl, summary.json, tensorboard/) and its line on the screen."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch

from opengem import __version__


class RunLog:
    """Writes the run folder. On resume, lines of metrics.jsonl after the checkpoint's step are dropped first."""

    def __init__(self, folder: Path, config_json: str, step: int, total_steps: int, progress: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.summary = folder, {}
        (folder / "config.json").write_text(config_json + "\n")
        _drop_lines_after(folder / "metrics.jsonl", step)
        self._file = open(folder / "metrics.jsonl", "a")  # noqa: SIM115 (closed in __exit__)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step or None)
        self._bar = _progress_bar(progress)
        self._task = self._bar.add_task("train", total=total_steps, completed=step, info="")
        self._intervals = [(0.0, 0, 0)]  # seconds, samples, tokens of each logged interval after warm-up
        self._mark = (time.perf_counter(), None, None)

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()
        self._file.close()
        self._board.close()

    def write(self, line: dict) -> None:
        """Append one line (adding speed and memory), update TensorBoard and the progress line."""
        line |= self._speed(line["samples"], line["tokens"]) | {"memory_bytes": peak_memory_bytes()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in _flatten(line).items():
            self._board.add_scalar(name, value, line["step"])
        quality = "  ".join(
            f"{task} NE {m['ne']:.4f}" for task, m in line["tasks_total"].items() if m["ne"] is not None
        )
        speed = f"{line['samples_per_s']:,.0f} samples/s  " if line["samples_per_s"] else ""
        info = f"{speed}{quality}  {line['memory_bytes'] / 2**30:.2f} GiB"
        self._bar.update(self._task, completed=line["step"], info=info)

    def _speed(self, samples: int, tokens: int) -> dict[str, float]:
        now = time.perf_counter()
        then, old_samples, old_tokens = self._mark
        self._mark = (now, samples, tokens)
        if old_samples is None:  # warm-up: the first interval after a start holds compilation and cold caches
            return {"samples_per_s": None, "tokens_per_s": None, "elapsed_s": now - then}
        self._intervals.append((now - then, samples - old_samples, tokens - old_tokens))
        seconds = max(now - then, 1e-9)
        return {
            "samples_per_s": (samples - old_samples) / seconds,
            "tokens_per_s": (tokens - old_tokens) / seconds,
            "elapsed_s": now - then,
        }

    def throughput(self) -> dict[str, float | None]:
        """Mean samples/s and tokens/s of this process, without the warm-up interval; None for a run that short."""
        seconds, samples, tokens = (sum(column) for column in zip(*self._intervals, strict=True))
        if not seconds:
            return {"samples_per_s": None, "tokens_per_s": None}
        return {"samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}

    def finish(self, summary: dict) -> None:
        """Write summary.json (whole or not at all)."""
        self.summary = summary
        building = self.folder / ".summary.json.building"
        building.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(building, self.folder / "summary.json")


def environment(device: torch.device) -> dict[str, str | int]:
    """Versions and hardware a number was measured with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"opengem": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return versions | {"device": name, "threads": torch.get_num_threads(), "platform": platform.platform()}


def peak_memory_bytes() -> int:
    """Peak device memory of this process, or its peak resident memory where there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def read_metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; a last line cut short by a kill is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _drop_lines_after(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path.parent) if line["step"] <= step]
    building = path.with_name(".metrics.jsonl.building")
    building.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(building, path)


def _flatten(line: dict, prefix: str = "") -> dict[str, float]:
    """Nested numbers as "tasks/click/ne" -> value, for TensorBoard."""
    out: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            out |= _flatten(value, f"{prefix}{key}/")
        elif value is not None:
            out[prefix + key] = value
    return out


def _progress_bar(shown: bool):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[info]}"))
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), disable=not shown)
