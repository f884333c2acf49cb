"""What every memory-bound op keeps on a GPU: equal bits every run, no sync, CUDA graphs, torch.compile, and no new
kernel for a batch of another size."""

import pytest
import torch

from opengem.kernels.block.op import block_attention
from opengem.kernels.jagged_ops import op as jagged
from opengem.kernels.mx.op import quantize_mx
from opengem.kernels.norm.op import layer_norm, rms_norm
from opengem.kernels.rope.op import apply_rope, rope_tables
from opengem.kernels.swiglu.op import swiglu
from tests.kernels.grid import offsets
from tests.kernels.interpret import DEVICE, capture

LENGTHS = [100, 64, 0, 70, 3]


def randn(*shape):
    return torch.randn(shape, device=DEVICE).bfloat16().requires_grad_()


def attention(lengths, dim):
    starts, tables = offsets(lengths, DEVICE), rope_tables(128, dim, device=DEVICE)
    leaves = [randn(sum(lengths), 2, dim) for _ in range(3)]
    return lambda q, k, v: block_attention(q, k, v, starts, max_length=128, rope=tables), leaves


def rotation(lengths):
    starts, tables = offsets(lengths, DEVICE), rope_tables(128, 64, device=DEVICE)
    return lambda x: apply_rope(x, starts, *tables, max_length=128), [randn(sum(lengths), 2, 64)]


def norm(lengths, call, width, quantize=None):
    x, residual, weight = randn(sum(lengths), width), randn(sum(lengths), width), randn(width)
    if quantize is None:
        return lambda x, w, r: call(x, w, residual=r)[0], [x, weight, residual]
    return lambda x: call(x, quantize=quantize).data.view(torch.uint8), [x.detach()]


def gathered(lengths, often):
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = sum(lengths)
    index = (torch.randint(0, rows, (4 * rows,), device=DEVICE, generator=generator) if often
             else torch.randperm(rows, device=DEVICE, generator=generator))
    return lambda x: jagged.gather_rows(x, index), [randn(rows, 96)]


def with_starts(lengths, call, *shapes):
    starts = offsets(lengths, DEVICE)
    return lambda *leaves: call(*leaves, starts), [randn(*shape) for shape in shapes]


CASES = {
    "block_64": lambda n: attention(n, 64),
    "block_128": lambda n: attention(n, 128),
    "rope": rotation,
    "rms_norm": lambda n: norm(n, rms_norm, 512),
    "layer_norm": lambda n: norm(n, layer_norm, 1000),
    "rms_norm_mx": lambda n: norm(n, rms_norm, 512, "e4m3"),
    "rms_norm_mx_wide": lambda n: norm(n, rms_norm, 4096, "e4m3"),
    "swiglu": lambda n: (swiglu, [randn(sum(n), 256)]),
    "mx": lambda n: (lambda x: quantize_mx(x).data.view(torch.uint8), [randn(sum(n), 256).detach()]),
    "to_padded": lambda n: with_starts(n, lambda x, o: jagged.jagged_to_padded(x, o, 128), (sum(n), 96)),
    "to_jagged": lambda n: with_starts(n, lambda p, o: jagged.padded_to_jagged(p, o, sum(n)), (len(n), 128, 96)),
    "concat": lambda n: with_starts(n, lambda a, b, o: jagged.concat_jagged(a, b, o, o)[0], (sum(n), 96), (sum(n), 96)),
    "split": lambda n: with_starts(n, lambda x, o: jagged.split_jagged(x, o, o, sum(n))[0], (2 * sum(n), 96)),
    "gather_once": lambda n: gathered(n, often=False),
    "gather_often": lambda n: gathered(n, often=True),
    "broadcast_add": lambda n: with_starts(n, jagged.broadcast_add, (sum(n), 96), (len(n), 96)),
    "dense_bmm": lambda n: with_starts(n, lambda x, w, o: jagged.jagged_dense_bmm(x, w, o, max_length=128),
                                       (sum(n), 96), (len(n), 96, 80)),
}


def step(call, leaves):
    """Output and gradients, detached: a graph kept alive would tie gradients to the stream of its first run."""
    out = call(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out, wanted, torch.ones_like(out)) if wanted else ())]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_same_bits_without_a_sync_in_a_graph_and_compiled(name):
    torch.manual_seed(0)
    call, leaves = CASES[name](LENGTHS)
    want = step(call, leaves)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step(call, leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(call, leaves)
    torch.cuda.synchronize()
    graph, captured = capture(lambda: step(call, leaves))
    graph.replay()
    graph.replay()
    compiled = torch.compile(call, fullgraph=True)(*leaves)
    for a, b, c in zip(want, again, captured, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert torch.equal(compiled, want[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_other_batch_sizes_compile_nothing(name):
    """Row and sample counts are ordinary arguments: after the first batches no launch takes Triton's slow way."""
    from opengem.kernels import launch

    torch.manual_seed(0)
    for lengths in (LENGTHS, [64] * 16):
        step(*CASES[name](lengths))
    known = set(launch._starters)
    for lengths in ([5, 1], [3, 9, 1], [64, 64], [1] * 33, [100] * 7, [17]):
        step(*CASES[name](lengths))
    assert set(launch._starters) == known
