"""The `opengem` command. Exit status: 0 done; 2 wrong input; 3 non-finite loss or gradient; 1 the rest."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from opengem.config import Config, from_json, to_json
from opengem.errors import NonFiniteError, UserError

DATA_KINDS = {
    "synthetic": "opengem.data.synthetic",
    "completejourney": "opengem.data.completejourney",
    "online-retail": "opengem.data.online_retail",
    "openbandit": "opengem.data.openbandit",
    "import": "opengem.data.importer",
}
RECIPES = ("tiny", "small", "medium", "large")

HELP = """usage: opengem COMMAND ...

  data KIND --out DIR ...         make a data set; KIND is synthetic, completejourney, online-retail, openbandit, import
  train RECIPE --data DIR --out RUN [--steps N] [--resume auto|never|PATH] [--section.field VALUE ...]
                                  train; RECIPE is tiny, small, medium, large or a config.json
                                  torchrun --nproc-per-node N -m opengem train ... is the same job on N processes
  train RECIPE --print-config     print the configuration as JSON, which is a RECIPE itself
  evaluate RUN --data DIR         score splits with the newest checkpoint
  predict RUN --data DIR --out FILE.parquet
                                  write a probability per sample and task
  profile RECIPE [--data DIR] [--out DIR] [--samples N]
                                  where a training step's time goes, layer by layer, and what bounds each
  report RUN [OTHER ...]          write one self-contained HTML page; several runs are compared
  bench kernels --op OP | bench sparse [--peers] | bench train [--ladder] [--out FILE.jsonl]
                                  time kernels, tables or training on this GPU
  doctor                          versions, devices, which kernel runs where, what is missing

Every command answers --help with all its flags."""


@dataclass(frozen=True)
class Train:
    """Train a recipe on a data set; any field of the recipe is a flag."""

    data: Path | None = None
    """data folder, made by `opengem data`"""
    out: Path | None = None
    """run folder to write"""
    resume: str = "auto"
    """auto: continue a run found in --out; never: refuse it; or the path of a checkpoint"""
    steps: int = 0
    """stop after this many steps at the latest, short for --train.steps"""
    baselines: bool = True
    """fit the data set's baselines in the same run"""
    print_config: bool = False
    """print the configuration as JSON and stop"""
    config: Annotated[Config, tyro.conf.arg(name="")] = Config()


@dataclass(frozen=True)
class Evaluate:
    """Score splits with the newest checkpoint of a run: one line per split and task."""

    run: tyro.conf.Positional[Path]
    data: Path
    """data folder"""
    split: tuple[str, ...] = ()
    """splits to score (default: those of the run's config)"""
    progressive: bool = False
    """predict each batch, then learn from it (online training); the run folder is not changed"""


@dataclass(frozen=True)
class Predict:
    """Write predictions to Parquet: row, timestamp and one probability per task; row order kept."""

    run: tyro.conf.Positional[Path]
    data: Path
    """data folder"""
    out: Path
    """Parquet file to write"""
    split: str = "test"
    """split to score, or all"""


@dataclass(frozen=True)
class Profile:
    """Time one training step layer by layer; any field of the recipe is a flag."""

    data: Path | None = None
    """data folder (default: random batches of the shape the recipe is made for)"""
    out: Path | None = None
    """folder for profile.json and profile.html; a run folder's report then holds the profile"""
    samples: int = 0
    """samples of the step (0: the recipe's batch or, on a GPU, as much of it as fits)"""
    streams: int = 3
    """event streams of the random batches"""
    lengths: str = ""
    """law of their history lengths (default: log-normal, half of the longest)"""
    config: Annotated[Config, tyro.conf.arg(name="")] = Config()


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about a run; several runs are compared."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path | None = None
    """file to write (default: report.html in the first run folder)"""


