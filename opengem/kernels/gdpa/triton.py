"""GDPA in Triton: forward, and a backward without atomics. Read `reference.py` first; launched by `launch.py`.

Rows of K and V behind a sample's end are loaded as 0. Every activation is 0 at 0, so such a key has score 0, weight 0
and no gradient: nothing in these kernels masks a score.

Two families, chosen by the longest query:
- wide (`max_q > 64`): a program owns a query tile and walks the keys (`wide_fwd`, `wide_dq`), or owns a key tile and
  walks the queries (`wide_dkdv`, which computes S^T directly, so that no product is transposed through registers).
- narrow (`max_q <= 64`, pooling by seeds): a program owns a run of CHUNK keys of one sample, holds all its queries and
  walks the keys once, forward and backward. Products are transposed (S^T = K Q^T, O^T = V^T P^T): keys and the head
  dimension fill the rows of the matrix unit, not the few queries.

Which tiles exist is written by `deal_tiles` on the device, longest work first. The grid is bounded on the host by
`ceil(rows / tile) + B` tiles; programs left over set to 0 the rows that no sample owns.
"""

import triton
import triton.language as tl

from opengem.kernels.gdpa import activations

POLY_CLAMP = tl.constexpr(activations.POLY_CLAMP)
P0, P1, P2, P3, P4, P5 = (tl.constexpr(c) for c in activations.POLY)
T2, T4, T6 = (tl.constexpr(c) for c in activations.TAYLOR)
TANH_A = tl.constexpr(activations.TANH_A)
TANH_AB = tl.constexpr(activations.TANH_A * activations.TANH_B)
LEAKY = tl.constexpr(activations.LEAKY_SLOPE)
# erfc(z) = e^(-z^2) t (E1 + ... + E5 t^4), t = 1 / (1 + E0 z): Abramowitz and Stegun 7.1.26, error 1.5e-7
E0, E1, E2 = tl.constexpr(0.3275911 * 0.5**0.5), tl.constexpr(0.254829592), tl.constexpr(-0.284496736)
E3, E4, E5 = tl.constexpr(1.421413741), tl.constexpr(-1.453152027), tl.constexpr(1.061405429)
DENSITY = tl.constexpr(0.3989422804014327)


