import math

import numpy as np
import pytest

from opengem.data.lengths import parse
from opengem.errors import UserError

COUNT = 200_000


def draw(text, max_length=4096, count=COUNT, seed=0):
    return parse(text).draw(count, max_length, np.random.default_rng(seed))


@pytest.mark.parametrize("fill", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_fill_has_that_mean_share_and_a_uniform_law(fill):
    lengths = draw(f"fill({fill})", 1024)
    low, high = ((2 * fill - 1) * 1024, 1024) if fill >= 0.5 else (0, 2 * fill * 1024)
    assert lengths.min() >= math.floor(low) and lengths.max() < high
    assert lengths.mean() / 1024 == pytest.approx(fill, abs=0.003)
    assert lengths.std() == pytest.approx((high - low) / math.sqrt(12), rel=0.01)


def test_full_fill_is_constant():
    assert (draw("fill(1)", 77) == 77).all()
    assert (draw("fill(1.0)", 77) == 77).all()


@pytest.mark.parametrize(
    ("text", "mean", "sd"),
    [
        ("lognormal(64)", 64, 32),
        ("lognormal(512, 99)", 512, 99),
        ("gauss(400)", 400, 100),
        ("gauss(400,20)", 400, 20),
    ],
)
def test_mean_and_sd(text, mean, sd):
    lengths = draw(text)
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.std() == pytest.approx(sd, rel=0.02)


def test_constant():
    assert (draw("constant(9)") == 9).all()
    assert (draw("constant(9)", 4) == 4).all()


def test_zipf_follows_the_power_law_up_to_the_maximum():
    lengths = draw("zipf(1.2)", 100)
    weights = np.arange(1, 101.0) ** -1.2
    share = np.bincount(lengths, minlength=101)[1:] / COUNT
    assert lengths.min() == 1 and lengths.max() == 100
    assert np.abs(share - weights / weights.sum()).max() < 0.004


@pytest.mark.parametrize(
    ("text", "median", "sigma", "low", "high"),
    [
        ("kuairand1k", 3379, 0.89, 10, 49_332),
        ("kuairand27k", 8591, 0.80, 100, 228_000),
        ("retail", math.exp(3.68), 1.34, 1, 7_983),
    ],
)
def test_presets_of_public_data(text, median, sigma, low, high):
    lengths = draw(text, 10**6)
    assert np.median(lengths) == pytest.approx(median, rel=0.02)
    q25, q75 = np.quantile(np.log(lengths), [0.25, 0.75])
    assert (q75 - q25) / 1.349 == pytest.approx(sigma, rel=0.03)
    assert low <= lengths.min() and lengths.max() <= high


@pytest.mark.parametrize("text", ["fill(0.4)", "lognormal(64)", "gauss(9)", "zipf(1.1)", "kuairand1k", "retail"])
def test_never_above_the_maximum_and_repeatable(text):
    lengths = draw(text, 50, 5_000)
    assert lengths.dtype == np.int64 and lengths.shape == (5_000,)
    assert lengths.min() >= 0 and lengths.max() <= 50
    assert (lengths == draw(text, 50, 5_000)).all()
    assert draw(text, 50, 0).shape == (0,)


def test_an_unknown_name_lists_the_known_ones_and_names_the_nearest():
    with pytest.raises(UserError, match=r"lognormel.*did you mean lognormal\(64\).*fill\(0.5\).*kuairand27k") as error:
        parse("lognormel(3)")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("fill", "got 0 arguments"),
        ("fill(0.5, 1)", "got 2 arguments"),
        ("fill(1.5)", r"\(0, 1\]"),
        ("fill(x)", "must be numbers"),
        ("lognormal(-3)", "above 0"),
        ("lognormal(nan)", "above 0"),
        ("retail(3)", "got 1 arguments"),
        ("lognormal(3", "no such law"),
        ("", "no such law"),
    ],
)
def test_bad_arguments_say_what_to_write(text, part):
    with pytest.raises(UserError, match=part):
        parse(text)
