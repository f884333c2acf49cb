"""The plain collection against dense autograd and a row-wise Adagrad written out row by row in float64."""

from __future__ import annotations

import pytest
import torch

from opengem.config import SparseConfig
from opengem.data.batch import Batch
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.errors import UserError
from opengem.jagged import Jagged
from opengem.sparse.collection import EmbeddingCollection

SCHEMA = Schema(
    name="toy",
    streams=(Stream("buys", (Feature("item", rows=10, table="items"), Feature("price", "dense"))),),
    features=(
        Feature("item", rows=10, table="items", role="item"),
        Feature("hour", rows=24),
        Feature("tags", "ids", rows=10, table="items"),
    ),
    labels=(Label("click"),),
    splits={"train": (0, 10)},
)
HISTORIES = [[3, 3, 9], [], [0, 3]]
TAGS = [[3, 3], [], [1]]


def collection(device: str = "cpu", **options) -> EmbeddingCollection:
    return EmbeddingCollection(SCHEMA, list(SCHEMA.features), SparseConfig(dim=4, lr=0.1, **options), device, seed=0)


def batch(histories=HISTORIES, items=(3, 9, 0), hours=(0, 23, 5), tags=TAGS) -> Batch:
    size = len(items)
    return Batch(
        sequences={"buys.item": Jagged.from_list([torch.tensor(h, dtype=torch.int64) for h in histories], torch.int64)},
        features={
            "item": torch.tensor(items, dtype=torch.int64),
            "hour": torch.tensor(hours, dtype=torch.int64),
            "tags": Jagged.from_list([torch.tensor(t, dtype=torch.int64) for t in tags], torch.int64),
        },
        labels={"click": torch.zeros(size)},
        weights=torch.ones(size),
        timestamps=torch.arange(size),
        rows=torch.arange(size),
    )


def loss_of(embedded) -> torch.Tensor:
    """Any smooth function in which every vector counts differently."""
    parts = [embedded.sequences["buys.item"].values, *(embedded.features[k] for k in ("item", "hour", "tags"))]
    return sum(((i + 1) * part.double() + 0.3).square().sum() for i, part in enumerate(parts))


def dense_lookup(weights, b):
    """The same vectors by indexing and a loop over samples."""
    items, hours = weights["items"], weights["hour"]
    pooled = [items[t].sum(0) if len(t) else torch.zeros_like(items[0]) for t in b.features["tags"].to_list()]
    history = b.sequences["buys.item"].values
    return [items[history], items[b.features["item"]], hours[b.features["hour"]], torch.stack(pooled)]


def adagrad_row_by_row(weight, moment, grad, lr, eps):
    for row in range(weight.shape[0]):
        if grad[row].any():
            moment[row] += grad[row].square().mean()
            weight[row] -= lr * grad[row] / (moment[row].sqrt() + eps)