# ---- activations -------------------------------------------------------------------------------------------------


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    """One MUFU instruction where FAST (relative error 2^-11); else exact to fp32 and free of inf / inf."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _normal(x, FAST: tl.constexpr):
    """(distribution function of the normal law, exp(-x^2 / 2)), without the branches of a library erf."""
    bell = tl.exp(-0.5 * x * x)
    w = tl.abs(x) * E0 + 1.0
    if FAST:
        t = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [w], dtype=tl.float32, is_pure=True, pack=1)
    else:
        t = 1.0 / w
    tail = (t * bell) * (E1 + t * (E2 + t * (E3 + t * (E4 + t * E5)))) * 0.5
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def act_both(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """(value, derivative); what is not used is removed by the compiler."""
    if ACT == "gelu":
        cdf, bell = _normal(x, FAST)
        return x * cdf, cdf + x * bell * DENSITY
    elif ACT == "gelu_tanh":
        u = x * x
        t = _tanh(x * (TANH_A + TANH_AB * u), FAST)
        h = 0.5 * x
        half = 0.5 + 0.5 * t
        return x * half, half + (h - h * t * t) * (TANH_A + 3.0 * TANH_AB * u)
    elif ACT == "gelu_poly":
        c = tl.minimum(tl.maximum(x, -POLY_CLAMP), POLY_CLAMP)
        u = c * c
        p = P0 + u * (P1 + u * (P2 + u * (P3 + u * (P4 + u * P5))))
        d = 2.0 * P0 + u * (4.0 * P1 + u * (6.0 * P2 + u * (8.0 * P3 + u * (10.0 * P4 + u * (12.0 * P5)))))
        return x * (0.5 + c * p), 0.5 + c * d
    elif ACT == "gelu_taylor6":
        u = x * x
        return x * 0.5 + u * (T2 + u * (T4 + u * T6)), 0.5 + x * (2.0 * T2 + u * (4.0 * T4 + u * (6.0 * T6)))
    elif ACT == "silu":
        h = 0.5 * x
        sigmoid = 0.5 + 0.5 * _tanh(h, FAST)
        return x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid)
    elif ACT == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    elif ACT == "relu2":
        r = tl.maximum(x, 0.0)
        return r * r, 2.0 * r
    elif ACT == "leaky_relu":
        return tl.maximum(x, x * LEAKY), tl.where(x > 0, 1.0, LEAKY)
    elif ACT == "hardswish":
        gate = tl.minimum(tl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
        inner = tl.where(x < 3.0, (2.0 * x + 3.0) / 6.0, 1.0)
        return x * gate, tl.where(x > -3.0, inner, 0.0)
    else:
        tl.static_assert(ACT == "identity")
        return x, x * 0.0 + 1.0


@triton.jit
def act_value(x, ACT: tl.constexpr, FAST: tl.constexpr):
    value, _ = act_both(x, ACT, FAST)
    return value


# ---- which tiles exist -------------------------------------------------------------------------------------------


@triton.jit
def _lengths(offsets, samples, batch, SEEDS: tl.constexpr):
    """Lengths of `samples`, 0 past the batch; SEEDS > 0 is the length of every sample."""
    live = samples < batch
    if SEEDS > 0:
        return tl.where(live, SEEDS, 0)
    else:
        begin = tl.load(offsets + samples, mask=live, other=0)
        end = tl.load(offsets + samples + 1, mask=live, other=0)
        return (end - begin).to(tl.int32)


@triton.jit
def _tile_counts(offsets, samples, batch, TILE: tl.constexpr, LEAST: tl.constexpr, SEEDS: tl.constexpr):
    count = tl.maximum(tl.cdiv(_lengths(offsets, samples, batch, SEEDS), TILE), LEAST)
    return tl.where(samples < batch, count, 0)


@triton.jit
def _spans(offsets, samples, batch, SEEDS: tl.constexpr):
    """First rows of `samples`, int32 (no tensor here has 2^31 rows)."""
    if SEEDS > 0:
        return samples * SEEDS
    else:
        return tl.load(offsets + samples, mask=samples < batch, other=0).to(tl.int32)


@triton.jit
def _deal(
    rows, other, work, count_ptr, list_ptr, places_ptr, batch, TILE: tl.constexpr, LEAST: tl.constexpr,
    ROW_SEEDS: tl.constexpr, OTHER_SEEDS: tl.constexpr, WORK_SEEDS: tl.constexpr, OWN: tl.constexpr,
    AT_ONCE: tl.constexpr, NARROW: tl.constexpr, PLACES: tl.constexpr,
):
    """List every tile of `rows`, samples with much `work` first, equal ones in order.

    A record is (first row, rows left in the sample, first row and length of the sample in `other`), for narrow kernels
    (first row, rows left, sample, 0). A sample has at least LEAST tiles and starts where the tiles of all samples ahead
    of it end; each program counts those for OWN samples, AT_ONCE at a time. With PLACES, records of 2 at `places_ptr`:
    the number of the tile in its sample, and where 64-row tiles of the sample's rows in `other` begin, if each sample
    has its own.
    """
    samples = tl.program_id(0) * OWN + tl.arange(0, OWN)
    mine = _lengths(work, samples, batch, WORK_SEEDS)
    start = tl.zeros([OWN], tl.int32)
    total = tl.zeros([AT_ONCE], tl.int32)
    for first in range(0, batch, AT_ONCE):
        others = first + tl.arange(0, AT_ONCE)
        theirs = _lengths(work, others, batch, WORK_SEEDS)
        tiles = _tile_counts(rows, others, batch, TILE, LEAST, ROW_SEEDS)
        ahead = (theirs[None, :] > mine[:, None]) | (
            (theirs[None, :] == mine[:, None]) & (others[None, :] < samples[:, None])
        )
        start += tl.sum(tl.where(ahead, tiles[None, :], 0), 1)
        total += tiles
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.sum(total, 0))
    tiles = _tile_counts(rows, samples, batch, TILE, LEAST, ROW_SEEDS)
    begin = _spans(rows, samples, batch, ROW_SEEDS)
    length = _lengths(rows, samples, batch, ROW_SEEDS)
    third, fourth = samples, samples * 0
    if not NARROW:
        third = _spans(other, samples, batch, OTHER_SEEDS)
        fourth = _lengths(other, samples, batch, OTHER_SEEDS)
    for first in range(0, tl.max(tiles, 0), 16):
        t = first + tl.arange(0, 16)
        live = t[None, :] < tiles[:, None]
        slot = list_ptr + 4 * (start[:, None] + t[None, :])
        tl.store(slot, begin[:, None] + t[None, :] * TILE, mask=live)
        tl.store(slot + 1, length[:, None] - t[None, :] * TILE, mask=live)
        tl.store(slot + 2, tl.broadcast_to(third[:, None], (OWN, 16)), mask=live)
        tl.store(slot + 3, tl.broadcast_to(fourth[:, None], (OWN, 16)), mask=live)
        if PLACES:
            place = places_ptr + 2 * (start[:, None] + t[None, :])
            tl.store(place, tl.broadcast_to(t[None, :], (OWN, 16)), mask=live)
            tl.store(place + 1, tl.broadcast_to((third // 64 + samples)[:, None], (OWN, 16)), mask=live)


@triton.jit(do_not_specialize=["batch", "q_bound", "kv_bound"])
def deal_tiles(
    q_offsets, kv_offsets, schedule, batch, q_bound, kv_bound, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    SEEDS: tl.constexpr, NARROW: tl.constexpr, OWN: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """schedule: int32 [4 + 4 * (q_bound + kv_bound + batch) + 2 * kv_bound]: three counts, records of 4, places.

    Grid (ceil(batch / OWN), 3): query tiles by keys to walk, key tiles by queries to walk, whole samples by queries.
    A sample has at least one key tile. Narrow kernels use the key tiles only.
    """
    kv_list = schedule + 4 + 4 * q_bound
    if NARROW:
        if tl.program_id(1) == 1:
            _deal(kv_offsets, q_offsets, kv_offsets, schedule + 1, kv_list, kv_list, batch, KV_TILE, 1, 0, SEEDS, 0,
                  OWN, AT_ONCE, NARROW, False)
    elif tl.program_id(1) == 0:
        _deal(q_offsets, kv_offsets, kv_offsets, schedule, schedule + 4, kv_list, batch, Q_TILE, 0, SEEDS, 0, 0, OWN,
              AT_ONCE, NARROW, False)
    elif tl.program_id(1) == 1:
        _deal(kv_offsets, q_offsets, q_offsets, schedule + 1, kv_list, kv_list + 4 * (kv_bound + batch), batch, KV_TILE,
              1, 0, SEEDS, SEEDS, OWN, AT_ONCE, NARROW, True)
    else:
        whole: tl.constexpr = 1 << 30
        _deal(q_offsets, kv_offsets, q_offsets, schedule + 2, kv_list + 4 * kv_bound, kv_list, batch, whole, 1, SEEDS,
              0, SEEDS, OWN, AT_ONCE, NARROW, False)


# ---- pieces of every kernel --------------------------------------------------------------------------------------


@triton.jit
def _bounds(offsets, sample, SEEDS: tl.constexpr):
    """(first row, length) of a sample; with SEEDS > 0 it owns SEEDS rows from sample * SEEDS on."""
    if SEEDS > 0:
        return sample.to(tl.int64) * SEEDS, SEEDS
    else:
        begin = tl.load(offsets + sample).to(tl.int64)
        return begin, (tl.load(offsets + sample + 1) - begin).to(tl.int32)


@triton.jit
def _record(entry):
    """The four numbers of a record; rows as int64."""
    row, left = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    return row, left, tl.load(entry + 2).to(tl.int64), tl.load(entry + 3)


@triton.jit
def _tile(stride, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Element offsets of a [ROWS, DP] tile."""
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, DP)[None, :]


