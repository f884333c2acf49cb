"""What a run leaves behind (config.json, metrics.jsonl, summary.json, tensorboard/) and its line on the screen."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch

from opengem import __version__
from opengem.data.files import writable
from opengem.efficiency import mfu
from opengem.efficiency.hardware import device_name
from opengem.errors import UserError

SPEEDS = {"samples_per_s": "samples", "tokens_per_s": "tokens", "useful_tflops": "useful_tflop"}


class RunLog:
    """Writes the run folder. On resume, lines of metrics.jsonl after the checkpoint's step are dropped first."""

    def __init__(self, folder: Path, config_json: str, step: int, total_steps: int, progress: bool,
                 peak_tflops: float | None = None) -> None:
        """peak_tflops: dense bf16 peak of the device, if it is known."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self._peak = folder, peak_tflops
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "config.json").is_file():
                write_whole(folder / "config.json", config_json + "\n")
            self._lock = _lock(folder / "config.json")
            kept = [json.dumps(line) + "\n" for line in read_metrics(folder) if line["step"] <= step]
            write_whole(folder / "metrics.jsonl", "".join(kept))
            self._file = open(folder / "metrics.jsonl", "a")  # noqa: SIM115 (closed in __exit__)
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._bar = _progress_bar(progress)
        self._task = self._bar.add_task("train", total=total_steps, completed=step, info="")
        self._mark: tuple[float, dict | None] = time.perf_counter(), None

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()
        with writable(self.folder), self._lock, self._file:
            self._board.close()

    def write(self, line: dict) -> None:
        """Append one line (adding speeds, from the running sums in it, and memory); update TensorBoard and the bar."""
        line |= self._speed({speed: line[of] for speed, of in SPEEDS.items()}) | {"memory_bytes": peak_memory_bytes()}
        line["mfu"] = mfu.of(line["useful_tflops"], self._peak)
        with writable(self.folder):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            for name, value in _flatten(line).items():
                self._board.add_scalar(name, value, line["step"])
        quality = "  ".join(
            f"{task} NE {m['ne']:.4f}" for task, m in line["tasks_total"].items() if m["ne"] is not None
        )
        speed = f"{line['samples_per_s']:,.0f} samples/s  " if line["samples_per_s"] else ""
        speed += f"{line['mfu']:.1%} MFU  " if line["mfu"] else ""
        info = f"{speed}{quality}  {line['memory_bytes'] / 2**30:.2f} GiB"
        self._bar.update(self._task, completed=line["step"], info=info)

    def _speed(self, sums: dict[str, float]) -> dict[str, float | None]:
        now, (then, before) = time.perf_counter(), self._mark
        self._mark, seconds = (now, sums), now - then
        if before is None:  # warm-up: the first interval after a start holds compilation and cold caches
            return dict.fromkeys(SPEEDS) | {"elapsed_s": seconds}
        return {name: (value - before[name]) / seconds for name, value in sums.items()} | {"elapsed_s": seconds}

    def throughput(self) -> dict[str, float | None]:
        """Mean speeds of the run without warm-up intervals; None for a run that short."""
        timed = [line for line in read_metrics(self.folder) if line["samples_per_s"] is not None]
        seconds = sum(line["elapsed_s"] for line in timed)
        return {k: sum(line[k] * line["elapsed_s"] for line in timed) / seconds if timed else None for k in SPEEDS}

    def finish(self, summary: dict) -> None:
        """Write summary.json (whole or not at all)."""
        with writable(self.folder):
            write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")


class NoLog:
    """Stands for the `RunLog` in the processes that write nothing."""

    def __enter__(self) -> NoLog:
        return self

    def __exit__(self, *_) -> None:
        pass

    def write(self, line: dict) -> None:
        pass


def environment(device: torch.device) -> dict[str, str | int]:
    """Versions and hardware a number was measured with."""
    versions = {"opengem": __version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {"device": device_name(device), "platform": platform.platform()}
    return versions | {"threads": torch.get_num_threads()}


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
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    return [parse(line, f"{path}, line {i}", "step") for i, line in enumerate(lines, 1) if line.endswith("\n")]


def parse(text: str, where: str, *keys: str) -> dict:
    """The JSON object `text`; UserError naming `where` if it is none or lacks one of the keys."""
    fix = "restore the file or choose another folder"
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: {error}, wanted JSON; {fix}") from error
    missing = [key for key in keys if not isinstance(found, dict) or key not in found]
    if missing or not isinstance(found, dict):
        raise UserError(f"{where}: wanted a JSON object{' with ' * bool(missing)}{', '.join(missing)}; {fix}")
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears under its name only when it is whole."""
    building = path.with_name(f".{path.name}.building")
    try:
        building.write_text(text)
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)


def _lock(path: Path):
    """The open file, locked as long as this process lives; UserError where another process holds the lock."""
    import fcntl

    file = open(path, "r+")  # noqa: SIM115 (closed in __exit__)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path.parent} is being written by another process; choose another --out") from None
    return file


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
    """A bar, steps and time left; what does not fit beside them on a narrow screen goes to the next line."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    steps, whole = TextColumn("{task.completed}/{task.total}"), Column(no_wrap=True)
    info = TextColumn("left  {task.fields[info]}", table_column=Column())
    return Progress(BarColumn(10), steps, TimeRemainingColumn(table_column=whole), info, disable=not shown)
