"""The norm kernels against the reference: on a GPU in 16 bit, in Triton's interpreter in fp32."""

import pytest
import torch

from opengem.kernels import backend
from opengem.kernels.mx.op import quantize_mx
from tests.kernels.aot import assert_barriers_apart, compile_ahead
from tests.kernels.interpret import DEVICE, DTYPES, GPU, capture, close_to, needs_kernels
from tests.kernels.norm.test_op import OURS, leaves

SHAPES = [(1, 64), (33, 384), (5, 1000), (7, 1024), (3000, 256), (2, 8192)] if GPU else [(1, 8), (33, 40), (5, 64)]


def run(call, inputs, residual, seeds, kind):
    """[y, (sum), gradients ...] of one implementation."""
    inputs = [p.detach().requires_grad_() for p in inputs]
    x, r, *wb = inputs
    with backend.force(kind):
        out = call(x, *wb, residual=r if residual else None)
        out = out if residual else (out,)
        used = inputs if residual else [x, *wb]
        return [*out, *torch.autograd.grad(out, used, [s.to(x.dtype) for s in seeds[: len(out)]])]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(0, 8), *SHAPES])
def test_matches_the_reference(shape, kind, affine, residual, dtype, poisoned_empty):
    inputs = [p.detach().to(DEVICE) for p in leaves(*shape, affine, dtype)]
    seeds = torch.randn(2, *shape, device=DEVICE)
    got, plain = (run(OURS[kind], inputs, residual, seeds, name) for name in ("triton", "reference"))
    start = [p.double() for p in inputs]
    if residual:  # the sum is rounded before it is normalised: the truth starts from the rounded sum
        start[:2] = (inputs[0] + inputs[1]).double(), torch.zeros_like(start[0])
    for a, b, c in zip(got, run(OURS[kind], start, residual, seeds.to(dtype), "reference"), plain, strict=True):
        close_to(a, b, c)


HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("implementation", ["triton", "gluon"] if HOPPER else ["triton"])
@pytest.mark.parametrize(
    "shape", [(1, 64), (33, 384), (70, 1008), (1, 1280), (64, 2048), (300, 2064), (40, 8192)] if GPU
    else [(33, 40), (64, 70), (35, 300)])
def test_fused_quantisation_equals_quantising_the_kernel_output(shape, implementation, kind, residual, dtype,
                                                                poisoned_empty):
    """Same tile arithmetic, so the same row statistics up to the order of a sum: a rounding may differ, rarely."""
    x, r, w, b = (p.detach().to(DEVICE) for p in leaves(*shape, True, dtype))
    x[0, 0] = float("nan") if shape[0] == 33 else 1
    if not residual:
        x, r = x + r, torch.zeros_like(r)
    with backend.force(implementation):
        fused = OURS[kind](x, w, b, residual=r if residual else None, quantize="e4m3")
        fused, h = fused if residual else (fused, x)
    with backend.force("triton"):
        y, total = OURS[kind](x, w, b, residual=r)
    pair = quantize_mx(y)
    assert torch.equal(h.nan_to_num(), total.nan_to_num())
    assert bool((fused.scale.int() - pair.scale.int()).abs().max() <= 1)
    assert float((fused.scale != pair.scale).double().mean()) <= 0.02
    same = fused.data.view(torch.uint8) == pair.data.view(torch.uint8)
    nan_blocks = pair.dequantize().isnan()
    assert float((~same & ~nan_blocks).double().mean()) <= (0.02 if GPU else 0.05)  # the interpreter misrounds 2 %
    assert torch.equal(fused.dequantize().isnan(), nan_blocks)


@needs_kernels
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", [100, 128, 160])
def test_rows_too_wide_for_registers_are_read_twice(width, kind, monkeypatch):
    from opengem.kernels.norm import triton

    x, r, w, b = (p.detach().to(DEVICE) for p in leaves(40, width, True, DTYPES[0]))
    with backend.force("triton"):
        whole, total = OURS[kind](x, w, b, residual=r, quantize="e4m3")
        monkeypatch.setattr(triton, "QUANTIZED_WIDTH", 32)
        monkeypatch.setattr(triton, "QUANTIZED_CHUNK", 64)
        twice, total_twice = OURS[kind](x, w, b, residual=r, quantize="e4m3")
    assert torch.equal(total, total_twice)
    assert float((whole.scale != twice.scale).double().mean()) <= 0.02
    assert float((whole.data.view(torch.uint8) != twice.data.view(torch.uint8)).double().mean()) <= 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_same_bits_every_run_no_sync_and_graph(kind):
    x, r, w, b = (p.detach().to(DEVICE) for p in leaves(5000, 512, True, torch.bfloat16))
    seeds = torch.randn(2, 5000, 512, device=DEVICE).bfloat16()
    first = run(OURS[kind], (x, r, w, b), True, seeds, "triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            for a, c in zip(first, run(OURS[kind], (x, r, w, b), True, seeds, "triton"), strict=True):
                assert a.data_ptr() != c.data_ptr()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, c in zip(first, run(OURS[kind], (x, r, w, b), True, seeds, "triton"), strict=True):
        assert torch.equal(a, c)
    eager, eager_mx = OURS[kind](x, w, b), OURS[kind](x, w, b, quantize="e4m3")
    graph, (y, mx) = capture(lambda: (OURS[kind](x, w, b), OURS[kind](x, w, b, quantize="e4m3")))
    graph.replay()
    assert torch.equal(y, eager) and torch.equal(mx.scale, eager_mx.scale)
    compiled = torch.compile(lambda x, w, b: OURS[kind](x, w, b), fullgraph=True)(x, w, b)
    assert torch.equal(compiled, y)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="the kernel is for compute capability 9.0")
