"""The attention modules against the plain formulas they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from opengem.jagged import Jagged
from opengem.kernels.norm.op import layer_norm
from opengem.model.attention import (
    ContextAttention,
    SeedPooling,
    SelfAttention,
    SplitHeads,
    SumKron,
    _linear_on,
    rotate,
    rotation,
)
from opengem.model.blocks import StreamLayer, StreamState, newest
from tests.model.sample import SMALL

STREAM = replace(SMALL.streams[0], dim=16, heads=2)


def history(lengths: list[int], dim: int = 16) -> Jagged:
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return Jagged.from_lengths(torch.randn(sum(lengths), dim), sizes, max(lengths, default=0))


def same_weights(module, other):
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("joined", [True, False])
def test_gradients_of_split_heads_are_joined_and_not_copied_where_they_lie_side_by_side(joined):
    x = torch.randn(5, 6, 4, requires_grad=True)
    parts = SplitHeads.apply(x, 3)
    wanted = torch.randn(5, 3, 2, 4)
    grads = wanted.unbind(1) if joined else [part.clone() for part in wanted.unbind(1)]
    (grad,) = torch.autograd.grad(parts, x, grads)
    assert torch.equal(grad, wanted.flatten(1, 2))
    assert (grad.data_ptr() == wanted.data_ptr()) == joined


def test_block_attention_is_full_attention_of_each_block():
    x = history([5, 0, 10, 4])
    block = SelfAttention(replace(STREAM, attention="block", window=4))
    full = same_weights(block, SelfAttention(replace(STREAM, attention="full")))
    pieces = Jagged.from_lengths(x.values, torch.tensor([4, 1, 0, 4, 4, 2, 4]), 4)
    torch.testing.assert_close(block(x, None).values, full(pieces, None).values)


def test_block_window_and_full_attention_agree_where_all_see_all():
    """Up to 64 events a 64-block, a window of 63 to each side and no mask let the same pairs through."""
    x = history([64, 0, 3, 17])
    block = SelfAttention(replace(STREAM, attention="block", window=64))
    window = same_weights(block, SelfAttention(replace(STREAM, attention="window", window=63)))
    full = same_weights(block, SelfAttention(replace(STREAM, attention="full")))
    lengths = x.lengths.tolist()
    for other in (window, full):
        torch.testing.assert_close(block(x, None).values, other(x, None).values)
        assert block.flops(lengths) == other.flops(lengths)


def test_window_reaches_across_what_would_be_a_block_edge():
    x = history([8])
    changed = x.with_values(x.values.index_put((torch.tensor([4]),), torch.ones(16)))
    for kind, moves in (("block", False), ("window", True)):
        attention = SelfAttention(replace(STREAM, attention=kind, window=4))
        difference = (attention(changed, None).values - attention(x, None).values).abs().sum(1)
        assert (difference[3] > 0) == moves


def test_rotation_restarts_in_every_sample():
    """K13: in lengths [2, 2] the third row stands at position 0 again."""
    x = history([2, 2], dim=8)
    angles = rotation(x, torch.zeros(4), 8, positions=True, time=False)
    rows = x.values.unflatten(1, (1, 8))
    turned = rotate(rows, x, angles)
    torch.testing.assert_close(turned[2], rows[2])
    assert not torch.allclose(turned[3], rows[3])
    alone = history([2], dim=8).with_values(x.values[2:])
    torch.testing.assert_close(rotate(rows[2:], alone, rotation(alone, torch.zeros(2), 8, positions=True, time=False)),
                               turned[2:])  # fmt: skip


def test_fused_rotation_is_that_of_the_rows():
    """Positions alone are rotated inside the block kernel; the same angles row by row give the same output."""
    x = history([5, 0, 10, 4])
    module = SelfAttention(replace(STREAM, attention="block", window=4))
    fused = rotation(x, torch.zeros(19), 8, positions=True, time=False)
    rows = rotation(x, torch.zeros(19), 8, positions=True, time=True)
    assert fused.by_position and not rows.by_position
    torch.testing.assert_close(module(x, fused).values, module(x, rows).values, atol=1e-5, rtol=1e-4)


def test_rotation_depends_on_differences_alone():
    x = history([6], dim=8)
    q, k = torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    gap = torch.rand(6)
    scores = []
    for shift in (0.0, 2.0):
        angles = rotation(x, gap + shift, 8, positions=True, time=True)
        scores.append(torch.einsum("ihd,jhd->ij", rotate(q, x, angles), rotate(k, x, angles)))
    torch.testing.assert_close(*scores)
    assert rotation(x, gap, 8, positions=False, time=False) is None


def test_context_attention_with_identity_is_a_generated_linear_map():
    """GDPA without activation == the PFFN of InterFormer with factored weights: W = scale * sum_n K_nᵀ V_n."""
    x, summary = history([5, 0, 3]), torch.randn(3, SMALL.num_summary, SMALL.dim)
    module = ContextAttention(STREAM, replace(SMALL, activation="identity"))
    k, v = (part.unflatten(0, (3, SMALL.num_kv)) for part in module.context(summary))
    weight = torch.einsum("bnhi,bnhj->bhij", k, v) * 8**-0.5
    h = layer_norm(x.values)
    q = module.query(h).unflatten(1, (2, 8))
    out = torch.einsum("thi,thij->thj", q, weight[x.row_to_sample]).flatten(1)
    update, inner = module(x.with_values(h), summary)
    torch.testing.assert_close(update, module.out(out))
    assert torch.equal(inner, h)


def test_sumkron_is_the_dense_map_of_its_kronecker_products():
    module, x = SumKron(5, 3, 4, 2, rank=2), torch.randn(6, 5, 4)
    terms = zip(module.tokens, module.channels, strict=True)
    dense = sum(torch.kron(z.T.contiguous(), w.T.contiguous()) for z, w in terms)
    wanted = (x.flatten(1) @ dense.T).unflatten(1, (3, 2))
    torch.testing.assert_close(module(x), wanted)
    assert module.tokens.numel() + module.channels.numel() == 2 * (5 * 3 + 4 * 2)


def test_pooling_averages_and_counting_heads_count():
    """Softmax cannot tell a history from the same history twice; counting heads can."""
    once, candidate = history([4]), torch.randn(1, SMALL.dim)
    twice = Jagged.from_lengths(once.values.repeat(2, 1), torch.tensor([8]), 8)
    averaging = SeedPooling(STREAM, replace(SMALL, counting_heads=0))
    torch.testing.assert_close(averaging(once, candidate)[0], averaging(twice, candidate)[0])
    counting = SeedPooling(STREAM, replace(SMALL, counting_heads=1))
    assert (counting(once, candidate)[0] - counting(twice, candidate)[0]).abs().max() > 1e-3


def test_pooling_asks_for_the_candidate():
    x = history([6, 6])
    x = x.with_values(x.values[:6].repeat(2, 1))
    pooled, _ = SeedPooling(STREAM, SMALL)(x, torch.randn(2, SMALL.dim))
    assert (pooled[0] - pooled[1]).abs().max() > 1e-3


def test_pooling_of_an_empty_history_is_a_constant():
    pooled, _ = SeedPooling(STREAM, SMALL)(history([0, 0, 3]), torch.randn(3, SMALL.dim))
    torch.testing.assert_close(pooled[0], pooled[1])
    assert pooled.isfinite().all()


def test_newest_events_come_first_and_missing_ones_are_zero():
    x = Jagged.from_list([[[1.0], [2.0], [3.0]], torch.zeros(0, 1), [[4.0]]])
    assert newest(x, 2)[1][..., 0].tolist() == [[3, 2], [0, 0], [4, 0]]
    assert newest(history([0, 0]), 3)[1].shape == (2, 3, 16)


@pytest.mark.parametrize("used", ["events", "newest", "both"])
def test_the_gradient_of_the_newest_events_is_added_to_that_of_all(used):
    x = history([3, 0, 1])
    weights = torch.randn(4, 16), torch.randn(3, 2, 16)
    exists = torch.tensor([[1.0, 1], [0, 0], [1, 0]])[..., None]
    grads = []
    for chosen in (newest, lambda x, _: (x, x.values[torch.tensor([[2, 1], [0, 0], [3, 0]])] * exists)):
        values = x.values.clone().requires_grad_()
        events, recent = chosen(x.with_values(values), 2)
        parts = {"events": (events.values * weights[0]).sum(), "newest": (recent * weights[1]).sum()}
        (sum(parts.values()) if used == "both" else parts[used]).backward()
        grads.append(values.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("lengths", [[5, 0, 9], [0], []])
def test_full_layer_is_context_then_self_attention(lengths):
    """Nothing is skipped by F: it does what a G layer and then an S layer with its weights would do."""
    full = StreamLayer("F", STREAM, SMALL)
    first, second = StreamLayer("G", STREAM, SMALL), StreamLayer("S", STREAM, SMALL)
    first.summary, first.context, second.attention = full.summary, full.context, full.attention
    summary = torch.randn(len(lengths), SMALL.num_summary, SMALL.dim)
    candidate = torch.randn(len(lengths), SMALL.dim)
    x = history(lengths)
    state = StreamState(x, x.map(layer_norm), None)
    step = first(first.pool(state, candidate), summary)
    kept = second.pool(step, candidate)
    assert kept.summary is step.summary
    wanted, got = second(kept, summary), full(full.pool(state, candidate), summary)
    assert torch.equal(got.events.values, wanted.events.values)
    assert torch.equal(got.summary, wanted.summary)
    both = first.flops(lengths), second.flops(lengths)
    assert full.flops(lengths) == both[0] | both[1]


@pytest.mark.parametrize("used", ["product", "input", "both"])
def test_a_product_is_added_to_the_gradient_of_the_next_reader(used):
    layer, values = torch.nn.Linear(4, 6, bias=False), torch.randn(5, 4)
    grads = []
    for function in (_linear_on, lambda layer, x: (layer(x), x)):
        x = values.clone().requires_grad_()
        product, handed_on = function(layer, x)
        parts = {"product": product.square().sum(), "input": (handed_on * handed_on).sum()}
        loss = parts["product"] + parts["input"] if used == "both" else parts[used]
        grads.append(torch.autograd.grad(loss, [x, layer.weight], allow_unused=True))
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
