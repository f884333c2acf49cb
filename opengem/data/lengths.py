"""Named laws of history length, as written on a command line: `fill(0.5)`, `lognormal(64)`, `retail`.

| text                  | law, rounded and kept inside its range, never above max_length                    |
|-----------------------|-----------------------------------------------------------------------------------|
| constant(n)           | n                                                                                 |
| fill(s)               | mean s x max: uniform on [(2s - 1) max, max) for s >= .5, else [0, 2s max); 1: max |
| lognormal(mean[, sd]) | log-normal with that mean and sd (default mean / 2), from 1                       |
| gauss(mean[, sd])     | normal (sd default mean / 4), from 1                                              |
| zipf(exponent)        | P(n) proportional to n^-exponent on 1..max                                        |
| kuairand1k            | ln n ~ N(ln 3379, .89), 10 to 49,332                                              |
| kuairand27k           | ln n ~ N(ln 8591, .80), 100 to 228,000                                            |
| retail                | ln n ~ N(3.68, 1.34), 1 to 7,983 (UCI Online Retail)                              |
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

import numpy as np

from opengem.errors import UserError

LOG_NORMAL = {
    "kuairand1k": (math.log(3379), 0.89, 10, 49_332),
    "kuairand27k": (math.log(8591), 0.80, 100, 228_000),
    "retail": (3.68, 1.34, 1, 7_983),
}
"""presets fitted to public data: mean and sd of ln n, shortest, longest"""

ARGUMENTS = {"constant": (1, 1), "fill": (1, 1), "lognormal": (1, 2), "gauss": (1, 2), "zipf": (1, 1)} | dict.fromkeys(
    LOG_NORMAL, (0, 0)
)
"""name -> fewest and most arguments"""


@dataclass(frozen=True)
class Lengths:
    """A parsed law: its name and its arguments."""

    name: str
    arguments: tuple[float, ...] = ()

    def draw(self, count: int, max_length: int, rng: np.random.Generator) -> np.ndarray:
        """int64 `[count]`, each at most `max_length`."""
        low, high = 1, max_length
        if self.name == "constant":
            raw = np.full(count, self.arguments[0])
        elif self.name == "fill":
            low, raw = 0, _fill(self.arguments[0], count, max_length, rng)
        elif self.name == "lognormal":
            mean, sd = _mean_and_sd(self.arguments, 0.5)
            variance = math.log1p((sd / mean) ** 2)
            raw = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
        elif self.name == "gauss":
            raw = rng.normal(*_mean_and_sd(self.arguments, 0.25), count)
        elif self.name == "zipf":
            weights = np.arange(1, max_length + 1, dtype=np.float64) ** -self.arguments[0]
            raw = 1 + np.searchsorted(np.cumsum(weights), rng.random(count) * weights.sum())
        else:
            mu, sigma, low, longest = LOG_NORMAL[self.name]
            raw, high = rng.lognormal(mu, sigma, count), min(longest, max_length)
        return np.clip(np.rint(raw), min(low, high), high).astype(np.int64)


def parse(text: str) -> Lengths:
    """`name` or `name(number[, number])` -> law. A bad name or argument is a UserError that lists the known ones."""
    known = ", ".join(_usage(name) for name in ARGUMENTS)
    match = re.fullmatch(r"\s*([a-z_0-9]+)\s*(?:\(([^()]*)\))?\s*", text)
    if not match or match[1] not in ARGUMENTS:
        near = difflib.get_close_matches(match[1] if match else text, ARGUMENTS, 1)
        hint = f" (did you mean {_usage(near[0])}?)" if near else ""
        raise UserError(f"lengths {text!r}: no such law{hint}; known: {known}")
    name, inside = match[1], (match[2] or "").strip()
    try:
        arguments = tuple(float(part) for part in inside.split(",")) if inside else ()
    except ValueError as error:
        raise UserError(f"lengths {text!r}: arguments must be numbers; write {_usage(name)}") from error
    fewest, most = ARGUMENTS[name]
    if not fewest <= len(arguments) <= most:
        raise UserError(f"lengths {text!r}: got {len(arguments)} arguments; write {_usage(name)}")
    if not all(math.isfinite(a) and a > 0 for a in arguments) or (name == "fill" and arguments[0] > 1):
        wanted = "a number in (0, 1]" if name == "fill" else "numbers above 0"
        raise UserError(f"lengths {text!r}: wanted {wanted}; for example {_usage(name)}")
    return Lengths(name, arguments)


def _fill(fill: float, count: int, max_length: int, rng: np.random.Generator) -> np.ndarray:
    if fill == 1:
        return np.full(count, max_length)
    low, high = ((2 * fill - 1) * max_length, max_length) if fill >= 0.5 else (0, 2 * fill * max_length)
    return np.floor(rng.uniform(low, high, count))


def _mean_and_sd(arguments: tuple[float, ...], ratio: float) -> tuple[float, float]:
    return arguments[0], arguments[1] if len(arguments) > 1 else ratio * arguments[0]


def _usage(name: str) -> str:
    example = {"constant": "64", "fill": "0.5", "lognormal": "64", "gauss": "64", "zipf": "1.2"}.get(name)
    return f"{name}({example})" if example else name