@triton.jit
def _load(pointers, rows_left, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """A [ROWS, DP] tile with 0 behind `rows_left` rows and D columns."""
    live = (tl.arange(0, ROWS) < rows_left)[:, None]
    if D != DP:
        live = live & (tl.arange(0, DP) < D)[None, :]
    return tl.load(pointers, mask=live, other=0.0)


@triton.jit
def _store(pointers, value, rows_left, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    live = (tl.arange(0, ROWS) < rows_left)[:, None]
    if D != DP:
        live = live & (tl.arange(0, DP) < D)[None, :]
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=live)


@triton.jit
def _zero_tail(x, spare, offsets, batch, rows, head, H, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Set to 0 the `spare`-th tile of the rows of contiguous x [rows, H, D] that lie behind the last offset."""
    first = tl.load(offsets + batch).to(tl.int64) + spare.to(tl.int64) * TILE
    STEP: tl.constexpr = 64 if TILE > 64 else TILE
    unowned = tl.minimum(tl.maximum(rows - first, 0), TILE).to(tl.int32)
    for shift in range(0, unowned, STEP):
        pointers = x + (first + shift) * H * D + head * D + _tile(H * D, STEP, D, DP)
        _store(pointers, tl.zeros([STEP, DP], tl.float32), unowned - shift, STEP, D, DP)


# ---- wide --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["batch", "q_rows"])
def wide_fwd(
    q, k, v, out, q_offsets, kv_offsets, schedule, batch, q_rows, scale, H, q_row, q_head, k_row, k_head, v_row,
    v_head, ACT: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, SEEDS: tl.constexpr):
    """out [rows, H, D] contiguous, one query tile and head a program."""
    item, head = tl.program_id(0) // H, tl.program_id(0) % H
    count = tl.load(schedule)
    if item >= count:
        if SEEDS == 0:
            _zero_tail(out, item - count, q_offsets, batch, q_rows, head, H, BM, D, DP)
        return
    row, left, kv_begin, kv_length = _record(schedule + 4 + 4 * item)
    q_from = row % SEEDS if SEEDS > 0 else row
    q_tile = _load(q + q_from * q_row + head * q_head + _tile(q_row, BM, D, DP), left, BM, D, DP)
    k_pointers = k + kv_begin * k_row + head * k_head + _tile(k_row, BN, D, DP)
    v_pointers = v + kv_begin * v_row + head * v_head + _tile(v_row, BN, D, DP)
    acc = tl.zeros([BM, DP], tl.float32)
    for start in range(0, kv_length, BN):
        k_tile = _load(k_pointers, kv_length - start, BN, D, DP)
        s = tl.dot(q_tile, k_tile.T)
        p = act_value(s * scale, ACT, FAST).to(v.dtype.element_ty)
        v_tile = _load(v_pointers, kv_length - start, BN, D, DP)
        acc = tl.dot(p, v_tile, acc)
        k_pointers += BN * k_row
        v_pointers += BN * v_row
    _store(out + row * H * D + head * D + _tile(H * D, BM, D, DP), acc, left, BM, D, DP)


@triton.jit(do_not_specialize=["batch", "q_rows"])
def wide_dq(
    grad, q, k, v, dq, q_offsets, kv_offsets, schedule, batch, q_rows, scale, H, g_row, g_head, q_row, q_head, k_row,
    k_head, v_row, v_head, ACT: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, SEEDS: tl.constexpr):
    """dq [rows, H, D] contiguous (one copy a sample with shared queries), one query tile and head a program."""
    item, head = tl.program_id(0) // H, tl.program_id(0) % H
    count = tl.load(schedule)
    if item >= count:
        if SEEDS == 0:
            _zero_tail(dq, item - count, q_offsets, batch, q_rows, head, H, BM, D, DP)
        return
    row, left, kv_begin, kv_length = _record(schedule + 4 + 4 * item)
    q_from = row % SEEDS if SEEDS > 0 else row
    q_tile = _load(q + q_from * q_row + head * q_head + _tile(q_row, BM, D, DP), left, BM, D, DP)
    g_tile = _load(grad + row * g_row + head * g_head + _tile(g_row, BM, D, DP), left, BM, D, DP)
    k_pointers = k + kv_begin * k_row + head * k_head + _tile(k_row, BN, D, DP)
    v_pointers = v + kv_begin * v_row + head * v_head + _tile(v_row, BN, D, DP)
    acc = tl.zeros([BM, DP], tl.float32)
    for start in range(0, kv_length, BN):
        k_tile = _load(k_pointers, kv_length - start, BN, D, DP)
        v_tile = _load(v_pointers, kv_length - start, BN, D, DP)
        s = tl.dot(q_tile, k_tile.T)
        dp = tl.dot(g_tile, v_tile.T)
        _, slope = act_both(s * scale, ACT, FAST)
        acc = tl.dot((dp * slope).to(k.dtype.element_ty), k_tile, acc)
        k_pointers += BN * k_row
        v_pointers += BN * v_row
    _store(dq + row * H * D + head * D + _tile(H * D, BM, D, DP), acc * scale, left, BM, D, DP)


@triton.jit(do_not_specialize=["batch", "q_bound", "kv_rows"])
def wide_dkdv(
    grad, q, k, v, dk, dv, q_offsets, kv_offsets, schedule, batch, q_bound, kv_rows, scale, H, g_row, g_head, q_row,
    q_head, k_row, k_head, v_row, v_head, ACT: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, SEEDS: tl.constexpr):
    """dk, dv [rows, H, D] contiguous, one key tile (BN) and head a program; queries come BM at a time."""
    item, head = tl.program_id(0) // H, tl.program_id(0) % H
    count = tl.load(schedule + 1)
    if item >= count:
        _zero_tail(dk, item - count, kv_offsets, batch, kv_rows, head, H, BN, D, DP)
        _zero_tail(dv, item - count, kv_offsets, batch, kv_rows, head, H, BN, D, DP)
        return
    row, left, q_begin, q_length = _record(schedule + 4 + 4 * (q_bound + item))
    k_tile = _load(k + row * k_row + head * k_head + _tile(k_row, BN, D, DP), left, BN, D, DP)
    v_tile = _load(v + row * v_row + head * v_head + _tile(v_row, BN, D, DP), left, BN, D, DP)
    q_from = q_begin * 0 if SEEDS > 0 else q_begin
    q_pointers = q + q_from * q_row + head * q_head + _tile(q_row, BM, D, DP)
    g_pointers = grad + q_begin * g_row + head * g_head + _tile(g_row, BM, D, DP)
    dk_acc = tl.zeros([BN, DP], tl.float32)
    dv_acc = tl.zeros([BN, DP], tl.float32)
    for start in range(0, q_length, BM):
        q_tile = _load(q_pointers, q_length - start, BM, D, DP)
        st = tl.dot(k_tile, q_tile.T)
        pt, slope = act_both(st * scale, ACT, FAST)
        g_tile = _load(g_pointers, q_length - start, BM, D, DP)
        dv_acc = tl.dot(pt.to(v.dtype.element_ty), g_tile, dv_acc)
        dpt = tl.dot(v_tile, g_tile.T)
        dk_acc = tl.dot((dpt * slope).to(q.dtype.element_ty), q_tile, dk_acc)
        q_pointers += BM * q_row
        g_pointers += BM * g_row
    out_tile = row * H * D + head * D + _tile(H * D, BN, D, DP)
    _store(dv + out_tile, dv_acc, left, BN, D, DP)
    _store(dk + out_tile, dk_acc * scale, left, BN, D, DP)


# ---- narrow ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["q_bound"])
def narrow_fwd(
    q, k, v, out, partial, q_offsets, kv_offsets, schedule, q_bound, scale, H, q_row, q_head, k_row, k_head, v_row,
    v_head, ACT: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, SEEDS: tl.constexpr, CHUNK: tl.constexpr, RUNS: tl.constexpr):
    """out [rows, H, D] contiguous, one run of CHUNK keys of a sample and a head a program.

    RUNS: a sample may have several; each writes its share to partial [slots, H, BM, D] fp32 (added by `sum_runs`), at
    slot first key // CHUNK + sample, which no other run has and which needs no scan to find.
    """
    item, head = tl.program_id(0) // H, tl.program_id(0) % H
    if item >= tl.load(schedule + 1):
        return
    row, left, sample, _ = _record(schedule + 4 + 4 * (q_bound + item))
    keys = tl.minimum(left, CHUNK)
    q_begin, q_length = _bounds(q_offsets, sample, SEEDS)
    q_from = q_begin * 0 if SEEDS > 0 else q_begin
    q_tile = _load(q + q_from * q_row + head * q_head + _tile(q_row, BM, D, DP), q_length, BM, D, DP)
    k_pointers = k + row * k_row + head * k_head + _tile(k_row, BN, D, DP)
    v_pointers = v + row * v_row + head * v_head + _tile(v_row, BN, D, DP)
    acc = tl.zeros([DP, BM], tl.float32)
    for start in range(0, keys, BN):
        k_tile = _load(k_pointers, keys - start, BN, D, DP)
        st = tl.dot(k_tile, q_tile.T)
        pt = act_value(st * scale, ACT, FAST).to(v.dtype.element_ty)
        v_tile = _load(v_pointers, keys - start, BN, D, DP)
        acc = tl.dot(v_tile.T, pt, acc)
        k_pointers += BN * k_row
        v_pointers += BN * v_row
    if RUNS:
        place = (row // CHUNK + sample) * H + head
        _store(partial + place * BM * D + _tile(D, BM, D, DP), acc.T, BM, BM, D, DP)
    else:
        _store(out + q_begin * H * D + head * D + _tile(H * D, BM, D, DP), acc.T, q_length, BM, D, DP)


@triton.jit(do_not_specialize=["batch", "q_bound", "kv_rows"])
def narrow_bwd(
    grad, q, k, v, dq, dk, dv, partial, q_offsets, kv_offsets, schedule, batch, q_bound, kv_rows, scale, H, g_row,
    g_head, q_row, q_head, k_row, k_head, v_row, v_head, ACT: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SEEDS: tl.constexpr, CHUNK: tl.constexpr,
    RUNS: tl.constexpr):
    """All three gradients in one walk over a run of keys; five products, K and V read once.

    RUNS: a sample may have several. Then, and with shared queries, this run's share of dq goes to partial
    [slots, H, BM, D] fp32, to be added in a fixed order.
    """
    item, head = tl.program_id(0) // H, tl.program_id(0) % H
    count = tl.load(schedule + 1)
    if item >= count:
        _zero_tail(dk, item - count, kv_offsets, batch, kv_rows, head, H, CHUNK, D, DP)
        _zero_tail(dv, item - count, kv_offsets, batch, kv_rows, head, H, CHUNK, D, DP)
        return
    row, left, sample, _ = _record(schedule + 4 + 4 * (q_bound + item))
    keys = tl.minimum(left, CHUNK)
    q_begin, q_length = _bounds(q_offsets, sample, SEEDS)
    q_from = q_begin * 0 if SEEDS > 0 else q_begin
    q_tile = _load(q + q_from * q_row + head * q_head + _tile(q_row, BM, D, DP), q_length, BM, D, DP)
    g_tile = _load(grad + q_begin * g_row + head * g_head + _tile(g_row, BM, D, DP), q_length, BM, D, DP)
    k_pointers = k + row * k_row + head * k_head + _tile(k_row, BN, D, DP)
    v_pointers = v + row * v_row + head * v_head + _tile(v_row, BN, D, DP)
    dk_pointers = dk + row * H * D + head * D + _tile(H * D, BN, D, DP)
    dv_pointers = dv + row * H * D + head * D + _tile(H * D, BN, D, DP)
    acc = tl.zeros([DP, BM], tl.float32)
    for start in range(0, keys, BN):
        k_tile = _load(k_pointers, keys - start, BN, D, DP)
        v_tile = _load(v_pointers, keys - start, BN, D, DP)
        pt, slope = act_both(tl.dot(k_tile, q_tile.T) * scale, ACT, FAST)
        dst = (tl.dot(v_tile, g_tile.T) * slope * scale).to(q.dtype.element_ty)
        dv_tile = tl.dot(pt.to(v.dtype.element_ty), g_tile)
        dk_tile = tl.dot(dst, q_tile)
        acc = tl.dot(k_tile.T, dst, acc)
        _store(dv_pointers, dv_tile, keys - start, BN, D, DP)
        _store(dk_pointers, dk_tile, keys - start, BN, D, DP)
        k_pointers += BN * k_row
        v_pointers += BN * v_row
        dk_pointers += BN * H * D
        dv_pointers += BN * H * D
    if RUNS or SEEDS > 0:
        place = (row // CHUNK + sample if RUNS else sample) * H + head
        _store(partial + place * BM * D + _tile(D, BM, D, DP), acc.T, BM, BM, D, DP)
    else:
        _store(dq + q_begin * H * D + head * D + _tile(H * D, BM, D, DP), acc.T, q_length, BM, D, DP)


@triton.jit
def sum_runs(
    partial, out, q_offsets, kv_offsets, H, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SEEDS: tl.constexpr, CHUNK: tl.constexpr,
):
    """out [rows, H, D]: the shares of a sample's runs added in order, one sample and head a program."""
    sample, head = tl.program_id(0) // H, tl.program_id(0) % H
    q_begin, q_length = _bounds(q_offsets, sample, SEEDS)
    kv_begin, kv_length = _bounds(kv_offsets, sample, 0)
    total = tl.zeros([BM, DP], tl.float32)
    for chunk in range(0, tl.maximum(tl.cdiv(kv_length, CHUNK), 1)):
        place = (kv_begin // CHUNK + chunk + sample) * H + head
        total += _load(partial + place * BM * D + _tile(D, BM, D, DP), BM, BM, D, DP)
    _store(out + q_begin * H * D + head * D + _tile(H * D, BM, D, DP), total, q_length, BM, D, DP)
