"""Predictions as a file: whole or not there, every row of the data set on request."""

from __future__ import annotations

import weakref

import numpy as np
import pyarrow.parquet as pq
import pytest

from opengem.data.schema import Schema
from opengem.errors import UserError
from opengem.evaluate import predict
from opengem.job import build
from tests import small


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("small") / "data")


@pytest.fixture(scope="module")
def job(data):
    return build(small.config(), Schema.load(data))


def test_all_scores_every_sample_in_order(data, job, tmp_path):
    assert predict(job, data, "all", tmp_path / "p.parquet") == 600
    assert np.array_equal(pq.read_table(tmp_path / "p.parquet")["row"], np.arange(600))


def test_scoring_keeps_no_histories(data, job, monkeypatch):
    """All batches of the split were kept until its end, histories and all."""
    from opengem import evaluate

    alive, score = [], evaluate.score

    def watched(*arguments):
        for batch, chances in score(*arguments):
            alive.append(weakref.ref(batch.sequences["view.item"]))
            yield batch, chances
            del batch
            assert sum(ref() is not None for ref in alive) <= 4  # with those that are prefetched

    monkeypatch.setattr(evaluate, "score", watched)
    result = evaluate.evaluate_split(job, data, "train", {"click": 0.5, "convert": 0.5})
    assert len(alive) == 9
    assert result["click"]["rows"] == 540


def test_what_is_no_file_is_not_replaced(data, job, tmp_path):
    with pytest.raises(UserError, match="no file"):
        predict(job, data, "test", tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        predict(job, data, "test", tmp_path / "file" / "p.parquet")


def test_a_failure_leaves_the_old_file_and_no_other(data, job, tmp_path, monkeypatch):
    out = tmp_path / "p.parquet"
    predict(job, data, "test", out)
    old = out.read_bytes()
    with pytest.raises(UserError, match="no split 'tset'"):
        predict(job, data, "tset", out)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(UserError, match="No space left"):
        predict(job, data, "test", out)
    assert out.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["p.parquet"]
