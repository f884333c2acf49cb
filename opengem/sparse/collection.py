"""The embedding collection of one process: ids of a batch in, vectors out, and the update when gradients are there.

    embedded = collection(batch)          # vectors that require a gradient
    loss(model(batch, embedded)).backward()
    if collection.finite(): collection.step(lr)

`sharded.py` has the same interface over many processes.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from opengem.config import SparseConfig
from opengem.data.batch import Batch, Embedded
from opengem.data.schema import Feature, Schema
from opengem.errors import UserError
from opengem.jagged import Jagged
from opengem.kernels.adamw.op import clear
from opengem.sparse.checkpoint import TableRows
from opengem.sparse.lookup.reference import sum_bags
from opengem.sparse.plan import Plan
from opengem.sparse.table import Piece, Request, Tables


@dataclass(frozen=True)
class Slot:
    """One input that is looked up: its key in the batch, its table, and how many ids and rows that table has.

    key: "stream.attribute" (sequence) or the name of a sample feature. pooled: a list of ids summed to one vector.
    ids: number of legal ids; rows: rows stored. rows < ids means ids are hashed (any id >= 0 is then legal).
    """

    key: str
    table: str
    ids: int
    rows: int
    sequence: bool = False
    pooled: bool = False


def slots_of(schema: Schema, features: list[Feature], max_rows: int) -> list[Slot]:
    """Every id attribute of the streams, then every id or ids feature among `features`, in that fixed order."""

    def slot(key: str, feature: Feature, sequence: bool) -> Slot:
        rows = min(feature.rows, max_rows) if max_rows else feature.rows
        return Slot(key, feature.table, feature.rows, rows, sequence, feature.kind == "ids")

    attributes = [(f"{s.name}.{a.name}", a, True) for s in schema.streams for a in s.attributes]
    wanted = [*attributes, *((f.name, f, False) for f in features)]
    return [slot(key, feature, sequence) for key, feature, sequence in wanted if feature.kind in ("id", "ids")]


def table_rows(slots: list[Slot]) -> dict[str, int]:
    """Table -> rows stored, in order of first use."""
    return {slot.table: slot.rows for slot in slots}


def pieces_of(rows: dict[str, int]) -> list[Piece]:
    """Whole tables one after the other: the numbering of all rows that routing starts from."""
    ends = list(accumulate(rows.values(), initial=0))
    return [Piece(name, 0, count, at) for (name, count), at in zip(rows.items(), ends, strict=False)]


def row_dtype(config: SparseConfig) -> torch.dtype:
    return getattr(torch, config.dtype)


class IdReader:
    """Takes the ids of all slots out of a batch, checks them and hashes them.

    A bad id raises UserError at once on the CPU. On a GPU that would stop the stream, so the first bad id is kept on
    the device and raised by `check()`; the lookup itself reads row 0 in its place.
    """

    def __init__(self, slots: list[Slot], device: torch.device | str) -> None:
        self.slots, self.device = slots, torch.device(device)
        self.limits = torch.tensor([s.ids if s.rows == s.ids else 2**63 - 1 for s in slots], device=device)
        self.rows = torch.tensor([s.rows for s in slots], device=device)
        self.bad = torch.full((2,), -1, device=device)  # slot (-1: none) and id

    def __call__(self, batch: Batch) -> tuple[list[Jagged | Tensor | None], Tensor, Tensor]:
        """(input of each slot, or None where the batch has none; int64 [N] slot of every id; [N] row in its table)."""
        inputs = [(batch.sequences if slot.sequence else batch.features).get(slot.key) for slot in self.slots]
        counts = [0 if x is None else _values(x).shape[0] for x in inputs]
        ids = torch.cat([_values(x) for x in inputs if x is not None] or [self.rows.new_empty(0)])
        pinned = torch.tensor(counts, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        number, repeats = torch.arange(len(counts), device=self.device), pinned.to(self.device, non_blocking=True)
        slot = torch.repeat_interleave(number, repeats, output_size=sum(counts))
        if ids.shape[0]:
            wrong = (ids < 0) | (ids >= self.limits[slot])
            self._note(wrong, slot, ids)
            ids = torch.where(wrong, 0, ids)
        return inputs, slot, ids % self.rows[slot]

    def _note(self, wrong: Tensor, slot: Tensor, ids: Tensor) -> None:
        at = wrong.to(torch.uint8).argmax().view(1)
        first = torch.where(wrong[at], torch.cat([slot[at], ids[at]]), -1)
        self.bad = torch.where(self.bad[0] >= 0, self.bad, first)
        if self.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raise UserError if any id since the last check was out of range (a host sync on a GPU)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # ids may have been read on another stream
        at, wrong = self.bad.tolist()
        if at >= 0:
            self.bad = torch.full_like(self.bad, -1)
            slot = self.slots[at]
            wanted = f"[0, {slot.ids})" if slot.rows == slot.ids else ">= 0"
            raise UserError(
                f"feature {slot.key!r}, table {slot.table!r} of {slot.ids} rows: id {wrong} is out of range, wanted "
                f"{wanted}; correct the data or the schema's rows, or hash the table with --sparse.max-rows"
            )

    def collisions(self, batch: Batch) -> dict[str, tuple[int, int]]:
        """Hashed table -> (distinct ids, distinct rows) of this batch; the difference is what hashing merged."""
        inputs, slot, rows = self(batch)
        ids = torch.cat([_values(x) for x in inputs if x is not None] or [rows])
        found = {}
        for name in {s.table: None for s in self.slots if s.rows < s.ids}:
            members = torch.tensor([s.table == name for s in self.slots], device=self.device)
            mine = members[slot]
            found[name] = (ids[mine].unique().shape[0], rows[mine].unique().shape[0])
        return found


def _values(x: Jagged | Tensor) -> Tensor:
    return x.values if isinstance(x, Jagged) else x


class Leaves:
    """The vectors handed to the model (`embedded`), and the one leaf that collects their gradients."""

    def __init__(self, slots: list[Slot], inputs: list[Jagged | Tensor | None], vectors: Tensor) -> None:
        """vectors: `[N, dim]`, one for every id, in slot order."""
        self.leaf = vectors.detach().requires_grad_(torch.is_grad_enabled())
        given = [(slot, x) for slot, x in zip(slots, inputs, strict=True) if x is not None]
        lists = [x if slot.pooled else None for slot, x in given]
        parts = _Parts.apply(self.leaf, lists, [_values(x).shape[0] for _, x in given])
        sequences = {s.key: x.with_values(part) for (s, x), part in zip(given, parts, strict=True) if s.sequence}
        features = {s.key: part for (s, _), part in zip(given, parts, strict=True) if not s.sequence}
        self.embedded = Embedded(sequences, features)

    @cached_property
    def grads(self) -> Tensor:
        """`[N, dim]`: the gradient of each looked-up vector, in its dtype; zero where the model did not use it."""
        return torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad


class _Parts(torch.autograd.Function):
    """Vectors `[N, dim]` cut into `counts`; where there are `lists`, summed by list. The gradients are joined once."""

    @staticmethod
    def forward(ctx, vectors: Tensor, lists: list[Jagged | None], counts: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lists, ctx.counts, ctx.like = lists, counts, vectors.new_empty(0, vectors.shape[1])
        return tuple(part if x is None else pool(part, x) for part, x in zip(vectors.split(counts), lists, strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        parts = [ctx.like]
        for grad, x, count in zip(grads, ctx.lists, ctx.counts, strict=True):
            if grad is None:
                grad = ctx.like.new_zeros(count, ctx.like.shape[1])
            elif x is not None:
                grad = grad.index_select(0, x.row_to_sample)
            parts.append(grad)
        return torch.cat(parts), None, None


class LocalRouter:
    """Every row is here: routing is the identity. `sharded.AllToAllRouter` has the same methods over a group."""

    def send_ids(self, rows: Tensor) -> Route:
        """rows: int64 `[N]` in the numbering of all tables. The route, whose `rows` are to be looked up here."""
        return Route(rows)

    def vectors(self, route: Route, found: Tensor) -> Tensor:
        """What `storage` found for `route.rows` -> `[N, dim]` for the ids this process asked for."""
        return found

    def grads(self, route: Route, grads: Tensor) -> Tensor:
        """Gradients `[N, dim]` of this process's ids -> one for each of `route.rows`."""
        return grads

    def agree(self, flag: Tensor) -> Tensor:
        """0-dim bool: whether `flag` holds on every process."""
        return flag

    def gather(self, own: Tensor) -> Tensor:
        """The sum of `own` over all processes."""
        return own