def test_three_steps_equal_dense_autograd_and_adagrad_in_float64():
    ours = collection()
    state = ours.state_dict()
    weights = {name: w.double().clone() for name, w in state["weight"].items()}
    moments = {name: m.double().clone() for name, m in state["moment"].items()}
    for step in range(3):
        b = batch(items=(3, step, 0))
        embedded = ours(b)
        loss_of(embedded).backward()
        assert bool(ours.finite())
        ours.step(0.1)

        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        parts = dense_lookup(leaves, b)
        sum(((i + 1) * part + 0.3).square().sum() for i, part in enumerate(parts)).backward()
        for name, leaf in leaves.items():
            adagrad_row_by_row(weights[name], moments[name], leaf.grad, 0.1, 1e-8)
    for name in weights:
        torch.testing.assert_close(state["weight"][name].double(), weights[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["moment"][name].double(), moments[name], rtol=1e-5, atol=1e-6)


def test_lookup_values_and_shapes():
    ours = collection()
    b = batch()
    embedded = ours(b)
    parts = dense_lookup(ours.state_dict()["weight"], b)
    assert torch.equal(embedded.sequences["buys.item"].values, parts[0])
    assert embedded.sequences["buys.item"].offsets is b.sequences["buys.item"].offsets
    for key, part in zip(("item", "hour", "tags"), parts[1:], strict=True):
        assert torch.equal(embedded.features[key], part)
        assert embedded.features[key].requires_grad
    assert "buys.price" not in embedded.sequences


def test_one_table_is_shared_by_all_its_features():
    assert list(collection().state_dict()["weight"]) == ["items", "hour"]


def test_pooled_feature_with_as_many_ids_as_samples():
    """Lengths [3, 0, 0] over three samples: the gradient of sample 0 goes to all three ids, not one each."""
    ours = collection()
    before = ours.state_dict()["weight"]["items"].clone()
    ours(batch(tags=[[4, 5, 6], [], []])).features["tags"][0].sum().backward()
    ours.step(0.1)
    moved = (ours.state_dict()["weight"]["items"] - before).abs().sum(1).nonzero().flatten()
    assert moved.tolist() == [4, 5, 6]


def test_same_input_gives_the_same_bits():
    def run():
        ours = collection()
        for _ in range(2):
            loss_of(ours(batch())).backward()
            ours.step(0.1)
        return ours.state_dict()["weight"]["items"]

    assert torch.equal(run(), run())


@pytest.mark.parametrize("b", [batch([], (), (), []), batch([[]], (1,), (1,), [[]])], ids=["no_samples", "no_events"])
def test_empty_batch_and_empty_histories(b):
    """A zero-row batch: offsets [0], outputs (0, width), the update a no-op."""
    ours = collection()
    before = ours.state_dict()["weight"]["hour"].clone()
    embedded = ours(b)
    assert embedded.sequences["buys.item"].values.shape == (0, 4)
    assert embedded.features["tags"].shape == (b.batch_size, 4)
    assert not embedded.features["tags"].any()
    loss_of(embedded).backward()
    ours.step(0.1)
    moved = (ours.state_dict()["weight"]["hour"] - before).abs().sum(1).nonzero().flatten()
    assert moved.tolist() == b.features["hour"].tolist()


def test_step_without_gradients_and_unused_leaves():
    ours = collection()
    before = ours.state_dict()["weight"]["items"].clone()
    ours.step(0.1)
    ours(batch())
    assert bool(ours.finite())
    ours.step(0.1)
    assert torch.equal(ours.state_dict()["weight"]["items"], before)


def test_discard_and_no_grad_leave_nothing_to_apply():
    ours = collection()
    before = ours.state_dict()["weight"]["items"].clone()
    loss_of(ours(batch())).backward()
    ours.discard()
    with torch.no_grad():
        assert not ours(batch()).features["item"].requires_grad
    ours.step(0.1)
    assert torch.equal(ours.state_dict()["weight"]["items"], before)


def test_two_batches_before_one_step_add_up():
    once, twice = collection(), collection()
    whole = once(batch([[1, 2, 2, 1]], (1,), (1,), [[7, 7]]))
    given = {"buys.item": whole.sequences["buys.item"].values, **whole.features}
    for part in given.values():
        part.retain_grad()
    loss_of(whole).backward()
    grads = {key: part.grad for key, part in given.items()}
    halves = [twice(batch([[1, 2]], (1,), (1,), [[7]])), twice(batch([[2, 1]], (1,), (1,), [[7]]))]
    for half, rows in zip(halves, (slice(2), slice(2, 4)), strict=True):
        half.sequences["buys.item"].values.backward(grads["buys.item"][rows], retain_graph=True)
        half.features["tags"].backward(grads["tags"], retain_graph=True)
    for key in ("item", "hour"):
        halves[0].features[key].backward(grads[key], retain_graph=True)
    once.step(0.1)
    twice.step(0.1)
    assert torch.equal(once.storage.weight, twice.storage.weight)


def test_a_gradient_that_is_not_finite_is_seen():
    ours = collection()
    (ours(batch()).features["hour"].sum() * float("nan")).backward()
    assert not bool(ours.finite())


@pytest.mark.parametrize("wrong", [10, -1])
@pytest.mark.parametrize("place", ["histories", "items", "tags"])
def test_id_out_of_range_names_feature_table_id_and_rows(wrong, place):
    """id == rows must not read the next table's row; id -1 must not wrap."""
    values = {"histories": [[1], [wrong], []], "items": (1, wrong, 2), "tags": [[], [wrong], [1]]}[place]
    key = {"histories": "buys.item", "items": "item", "tags": "tags"}[place]
    with pytest.raises(UserError, match=rf"'{key}', table 'items' of 10 rows: id {wrong} "):
        collection()(batch(**{place: values}))


def test_hashing_by_modulo_counts_collisions():
    ours = collection(max_rows=4)
    b = batch([[9, 5, 1], [], []], (13, 2, 2), (0, 1, 2), [[], [], []])
    embedded = ours(b)
    weight = ours.state_dict()["weight"]["items"]
    assert weight.shape == (4, 4) and torch.equal(embedded.sequences["buys.item"].values, weight[[1, 1, 1]])
    assert torch.equal(embedded.features["item"], weight[[1, 2, 2]])
    assert ours.collisions(b)["items"] == (5, 2)  # 1, 2, 5, 9, 13 -> rows 1, 2
    with pytest.raises(UserError, match="id -1 is out of range, wanted >= 0"):
        ours(batch(items=(1, -1, 2)))


def test_state_dict_round_trip_is_bit_exact():
    first, second = collection(), collection()
    loss_of(first(batch())).backward()
    first.step(0.1)
    saved = {kind: {name: t.clone() for name, t in part.items()} for kind, part in first.state_dict().items()}
    second.reinitialise(5)
    second.load_state_dict(saved)
    for ours in (first, second):
        loss_of(ours(batch(items=(1, 2, 3)))).backward()
        ours.step(0.1)
    assert torch.equal(first.storage.weight, second.storage.weight)
    assert torch.equal(first.storage.moment, second.storage.moment)


def test_load_names_the_table_that_does_not_fit():
    ours = collection()
    state = ours.state_dict()
    with pytest.raises(UserError, match="no moment of table 'hour'"):
        ours.load_state_dict({**state, "moment": {"items": state["moment"]["items"]}})
    with pytest.raises(UserError, match=r"weight of table 'items' is \[9, 4\], wanted \[10, 4\]"):
        ours.load_state_dict({**state, "weight": {**state["weight"], "items": torch.zeros(9, 4)}})


def test_initial_rows_depend_on_seed_and_table_only():
    a, b = collection(init_std=0.5), collection(init_std=0.5)
    assert torch.equal(a.storage.weight, b.storage.weight)
    b.reinitialise(1)
    assert not torch.equal(a.storage.weight, b.storage.weight)
    assert not torch.equal(a.state_dict()["weight"]["items"], a.state_dict()["weight"]["hour"][:10])


def test_num_bytes_counts_rows_and_state():
    assert collection().num_bytes() == 34 * 4 * 4 + 34 * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_rows_train_and_resume_with_the_same_noise(dtype):
    """Noise is keyed by (table, step, element), so a resumed run repeats the draws of the one that went on."""
    going, resumed = collection(dtype=dtype), collection(dtype=dtype)
    for step in range(4):
        if step == 2:
            resumed.load_state_dict(going.state_dict())
        for ours in (going, resumed)[: 1 if step < 2 else 2]:
            embedded = ours(batch())
            assert embedded.features["item"].dtype == torch.float32
            loss_of(embedded).backward()
            ours.step(0.1)
    assert going.storage.weight.dtype == getattr(torch, dtype)
    assert torch.equal(going.storage.weight, resumed.storage.weight)


@pytest.mark.gpu
def test_a_gpu_gives_the_tables_of_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        ours = collection(device)
        ours.load_state_dict(collection().state_dict())
        for _ in range(3):
            loss_of(ours(batch().to(device))).backward()
            ours.step(0.1)
        results.append(ours)
    torch.testing.assert_close(results[1].storage.weight.cpu(), results[0].storage.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[1].storage.moment.cpu(), results[0].storage.moment, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_step_on_a_gpu_never_waits_for_it():
    ours, b = collection("cuda"), batch().to("cuda")
    for strict in (False, True):
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            loss_of(ours(b)).backward()
            ours.finite()
            ours.step(0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_bad_id_on_a_gpu_is_named_at_the_next_check():
    ours = collection("cuda")
    ours(batch(items=(1, 10, 2)).to("cuda"))
    ours(batch(items=(1, -1, 2)).to("cuda"))
    with pytest.raises(UserError, match="'item', table 'items' of 10 rows: id 10 "):
        ours.check()
    ours.check()
