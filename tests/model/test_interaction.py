"""The feature side: experts, summaries and attention to earlier layers."""

from __future__ import annotations

import torch

from opengem.kernels.norm.op import layer_norm
from opengem.model.heads import Head
from opengem.model.interaction import CrossLayerAttention, Experts, TokenMix, WeightGeneration, WukongExpert


def test_experts_share_out_every_token_once():
    experts = Experts(7, 3, 4, 2, 2, 3, 8)
    x = torch.arange(7.0)[None, :, None].expand(2, 7, 4)
    parts = experts.partition(x)
    assert [part[0, :, 0].tolist() for part in parts] == [[0, 3, 6], [1, 4, 0], [2, 5, 0]]
    assert experts(x).shape == (2, 12, 4)


def test_an_expert_sees_its_own_partition_only():
    experts = Experts(6, 2, 4, 2, 2, 3, 8)
    x = torch.randn(1, 6, 4)
    changed = x.clone()
    changed[0, 1] += 1.0
    a, b = experts(x), experts(changed)
    assert torch.equal(a[:, :4], b[:, :4]) and not torch.allclose(a[:, 4:], b[:, 4:])


def test_factorisation_machine_is_the_product_of_all_token_pairs():
    """X (Xᵀ Y) == (X Xᵀ) Y: every pair of tokens, without the n x n matrix."""
    expert, x = WukongExpert(5, 8, 3, 2, 4, 16), torch.randn(3, 5, 8)
    pairs = x @ x.transpose(1, 2) @ expert.project.weight.T
    fm = expert.outer(torch.nn.functional.gelu(expert.inner(layer_norm(pairs.flatten(1))))).unflatten(1, (3, 8))
    wanted = layer_norm(torch.cat([fm, expert.linear(x)], 1) + expert.shortcut(x))
    torch.testing.assert_close(expert(x), wanted)


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