@dataclass(frozen=True)
class Route:
    """Where the ids of one batch go. rows: int64 `[M]`, the rows asked of this process's storage."""

    rows: Tensor


@dataclass(frozen=True)
class Distributed:
    """A batch whose ids have reached the processes that keep the rows (`EmbeddingCollection.distribute`)."""

    inputs: list[Jagged | Tensor | None]
    route: Route
    request: Request


class EmbeddingCollection:
    """One table per schema table in use, looked up for every id input of a batch.

    features: the sample features that are model inputs; every id attribute of the streams is an input as well.
    Tables larger than `config.max_rows` (when > 0) are hashed to that many rows by modulo.
    router, storage: where the rows are; left out, all are on this device. `sharded.shard` makes them for a mesh.
    tables: look only into these (default: all).
    With `config.check_replicas` all copies of the tables are compared after every step.
    Over several processes every method but `check`, `collisions` and `num_bytes` is collective: all ranks call it
    alike, with however many samples each of them has.
    """

    def __init__(self, schema: Schema, features: list[Feature], config: SparseConfig, device: torch.device | str,
                 seed: int, router: LocalRouter | None = None, storage: Tables | None = None,
                 tables: Container[str] | None = None) -> None:
        slots = slots_of(schema, features, config.max_rows)
        self.slots = slots if tables is None else [slot for slot in slots if slot.table in tables]
        self.dim, self.config, self.device = config.dim, config, torch.device(device)
        self.reader = IdReader(self.slots, device)
        self.rows = table_rows(self.slots)
        whole = pieces_of(self.rows)
        self.router = router or LocalRouter()
        total = sum(self.rows.values())
        self.storage = storage or Tables(whole, total, config.dim, device, eps=config.eps, dtype=row_dtype(config))
        first = {piece.table: piece.at for piece in whole}
        self.first = torch.tensor([first[slot.table] for slot in self.slots], device=device, dtype=torch.int64)
        self.pending: list[tuple[Distributed, Leaves]] = []
        self.plan: Plan | None = None  # of the shard group, over several processes
        self.reinitialise(seed)

    def __call__(self, batch: Batch) -> Embedded:
        """Look every id up, in autocast's dtype. With gradients on, theirs are collected until `step`."""
        return self.lookup(self.distribute(batch))

    def distribute(self, batch: Batch) -> Distributed:
        """Check the ids and send them to where the rows are. Needs no rows, so it may run ahead of the last update."""
        inputs, slot, rows = self.reader(batch)
        route = self.router.send_ids(rows + self.first[slot])
        return Distributed(inputs, route, self.storage.request(route.rows, torch.is_grad_enabled()))

    def read_ahead(self, ids: Distributed, current: Distributed | None) -> Distributed:
        """Read what `ids` ask for before the next update, where the storage gains by it; `lookup` then reads again the
        rows that the update changed. current: the batch that trains. Nothing but that update may come in between."""
        if not self.pending:
            return ids
        learning = [*(pending.request for pending, _ in self.pending), *([current.request] if current else [])]
        dtype = self.pending[-1][1].leaf.dtype
        return replace(ids, request=self.storage.read_ahead(ids.request, dtype, learning))

    def lookup(self, ids: Distributed) -> Embedded:
        """The second half of a call."""
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        vectors = self.router.vectors(ids.route, self.storage.lookup(ids.request, dtype))
        leaves = Leaves(self.slots, ids.inputs, vectors)
        if torch.is_grad_enabled():
            self.pending.append((ids, leaves))
        return leaves.embedded

    def finite(self) -> Tensor:
        """0-dim bool on the device: whether every gradient since the last step is finite, on every process."""
        zero = torch.zeros((), device=self.device)
        total = sum((leaves.grads.sum(dtype=torch.float32) for _, leaves in self.pending), zero)
        return self.router.agree(total.isfinite())

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """Exact row-wise Adagrad on the rows looked up since the last call, from the gradients that backward left.

        skip: fp32, 0-dim on the device, the same on every process; where it is not 0, rows and state stay as they are.
        """
        if self.pending:
            if skip is not None:
                for _, leaves in self.pending:
                    clear(leaves.grads, skip)
            arrived = [(ids.request, self.router.grads(ids.route, leaves.grads)) for ids, leaves in self.pending]
            self.storage.update(arrived, lr)
            if self.config.check_replicas:
                self.storage.assert_equal()
        self.discard()

    def discard(self) -> None:
        """Forget the leaves without an update."""
        self.pending.clear()

    def check(self) -> None:
        """Raise UserError if an id was out of range (only needed on a GPU, where it is a host sync)."""
        self.reader.check()

    def collisions(self, batch: Batch) -> dict[str, tuple[int, int]]:
        """Hashed table -> (distinct ids, distinct rows) in this batch."""
        return self.reader.collisions(batch)

    def reinitialise(self, seed: int) -> None:
        """Fresh rows and state."""
        self.discard()
        self.storage.initialise(self.config.init_std, seed)

    def num_bytes(self) -> int:
        """Persistent bytes of rows and optimiser state in this process."""
        return self.storage.num_bytes()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """{"weight": {table: [rows, dim]}, "moment": {table: [rows]}, "step": {"updates": int}}, for a checkpoint.

        Views of the live rows: whole tables in one process, the part that is stored here (`TableRows`) over several.
        """
        state = {"weight": self._parts(self.storage.weight), "moment": self._parts(self.storage.moment)}
        return {**state, "step": {"updates": torch.tensor(self.storage.updates)}}

    def _parts(self, tensor: Tensor) -> dict[str, Tensor]:
        if isinstance(self.router, LocalRouter):
            return {piece.table: piece.of(tensor) for piece in self.storage.pieces}
        columns = self.storage.columns
        width = () if tensor.dim() == 1 else (self.dim,)
        zero = () if tensor.dim() == 1 else (columns.first if columns else 0,)
        runs: dict[str, dict[tuple[int, ...], Tensor]] = {name: {} for name in self.rows}
        for piece in self.storage.pieces:
            if piece.rows:
                runs[piece.table][piece.first, *zero] = piece.of(tensor)
        return {name: TableRows((rows, *width), tensor, runs[name]) for name, rows in self.rows.items()}

    def gather(self) -> dict[str, dict[str, Tensor]]:
        """Copies of whole tables on every process, as `state_dict` of one: to look at, where they fit."""
        kinds = {"weight": self.storage.weight, "moment": self.storage.moment}
        state = {kind: {name: self._whole(name, tensor) for name in self.rows} for kind, tensor in kinds.items()}
        return {**state, "step": {"updates": torch.tensor(self.storage.updates)}}

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        own = tensor.new_zeros(self.rows[name], *(() if tensor.dim() == 1 else (self.dim,)))
        columns, mine = self.storage.columns, self.storage.first_copy()
        if columns and tensor.dim() == 1:
            mine &= columns.first == 0  # all ranks that share a row keep its moment
        for piece in self.storage.pieces:
            if piece.table == name and mine:
                self._part_of(own, piece).copy_(piece.of(tensor))
        return self.router.gather(own)

    def _part_of(self, whole: Tensor, piece: Piece) -> Tensor:
        """What this storage keeps of `piece`, in a whole table."""
        part, columns = whole.narrow(0, piece.first, piece.rows), self.storage.columns
        cut = columns is not None and whole.dim() > 1
        return part.narrow(1, columns.first, self.storage.weight.shape[1]) if cut else part

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over a `state_dict` of this collection that was loaded in place, or copy in whole tables.

        UserError names a table that is missing or has another shape; nothing is copied then.
        """
        self.discard()
        for kind, shape in (("weight", (self.dim,)), ("moment", ())):
            for name, rows in self.rows.items():
                _check_part(state, kind, name, [rows, *shape])
        for piece in self.storage.pieces:
            for kind, tensor in (("weight", self.storage.weight), ("moment", self.storage.moment)):
                given = state[kind][piece.table]
                if not isinstance(given, TableRows):
                    piece.of(tensor).copy_(self._part_of(given, piece))
        self.storage.updates = int(state["step"]["updates"])


def _check_part(state: dict[str, dict[str, Tensor]], kind: str, name: str, shape: list[int]) -> None:
    given = state.get(kind, {}).get(name)
    if given is None:
        raise UserError(f"checkpoint: no {kind} of table {name!r}; was it saved with the same schema?")
    if list(given.shape) != shape:
        raise UserError(
            f"checkpoint: {kind} of table {name!r} is {list(given.shape)}, wanted {shape}; "
            "use the schema, sparse.dim and sparse.max_rows it was saved with"
        )


def pool(vectors: Tensor, lists: Jagged) -> Tensor:
    """`[B, dim]`: the sum of the vectors `[T, dim]` of each sample's ids; 0 for a sample without any."""
    return sum_bags(vectors, torch.arange(vectors.shape[0], device=vectors.device), lists.offsets)