@pytest.mark.parametrize("width", [256, 1024, 2048, 4096])
def test_quantised_rows_split_between_programs_have_the_same_bits_every_run(width):
    """Enough rows that clusters wait for room on a full GPU, odd numbers of tiles included."""
    for rows in (20_001, 32 * 2049):
        x = torch.randn(rows, width, device=DEVICE).bfloat16()
        first = OURS["layer"](x, quantize="e4m3")
        for _ in range(3):
            again = OURS["layer"](x, quantize="e4m3")
            assert torch.equal(first.data.view(torch.uint8), again.data.view(torch.uint8))
            assert torch.equal(first.scale, again.scale)


@pytest.mark.gpu
def test_beyond_2_to_the_31_elements():
    x = torch.zeros(2_200_000, 1024, device=DEVICE, dtype=torch.bfloat16)
    x[-40:].normal_()
    y = OURS["rms"](x)
    assert torch.equal(y[-40:], OURS["rms"](x[-40:].clone()))
    assert float(y[:-40].abs().amax()) == 0


@pytest.mark.parametrize(("kernel", "constants", "options"), [
    ("_forward_mx", {"CHUNK": 1024, "STAGES": 2, "WHOLE": True, "ASSEMBLY": True}, {"num_warps": 16, "maxnreg": 128}),
    ("_backward", {"ROWS": 2, "WIDTH": 1024, "STAGES": 3}, {"num_warps": 8}),
])
def test_compiles_ahead_of_time_with_loads_under_way(kernel, constants, options):
    wide = ["weight", "bias", "mean_out", "rstd_out", "mean_in", "rstd_in", "grad_weight", "grad_bias"]
    types = {**dict.fromkeys(["x", "residual", "total", "grad", "grad_total", "grad_x"], "*bf16"),
             **dict.fromkeys(wide, "*fp32"), "data": "*fp8e4nv", "scale": "*u8", "rows": "i32", "width": "i32",
             "eps": "fp32"}
    flags = dict.fromkeys(["CENTERED", "RESIDUAL", "WEIGHT", "BIAS"], True)
    found = compile_ahead(f"opengem.kernels.norm.triton:{kernel}", types, flags | constants, aligned=("width",),
                          **options)
    assert "cp.async" in found["ptx"] and found["spill_bytes"] <= 32


@pytest.mark.parametrize("constants", [
    {"TILES": 2, "PARTS": 1, "MEMBERS": 1, "WHOLE": True}, {"TILES": 1, "PARTS": 4, "MEMBERS": 4, "WHOLE": False},
    {"TILES": 1, "PARTS": 2, "MEMBERS": 2, "WHOLE": True, "RESIDUAL": True, "CENTERED": True, "BIAS": True},
])
def test_gluon_compiles_ahead_of_time(constants):
    types = {"?_desc": "bf16[32,256]", "weight": "*fp32", "bias": "*fp32", "data": "*fp8e4nv", "scale": "*u8",
             "total": "*bf16", "*_out": "*fp32", "rows": "i32", "width": "i32", "eps": "fp32"}
    flags = {"CENTERED": False, "RESIDUAL": False, "WEIGHT": True, "BIAS": False}
    found = compile_ahead("opengem.kernels.norm.gluon_sm90:_forward_mx", types, flags | constants, aligned=("width",),
                          num_warps=8)
    assert "cp.async.bulk.tensor" in found["ptx"] and found["spill_bytes"] == 0
    assert_barriers_apart(found)
    assert found["shared"] <= 227 * 1024 // 3 - 4096  # three programs an SM, with a box of up to 3 KB each
    clusters = constants["MEMBERS"] > 1
    assert ("st.async" in found["ptx"]) == clusters
    assert found["ptx"].count(".b8 box[") == clusters  # assembly that the compiler repeats would reserve a second box


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="the kernel is for compute capability 9.0")
def test_without_clusters_wide_rows_go_to_triton(monkeypatch):
    from opengem.kernels.norm import gluon_sm90

    x = torch.randn(70, 2048, device=DEVICE).bfloat16()
    monkeypatch.setattr(gluon_sm90, "has_clusters", lambda: False)
    fallback = OURS["rms"](x, quantize="e4m3")
    with backend.force("triton"):
        triton = OURS["rms"](x, quantize="e4m3")
    assert torch.equal(fallback.data.view(torch.uint8), triton.data.view(torch.uint8))
