"""The feature side: experts, summaries and attention to earlier layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from opengem.kernels.norm.op import layer_norm
from opengem.model.heads import Head
from opengem.model.interaction import CrossLayerAttention, Experts, TokenMix, WeightGeneration


def test_experts_share_out_every_token_once():
    experts = Experts(7, 3, 4, 2, 2, 3, 8)
    x = torch.arange(1.0, 8.0)[None, :, None].expand(2, 7, 4)
    parts = experts.partition(list(x.split([5, 2], 1))).unflatten(0, (3, 2))
    assert [part[0, :, 0].tolist() for part in parts] == [
        [1, 4, 7, 0, 0, 0, 0, 0], [2, 5, 0, 0, 0, 0, 0, 0], [3, 6, 0, 0, 0, 0, 0, 0]]  # fmt: skip
    assert experts([x]).shape == (2, 12, 4) and experts([x[:0]]).shape == (0, 12, 4)


def test_tokens_are_dealt_out_as_by_a_join_and_a_change_of_layout():
    for experts, sizes in ((2, (32, 18, 18)), (4, (128, 36, 36)), (2, (32, 17, 18)), (3, (4, 3, 3))):
        each, parts = Experts(sum(sizes), experts, 8, 2, 2, 3, 8), [torch.randn(3, n, 8) for n in sizes]
        given, joined = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
        got = each.partition(given)
        zeros = torch.zeros(3, got.shape[1] * experts - sum(sizes), 8)
        want = torch.cat([*joined, zeros], 1).unflatten(1, (-1, experts)).permute(2, 0, 1, 3).flatten(0, 1)
        assert torch.equal(got, want)
        weights = torch.randn_like(got)
        for a, b in zip(*(torch.autograd.grad((x * weights).sum(), y) for x, y in ((got, given), (want, joined))),
                        strict=True):
            assert torch.equal(a, b)


def test_an_expert_sees_its_own_partition_only():
    experts = Experts(6, 2, 4, 2, 2, 3, 8)
    x = torch.randn(1, 6, 4)
    changed = x.clone()
    changed[0, 1] += 1.0
    a, b = experts([x]), experts([changed])
    assert torch.equal(a[:, :4], b[:, :4]) and not torch.allclose(a[:, 4:], b[:, 4:])


def test_factorisation_machine_is_the_product_of_all_token_pairs():
    """X (Xᵀ Y) == (X Xᵀ) Y: every pair of tokens, without the n x n matrix; expert by expert."""
    experts, x = Experts(9, 2, 8, 3, 2, 4, 16), torch.randn(3, 9, 8)
    found = []
    for i, own in enumerate((x[:, ::2], torch.cat([x[:, 1::2], torch.zeros(3, 1, 8)], 1))):
        pairs = own @ own.transpose(1, 2) @ experts.project[i].T
        bias = experts.inner_bias.view(2, -1)[i], experts.outer_bias.view(2, -1)[i]
        hidden = F.gelu(F.linear(layer_norm(pairs.flatten(1)), experts.inner[i].T, bias[0]))
        fm = F.linear(hidden, experts.outer[i].T, bias[1]).unflatten(1, (3, 8))
        found.append(layer_norm(torch.cat([fm, experts.linear[i] @ own], 1) + experts.shortcut[i] @ own))
    torch.testing.assert_close(experts([x]), torch.cat(found, 1))


def test_a_closed_gate_hides_the_earlier_layers():
    attention, x = CrossLayerAttention(8, 2), torch.randn(3, 5, 8)
    assert torch.equal(attention(x, torch.randn(3, 4, 8)), x)
    with torch.no_grad():
        attention.gate.fill_(1.0)
    assert not torch.allclose(attention(x, torch.randn(3, 4, 8)), x)


def test_shapes_of_summary_and_token_mix():
    assert TokenMix(5, 3)(torch.randn(2, 5, 8)).shape == (2, 3, 8)
    assert WeightGeneration(5, 3, 8)(torch.randn(2, 5, 8)).shape == (2, 3, 8)
    assert WeightGeneration(5, 3, 8)(torch.randn(0, 5, 8)).shape == (0, 3, 8)


def test_head_starts_near_even_odds():
    logits = Head(40, 16)(torch.randn(100, 40) * 10)
    assert logits.shape == (100,) and logits.abs().max() < 0.2
