"""Kernels for jagged histories: `from opengem.kernels import jagged_flash_attention`.

Every op is a folder: `reference.py` (the definition), `triton.py` and `gluon_sm90.py` (fast, loaded when first run),
`op.py` (the public function), `cost.py` (FLOPs and bytes). `backend.py` says which implementation runs where.
"""

from opengem.kernels.block.op import block_attention
from opengem.kernels.gdpa.op import gdpa
from opengem.kernels.jagged_ops.op import (
    broadcast_add,
    concat_jagged,
    gather_rows,
    jagged_dense_bmm,
    jagged_to_padded,
    padded_to_jagged,
    split_jagged,
)
from opengem.kernels.jfa.op import PairBias, RelativeBias, jagged_flash_attention
from opengem.kernels.mx.op import quantize_mx
from opengem.kernels.norm.op import layer_norm, rms_norm
from opengem.kernels.rope.op import apply_rope, rope_tables
from opengem.kernels.swiglu.op import swiglu

__all__ = [
    "PairBias",
    "RelativeBias",
    "apply_rope",
    "block_attention",
    "broadcast_add",
    "concat_jagged",
    "gather_rows",
    "gdpa",
    "jagged_dense_bmm",
    "jagged_flash_attention",
    "jagged_to_padded",
    "layer_norm",
    "padded_to_jagged",
    "quantize_mx",
    "rms_norm",
    "rope_tables",
    "split_jagged",
    "swiglu",
]
