import hashlib
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.linear_model import LogisticRegression

from opengem.data.schema import Schema
from opengem.data.store import Events, Samples
from opengem.data.synthetic import MECHANISMS, build
from opengem.errors import UserError

SAMPLES = 120_000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder and what is in it: (folder, oracle, side columns, sample columns, events)."""
    folder = tmp_path_factory.mktemp("synthetic") / "set"
    build(folder, users=3_000, samples=SAMPLES, base_rate=0.2, strength=2.0, streams=2, seed=3)
    schema = Schema.load(folder)
    samples = Samples.open(folder, schema)
    rows = samples.read(0, samples.num_rows)
    side = {name: column.to_numpy() for name, column in zip_columns(pq.read_table(folder / "oracle.parquet"))}
    return folder, json.loads((folder / "oracle.json").read_text()), side, rows, Events.open(folder, schema)


def zip_columns(table):
    return zip(table.column_names, table.columns, strict=True)


def split(data, name):
    folder, oracle, *_ = data
    rows = oracle["rows"]
    return slice(0, rows["train"]) if name == "train" else slice(rows["train"], rows["train"] + rows["test"])


def terms_by_hand(events, rows, row, oracle):
    """The seven terms of one sample by plain loops over what is written, before standardising."""
    user, cut, now = int(rows["user"][row]), int(rows["cut.history"][row]), int(rows["timestamp"][row])
    begin = events.offsets["history"][user]
    times, categories, actions = (
        [int(v) for v in events.columns[f"history.{name}"][begin : begin + cut]]
        for name in ("timestamp", "category", "action")
    )
    constants = oracle["terms"]
    same = [t for t, c in zip(times, categories, strict=True) if c == rows["category"][row]]
    count, length = math.log(1 + len(same)), math.log(1 + cut)
    recency = math.exp(-(now - same[-1]) / oracle["recency_s"]) if same else 0.0
    fit = constants["count"]["fit"]
    result = {"count": count - fit[0] - fit[1] * length - fit[2] * length**2}
    basis = [1, count, length, count * count, count * length, length * length]
    result["recency"] = recency - sum(a * b for a, b in zip(constants["recency"]["fit"], basis, strict=True))
    if not same:
        result["recency"] = 0.0
    a, b, c = oracle["motif"]
    result["motif"] = result["straddle"] = 0
    for i in range(cut - 2):
        sign = {(a, b, c): 1, (c, b, a): -1}.get(tuple(actions[i : i + 3]), 0)
        result["motif" if i // 64 == (i + 2) // 64 else "straddle"] += sign
    names = ("user_sign", "ad_sign", "device_sign", "surface_sign")
    result["cross"] = math.prod(1 if rows[name][row] else -1 for name in names)
    result["bias"] = constants["segment"][rows["segment"][row]] + constants["item"][rows["item"][row]]
    week = 7 * 86_400
    phase = 2 * math.pi * int(rows["advertiser"][row]) / 8
    result["drift"] = math.sin(math.pi * (now - 4 * week) / week + phase)
    return {name: (result[name] - constants[name]["centre"]) / constants[name]["scale"] for name in MECHANISMS}


def test_every_term_is_a_function_of_what_is_written(data):
    _, oracle, side, rows, events = data
    straddles = 0
    for row in range(0, SAMPLES, 97):
        by_hand = terms_by_hand(events, rows, row, oracle)
        planted = {name: float(side[f"term.{name}"][row]) for name in MECHANISMS}
        assert by_hand == pytest.approx(planted, abs=2e-5), row
        straddles += planted["straddle"] != 0
        for label in ("click", "convert"):
            head = oracle["labels"][label]
            logit = head["intercept"] + sum(head["weights"][name] * by_hand[name] for name in MECHANISMS)
            assert 1 / (1 + math.exp(-logit)) == pytest.approx(side[f"p.{label}"][row], abs=1e-5)
    assert straddles > 100


def test_terms_are_standardised_and_uncorrelated(data):
    side = data[2]
    values = np.stack([side[f"term.{name}"] for name in MECHANISMS]).astype(np.float64)
    assert np.abs(values.mean(1)).max() < 0.03
    assert np.abs(values.std(1) - 1).max() < 0.01
    assert np.abs(np.corrcoef(values) - np.eye(len(MECHANISMS))).max() < 0.08


def test_rates_strength_and_motif_weight(data):
    _, oracle, side, rows, _ = data
    p = side["p.click"].astype(np.float64)
    assert p.mean() == pytest.approx(0.2, abs=1e-4)
    assert np.log(p / (1 - p)).std() == pytest.approx(2.0, abs=1e-3)
    assert np.average(side["p.convert"], weights=p) == pytest.approx(0.2, abs=1e-3)
    assert not rows["convert"][rows["click"] == 0].any()
    for label in ("click", "convert"):
        weights = oracle["labels"][label]["weights"]
        each = [weights[name] / oracle["terms"][name]["scale"] for name in ("motif", "straddle")]
        assert each[0] == pytest.approx(each[1]), "a motif weighs the same wherever it lies"


@pytest.mark.parametrize("label", ["click", "convert"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_labels_agree_with_the_oracle(data, label, part):
    """Log loss of p on the labels drawn is within 4 standard errors of the expected one, and is what the file says."""
    _, oracle, side, rows, _ = data
    where = split(data, part)
    facts = oracle["labels"][label]["splits"][part]
    known = rows["click"][where] > 0 if label == "convert" else np.ones(where.stop - where.start, bool)
    p, y = side[f"p.{label}"][where][known].astype(np.float64), rows[label][where][known]
    loss = -np.where(y > 0, np.log(p), np.log(1 - p))
    expected = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    error = (loss - expected).std() / math.sqrt(len(loss))
    assert abs(loss.mean() - expected.mean()) < 4 * error
    assert facts["label_rows"] == len(y)
    assert facts["label_logloss"] == pytest.approx(loss.mean(), abs=1e-5)
    base = oracle["labels"][label]["train_base_rate"]
    entropy = -(base * math.log(base) + (1 - base) * math.log(1 - base))
    assert facts["label_ne"] == pytest.approx(loss.mean() / entropy, abs=1e-4)


def expected_loss(p, q):
    return -np.mean(p * np.log(q) + (1 - p) * np.log(1 - q))


def test_a_fit_on_the_true_terms_reaches_the_oracle_and_missing_one_costs_its_price(data):
    """Logistic regression on labels; scored by expected loss over labels, so only its own error is left."""
    _, oracle, side, rows, _ = data
    train, test = split(data, "train"), split(data, "test")
    x = np.stack([side[f"term.{name}"] for name in MECHANISMS], 1)
    y, p = rows["click"][train] > 0, side["p.click"][test].astype(np.float64)
    facts = oracle["labels"]["click"]["splits"]["test"]

    def ne(columns):
        model = LogisticRegression(C=1e6).fit(x[train][:, columns], y)
        q = model.predict_proba(x[test][:, columns])[:, 1]
        return expected_loss(p, q) / expected_loss(p.mean(), p.mean())

    everything = list(range(len(MECHANISMS)))
    assert facts["ne"] - 1e-4 < ne(everything) < facts["ne"] + 0.0005
    for k, name in enumerate(MECHANISMS):
        dropped = ne([i for i in everything if i != k])
        assert dropped == pytest.approx(facts["without"][name]["ne"], abs=0.004), name


def test_every_mechanism_has_a_visible_price_by_default(tmp_path):
    build(tmp_path / "set", users=5_000, samples=50_000)
    oracle = json.loads((tmp_path / "set" / "oracle.json").read_text())
    prices = oracle["labels"]["click"]["splits"]["train"]["without"]
    assert set(prices) == set(MECHANISMS)
    assert min(cost["price_percent"] for cost in prices.values()) > 1.5
    assert oracle["labels"]["click"]["splits"]["train"]["ne"] == pytest.approx(0.785, abs=0.01)


def test_action_counts_tell_nothing_of_the_motif(data):
    """Each block holds as many a as c whatever the signs, but for a motif that lies across its edges."""
    _, oracle, _, _, events = data
    a, _, c = oracle["motif"]
    actions, offsets = events.columns["history.action"], events.offsets["history"]
    for user in range(300):
        history = actions[offsets[user] : offsets[user + 1]]
        assert (history == a).sum() == (history == c).sum()


def test_histories_fit_and_cuts_are_strictly_before_the_request(data):
    _, oracle, _, rows, events = data
    for stream in ("history", "impressions"):
        offsets, times = events.offsets[stream], events.columns[f"{stream}.timestamp"]
        assert np.diff(offsets).max() <= oracle["max_length"]
        for row in range(0, SAMPLES, 501):
            user, cut = rows["user"][row], rows[f"cut.{stream}"][row]
            history = times[offsets[user] : offsets[user + 1]]
            assert cut == (history < rows["timestamp"][row]).sum()


def test_truth_is_no_input(data):
    schema = Schema.load(data[0])
    names = {f.name for f in schema.features}
    assert not any(name.startswith(("p.", "term.")) for name in names | set(data[3]))
    assert {f.name for f in schema.features if f.optional} == {"category_count", "category_recency"}


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_same_seed_same_files_other_seed_other_files(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build(tmp_path / name, users=200, samples=2_000, seed=seed)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a") != digest(tmp_path / "c")


def test_one_mechanism_alone_and_no_motif_letters_when_none_is_planted(tmp_path):
    build(tmp_path / "set", users=500, samples=5_000, mechanisms=("bias",), lengths="retail", max_length=40)
    oracle = json.loads((tmp_path / "set" / "oracle.json").read_text())
    assert oracle["mechanisms"] == ["bias"]
    assert oracle["labels"]["click"]["splits"]["train"]["without"]["bias"]["ne"] == pytest.approx(1, abs=0.01)
    events = Events.open(tmp_path / "set", Schema.load(tmp_path / "set"))
    assert events.columns["history.action"].max() == 5


def test_empty_histories_and_a_single_sample_are_ordinary(tmp_path):
    build(tmp_path / "a", users=50, samples=500, lengths="fill(0.01)", max_length=64, mechanisms=("cross",))
    build(tmp_path / "b", users=1, samples=40, mechanisms=("drift",), lengths="constant(3)")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"users": 0}, "users = 0 must be at least 1"),
        ({"base_rate": 1.5}, "base-rate = 1.5 must lie between"),
        ({"strength": 0}, "strength = 0 must be above 0"),
        ({"mechanisms": ("counts",)}, "must be some of count, recency"),
        ({"items": 100}, "items = 100 must be a multiple of 16"),
        ({"streams": 5}, "streams = 5 must be 1 to 4"),
        ({"lengths": "normal(3)"}, "no such law"),
        ({"max_length": 60}, "straddle never varies.*--max-length"),
    ],
)
def test_bad_options_name_the_option_and_the_rule(tmp_path, options, part):
    with pytest.raises(UserError, match=part) as error:
        build(tmp_path / "set", **({"users": 100, "samples": 1_000} | options))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "set" / "schema.json").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "notes.txt").write_text("mine")
    with pytest.raises(UserError):
        build(tmp_path / "set", users=100, samples=1_000)
