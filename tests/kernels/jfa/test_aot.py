"""What the compiler makes of the kernels, without a GPU: the right instruction, shared memory that fits, no spills."""

from __future__ import annotations

import pytest

from tests.kernels.aot import assert_barriers_apart, assert_on_tensor_cores, compile_all, job

pytest.importorskip("triton")
TYPES = {"*offsets_ptr": "*i64", "records_ptr": "*i32", "scale*": "fp32"}
TYPES |= dict.fromkeys(["*lse_ptr", "delta_ptr", "sums_ptr", "*bias_ptr"], "*fp32") | {"*_ptr": "*bf16", "*": "i32"}


def portable(kernel: str, dim: int, *, capability: int = 90, pair: bool = False, causal: bool = False) -> dict:
    """job of a Triton kernel."""
    from opengem.kernels.jfa import triton

    tile = triton.config(kernel, dim, pair)
    own, stream = ("BLOCK_N", "BLOCK_M") if kernel == "dkdv" else ("BLOCK_M", "BLOCK_N")
    constants = {"GROUP": 1, "HAS_LEFT": False, "HAS_RIGHT": causal, "HEAD_DIM": dim, "BIAS": int(pair),
                 "BLOCK_D": dim, own: tile.own, stream: tile.stream}
    if not pair:
        constants |= dict.fromkeys(["bias_ptr", "pair_offsets_ptr"])
    return job(f"opengem.kernels.jfa.triton:_{kernel}_kernel", TYPES, constants, capability=capability,
               aligned=("*_stride", "*_head"), num_warps=tile.warps, num_stages=tile.stages)


def hopper(kernel: str, dim: int, *, causal: bool = False, dealt: bool = False) -> dict:
    """job of a Gluon kernel."""
    from opengem.kernels.jfa import gluon_sm90 as forward
    from opengem.kernels.jfa import gluon_sm90_backward as backward

    back = kernel == "backward"
    module, keys = (backward, backward.KEYS) if back else (forward, forward.KEYS)
    constants = {"GROUP": 1, "HAS_LEFT": False, "HAS_RIGHT": causal, "HEAD_DIM": dim, "KEYS": keys, "DEALT": dealt,
                 "ITEMS": forward.ITEMS, "QUERIES": backward.QUERIES,
                 "STAGES": backward.STAGES[dim] if back else forward.RING_ROWS[dim] // keys}
    types = {"stats_desc": f"tensordesc<fp32[2,{backward.QUERIES}],{forward.plain_layout()!r}>"}
    types |= dict.fromkeys(("q_desc", "do_desc"), f"bf16[1,1,64,{dim}]")
    types |= {"*_desc": f"bf16[1,1,{keys},{dim}]", "counters_ptr": "*i32", "scratch_ptr": "*fp32"} | TYPES
    return job(f"{module.__name__}:_{kernel}_kernel", types, constants, num_warps=8 if back else 4)


CASES = {  # name -> (function and arguments that make the job, bytes of spills allowed)
    "triton forward": (portable, ["forward", 128], {"causal": True}, 0),
    "triton dk, dv": (portable, ["dkdv", 128], {}, 64),
    "triton forward with a pair bias": (portable, ["forward", 64], {"pair": True}, 64),
    "triton forward on Blackwell": (portable, ["forward", 128], {"capability": 100}, 0),
    "gluon forward": (hopper, ["forward", 128], {}, 0),
    "gluon backward": (hopper, ["backward", 128], {}, 1024),
    "gluon backward of few queries": (hopper, ["backward", 64], {"dealt": True}, 1024),
    "gluon backward, causal": (hopper, ["backward", 64], {"causal": True}, 1024),  # none with Triton 3.6
}


@pytest.fixture(scope="module")
def found():
    jobs = [make(*arguments, **options) for make, arguments, options, _ in CASES.values()]
    return dict(zip(CASES, compile_all(jobs), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_compiles_for_the_gpu(case, found):
    assert_on_tensor_cores(found[case], CASES[case][-1])
    if case.startswith("gluon"):
        assert_barriers_apart(found[case])


def test_a_descriptor_is_what_triton_would_build():
    import torch
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from opengem.kernels.jfa.gluon_sm90 import ragged

    buffer = torch.zeros(77, 12, 64, dtype=torch.bfloat16)
    for x in (buffer, buffer[:, 4:8], torch.zeros(9, 12, 64, dtype=torch.float16)):
        box = ragged(x, 128)
        built = TensorDescriptor(x, box.shape, box.strides, box.block_shape, box.layout)
        assert box.base is x and type(box) is TensorDescriptor and vars(box) == vars(built)
        assert box.strides == [2**34 - x.stride(0), x.stride(0), x.stride(0), 1]
        assert box.shape[-1] == (x.shape[1] - 1) * x.stride(1) + 64


def test_kernels_are_not_specialised_on_numbers_that_the_key_of_a_launch_lacks():
    """A quick launch reuses a kernel for other head and row counts: 1 or a multiple of 16 must be no constant in it."""
    from opengem.kernels.jfa import gluon_sm90, gluon_sm90_backward

    known = {"scale", "scale2", "q_stride", "dout_stride", "dkv_stride"}  # floats, and strides that are in the key
    for kernel in (gluon_sm90._schedule_kernel, gluon_sm90._forward_kernel, gluon_sm90_backward._prepare_kernel,
                   gluon_sm90_backward._backward_kernel):
        numbers = [p for p in kernel.params if not p.is_constexpr and not p.name.endswith(("_ptr", "_desc"))]
        assert {p.name for p in numbers if not p.do_not_specialize} <= known, kernel