@dataclass(frozen=True)
class Bench:
    """Time kernels or embedding tables and, with --peers, what they are compared with, or training of the medium
    recipe, in one process on this GPU."""

    what: tyro.conf.Positional[Literal["kernels", "sparse", "train"]]
    op: str = ""
    """op folder, for example jfa (kernels only)"""
    peers: bool = False
    """also time the peers that are installed"""
    case: tuple[str, ...] = ()
    """only these cases (train: rungs of the ladder)"""
    ladder: bool = False
    """from a padded PyTorch baseline up, one technique at a time (train only)"""
    overhead: bool = False
    """what always-on logging costs (train only)"""
    out: Path | None = None
    """JSON-lines file the rows are appended to"""


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, which kernel runs where, and what is missing."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the documented status."""
    try:
        run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"opengem: {error}", file=sys.stderr)
        sys.exit(2)
    except NonFiniteError as error:
        print(f"opengem: training stopped: {error}", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        print("opengem: interrupted", file=sys.stderr)
        sys.exit(130)


def run(arguments: list[str]) -> None:
    """Dispatch one command; raises UserError or NonFiniteError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
    elif arguments[0] == "--version":
        print(importlib.import_module("opengem").__version__)
    else:
        _choose(arguments[0], COMMANDS, "command")(arguments[1:])


def _data(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: opengem data KIND --out DIR ...\nKIND is one of {', '.join(DATA_KINDS)}")
        return
    module = importlib.import_module(_choose(arguments[0], DATA_KINDS, "data kind"))
    _parse(module.build, arguments[1:], f"opengem data {arguments[0]}")


def _train(arguments: list[str]) -> None:
    options = _with_recipe(Train, "train", arguments)
    config = options.config
    if options.steps:
        config = replace(config, train=replace(config.train, steps=options.steps))
    if options.print_config:
        print(to_json(config))
        return
    for name in ("data", "out"):
        if getattr(options, name) is None:
            raise UserError(f"train needs --{name} FOLDER (data: made by `opengem data`; out: the run folder to write)")
    from opengem.efficiency import report
    from opengem.train import train

    summary = train(config, options.data, options.out, options.resume, options.baselines)
    if not summary:
        return  # one of several processes, and not the one that reports
    _print_splits(summary["splits"], summary["baselines"])
    _print_speed(summary)
    print(f"report: {report.write([options.out])}")


def _with_recipe(kind: type, command: str, arguments: list[str]) -> Any:
    """The options of a command that takes a recipe first and any field of it as a flag."""
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = ["tiny", "--help"]
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"{command} needs a recipe first: {', '.join(RECIPES)} or a config.json")
    default = kind(config=load_recipe(arguments[0]))
    return _parse(kind, arguments[1:], f"opengem {command} {arguments[0]}", default)


def load_recipe(name: str) -> Config:
    """The config a recipe name or a config.json stands for."""
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise UserError(f"recipe file {name} does not exist; print one with `opengem train tiny --print-config`")
        return from_json(Path(name).read_text(errors="replace"), name)
    return importlib.import_module(f"recipes.{_choose(name, {r: r for r in RECIPES}, 'recipe')}").recipe()


def _evaluate(arguments: list[str]) -> None:
    options = _parse(Evaluate, arguments, "opengem evaluate")
    from opengem import mesh
    from opengem.data.labels import base_rates
    from opengem.evaluate import evaluate_split
    from opengem.job import open_run, pick_device, run_config

    with mesh.joined(pick_device(run_config(options.run))[0].type):
        job = open_run(options.run, options.data)
        rates = base_rates(options.data, job.schema, job.config.data.train_split)
        for split in options.split or job.config.data.eval_splits:
            results = evaluate_split(job, options.data, split, rates, options.progressive)
            if results:
                _print_splits({split: results}, {})


def _predict(arguments: list[str]) -> None:
    options = _parse(Predict, arguments, "opengem predict")
    _alone("predict writes one file")
    from opengem.evaluate import predict
    from opengem.job import open_run

    rows = predict(open_run(options.run, options.data), options.data, options.split, options.out)
    print(f"{rows:,} predictions written to {options.out}")


def _alone(why: str) -> None:
    """UserError where torchrun has started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{why}: start it on one process, without torchrun")


def _profile(arguments: list[str]) -> None:
    options = _with_recipe(Profile, "profile", arguments)
    _alone("profile measures one process")
    if options.data and (options.lengths or options.streams != Profile.streams):
        raise UserError("profile: --streams and --lengths shape random batches; with --data they are the data set's")
    if options.out is not None and options.out.is_file():  # said before the minutes of measuring
        raise UserError(f"profile: --out {options.out} is a file, wanted a folder; choose another --out")
    from opengem import profiling
    from opengem.efficiency.profile_text import text

    result = profiling.run(options.config, options.data, options.samples, options.streams, options.lengths)
    print(text(result))
    if options.out is not None:
        print(f"profile: {profiling.write(result, options.out)}")


def _report(arguments: list[str]) -> None:
    options = _parse(Report, arguments, "opengem report")
    from opengem.efficiency import report

    print(f"report: {report.write(list(options.runs), options.out)}")


BENCH_FLAGS = {"op": ("kernels",), "peers": ("kernels", "sparse"), "ladder": ("train",), "overhead": ("train",)}


def _bench(arguments: list[str]) -> None:
    options = _parse(Bench, arguments, "opengem bench")
    for flag, of in BENCH_FLAGS.items():
        if getattr(options, flag) and options.what not in of:
            raise UserError(f"bench {options.what} has no --{flag}; it belongs to bench {' and '.join(of)}")
    if options.what == "sparse":
        from benchmarks.kernels import sparse

        sparse.run(options.out, options.peers, options.case or tuple(sparse.CASES))
    elif options.what == "train":
        from benchmarks import train

        (train.overhead if options.overhead else train.run)(options.out, options.ladder, options.case)
    else:
        from benchmarks import run as bench

        bench.kernels(options.op, options.out, options.peers, options.case)


def _doctor(arguments: list[str]) -> None:
    _parse(Doctor, arguments, "opengem doctor")
    from opengem.efficiency import doctor

    print(doctor.text())


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "data": _data,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "profile": _profile,
    "report": _report,
    "bench": _bench,
    "doctor": _doctor,
}


