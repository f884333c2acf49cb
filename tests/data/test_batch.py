"""The batch: one number of samples everywhere, and streams go on sharing their offsets when moved."""

from __future__ import annotations

import pytest
import torch

from opengem.data.batch import Batch
from opengem.errors import UserError
from opengem.jagged import Jagged


def batch(rows: int = 2, **changes) -> Batch:
    offsets = torch.tensor([0, *[3] * rows])
    values = {
        "sequences": {
            "view.item": Jagged(torch.arange(3), offsets, 3),
            "view.price": Jagged(torch.rand(3), offsets, 3),
        }
        if rows
        else {"view.item": Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0)},
        "features": {"hour": torch.rand(rows), "tags": Jagged.from_list([[1]] * rows, torch.int64)},
        "labels": {"click": torch.zeros(rows)},
        "weights": torch.ones(rows),
        "timestamps": torch.zeros(rows, dtype=torch.int64),
        "rows": torch.arange(rows),
    }
    return Batch(**{**values, **changes})


def test_features_of_different_batch_sizes_are_refused():
    """Five user rows and three item rows must not pass for one batch."""
    with pytest.raises(UserError, match="batch: 'hour' has 3 samples, the others have 5"):
        batch(5, features={"hour": torch.rand(3)})
    with pytest.raises(UserError, match="'view.item' has 1 samples, the others have 2"):
        batch(sequences={"view.item": Jagged.from_list([[1, 2]])})
    with pytest.raises(UserError, match="'click' has 4 samples"):
        batch(labels={"click": torch.zeros(4)})


def test_offsets_one_short_do_not_drop_a_row():
    """Eight offsets describe seven samples: a batch of eight must refuse them, not lose its last row."""
    short = Jagged(torch.arange(7), torch.arange(8), 1)
    with pytest.raises(UserError, match="'tags' has 7 samples, the others have 8"):
        batch(8, features={"tags": short})


def test_an_empty_batch():
    empty = batch(0).to("cpu")
    assert empty.batch_size == 0 and empty.sequences["view.item"].batch_size == 0


def test_moving_keeps_offsets_shared():
    moved = batch().to("meta")
    assert moved.sequences["view.item"].offsets is moved.sequences["view.price"].offsets
    assert {t.device.type for t in (moved.weights, moved.features["hour"], moved.sequences["view.item"].values)} == {
        "meta"
    }


@pytest.mark.gpu
def test_pinning_and_moving_to_a_gpu():
    pinned = batch().pin_memory()
    assert pinned.weights.is_pinned() and pinned.sequences["view.item"].offsets.is_pinned()
    moved = pinned.to("cuda", non_blocking=True)
    assert moved.features["tags"].values.tolist() == [1, 1]
    assert moved.sequences["view.item"].offsets is moved.sequences["view.price"].offsets