def _parse(target: Any, arguments: list[str], program: str, default: Any = None) -> Any:
    """tyro over `target`; a wrong flag or value is one line that names the nearest flag."""
    keywords = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            result, unknown = tyro.cli(target, prog=program, args=arguments, return_unknown_args=True, **keywords)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{program}: {_one_line(said.getvalue())}; see `{program} --help`") from None
    if unknown and not unknown[0].startswith("-"):
        raise UserError(f"{program}: {unknown[0]!r} belongs to no flag; a switch takes no value: --x.y or --x.no-y")
    if unknown:
        wanted = re.sub(r"^--no-(\w+)\.", r"--\1.no-", unknown[0])  # how tyro spells a switch of a section
        raise UserError(f"{program}: no flag {unknown[0]!r}; {_nearest(wanted, _flags(target, program, keywords))}")
    return result


def _flags(target: Any, program: str, keywords: dict) -> list[str]:
    """Every flag of a command, read off its help text."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(target, prog=program, args=["--help"], console_outputs=True, **keywords)
    return sorted(set(re.findall(r"--[a-z][a-z0-9.\-]+", shown.getvalue())))


def _one_line(text: str) -> str:
    """tyro's message without its box, title, help text and rules."""
    bare = " ".join(re.sub(r"[╭╮╰╯│─┌┐└┘├┤]+", " ", text).split())
    parts = re.split(r" ?-{4,} ?", bare)
    said = re.sub(r"^(Value error )?(Error parsing \S+: (?=config ))?| ?For full helptext.*", "", parts[len(parts) > 1])
    return said[:400].removesuffix(".") or "arguments could not be read"


def _choose(name: str, known: dict[str, Any], what: str) -> Any:
    if name not in known:
        raise UserError(f"no {what} {name!r}; {_nearest(name, known)}")
    return known[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known[:9])}{' ...' * (len(known) > 9)}"


def _print_speed(summary: dict) -> None:
    from opengem.efficiency.hardware import why_no_mfu

    if summary["useful_tflops"] is not None:
        mfu = f"E2E MFU {summary['mfu']:.2%}" if summary["mfu"] else why_no_mfu(summary["environment"]["device"])
        print(f"{summary['samples_per_s']:,.0f} samples/s, {summary['useful_tflops']:.4f} useful TFLOPS; {mfu}")


def _print_splits(splits: dict[str, dict], baselines: dict[str, dict]) -> None:
    """A table of NE, AUC and calibration: the model first, then each baseline on the same rows."""
    print(f"{'':<18}{'split':<10}{'task':<12}{'NE':>8}{'AUC':>8}{'calibr.':>9}{'rows':>12}")
    for name, by_split in ({"model": splits} | baselines).items():
        for split, task, m in [(s, t, m) for s, tasks in by_split.items() for t, m in tasks.items()]:
            ne, auc, calibration = (_number(m[key]) for key in ("ne", "auc", "calibration"))
            print(f"{name:<18}{split:<10}{task:<12}{ne:>8}{auc:>8}{calibration:>9}{m['rows']:>12,}")


def _number(value: float | None) -> str:
    return "undef." if value is None else f"{value:.4f}"
