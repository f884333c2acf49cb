"""From raw ids and numbers to tokens: one token an event, a fixed number of tokens for the features of the sample.

An event becomes [embeddings of its ids | knots of its numbers | action bits | match bits | similarities] -> MLP ->
`[T, d]`. A sample's features become `num_feature_tokens` tokens `[B, n, d]`. Matching compares an event with the
candidate: same product, same category, similar embeddings; how often and how lately the ids were equal in the whole
visible history are numbers among the features. With `taps` the MLP sees the events just before as well.
Read `attention.py` and `interaction.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from opengem.config import ModelConfig
from opengem.data.batch import Batch, Embedded
from opengem.data.schema import Feature, Stream, matches
from opengem.jagged import Jagged
from opengem.kernels.jagged_ops.op import jagged_dense_bmm
from opengem.model.interaction import TokenMix

DAY = 86_400.0
DECAYS_DAYS = (1.0, 7.0, 28.0, 112.0)  # half-lives of the match counts besides the plain count
SMALLEST, SPAN = 0.05, 15.0  # of `place`: numbers from 0.05 to beyond 80,000 are told apart, of either sign
_FIXED_POINT = 1 << 20  # counts are summed as integers: exact, so the same for any batch and any order


def attribute_kinds(stream: Stream, kind: str) -> list[Feature]:
    return [attribute for attribute in stream.attributes if attribute.kind == kind]


def unpack_bits(mask: Tensor, bits: int) -> Tensor:
    """int64 `[N]` bit masks to float32 `[N, bits]` of 0 and 1."""
    return ((mask[:, None] >> torch.arange(bits, device=mask.device)) & 1).float()


def place(x: Tensor) -> Tensor:
    """Where a number stands on a scale that is linear around 0 and logarithmic beyond, float32 in [-SPAN, SPAN].

    asinh(x / SMALLEST): needs no look at the data, and a factor of e in x is a step of 1 anywhere above SMALLEST.
    """
    return torch.asinh(x.float() / SMALLEST).clamp(-SPAN, SPAN)


def hats(places: Tensor, step: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[...]` to `[..., knots]`: the two knots next to each place get the weights of linear interpolation, others 0."""
    knots = torch.arange(-int(SPAN / step), int(SPAN / step) + 1, device=places.device)
    distance = torch.empty(*places.shape, knots.shape[0], dtype=dtype, device=places.device)
    torch.sub((places / step)[..., None], knots, out=distance)  # rounded here, the passes below move half the bytes
    return distance.abs_().neg_().add_(1).clamp_(min=0)


class NumberEncoding(nn.Module):
    """A learned piecewise-linear curve for each of `count` numbers: float32 `[N, count]` to `[N, count, dim]`.

    The knots stand at fixed places. Two resolutions are added: a coarse one that learns at once and a fine one that
    lets the net draw the steps of a boosted tree. After Gorishniy et al., arXiv 2203.05556, whose knots are quantiles.
    """

    STEPS = (1.0, 0.2)

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        knots = sum(hats(torch.zeros(()), step).shape[0] for step in self.STEPS)
        self.curve = nn.Parameter(torch.randn(count, knots, dim) * dim**-0.5)
        self.slope = nn.Parameter(torch.randn(count, dim) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        places = place(x)
        weights = torch.cat([*(hats(places, step) for step in self.STEPS), (places / SPAN)[..., None]], 2)
        return torch.einsum("nck,ckd->ncd", weights, torch.cat([self.curve, self.slope[:, None]], 1))

    def flops(self, rows: int) -> int:
        return 2 * rows * (self.curve.numel() + self.slope.numel())


def seconds_ago(times: Tensor, row: Tensor, batch: Batch) -> Tensor:
    """float32 `[T]`: seconds from times to the request of their samples (both int64 `[T]`), 0 where it is later."""
    return (batch.timestamps[row] - times).clamp(min=0).float()


def _fixed(terms: Tensor) -> Tensor:
    return (terms * _FIXED_POINT).round().long()


def add_taps(x: Tensor, position: Tensor, taps: int) -> Tensor:
    """The sum of a causal convolution over events, `[T, taps * d]` to `[T, d]`: of each event the first d columns, of
    the event before it the next d, and so on; nothing where the sample has no such event. position: `[T]`."""
    own, *before = x.chunk(taps, 1)
    for back, part in enumerate(before, 1):
        own = own + part.roll(back, 0).masked_fill((position < back)[:, None], 0)
    return own


@dataclass(frozen=True)
class EventView:
    """The visible events of one stream: timestamps with their offsets, sample and position of each event (int64 `[T]`),
    seconds from event to request (float32 `[T]`), 1 where the event has the candidate's id (float32 `[T, pairs]`)."""

    history: Jagged
    row: Tensor
    position: Tensor
    gap: Tensor
    match: Tensor


class EventTokenizer(nn.Module):
    """Events of one stream to tokens: Jagged `[T, dim]`, T the visible events of all samples.

    taps: events that enter a token, itself and those just before it in the history. The first layer is then a short
    causal convolution, as in Caser (arXiv 1809.07426) and Hyena (arXiv 2302.10866): what attention would need many
    steps to learn, that an event follows another, is there from the start.
    """

    STEP = 1.0  # knots of an event's numbers; the first layer draws the curves

    def __init__(self, stream: Stream, features: list[Feature], config: ModelConfig, embedding_dim: int,
                 dim: int, taps: int = 1) -> None:
        super().__init__()
        self.stream, self.taps = stream, taps
        self.pairs = matches(stream, features) if config.match else []
        self.ids, self.bits = attribute_kinds(stream, "id"), attribute_kinds(stream, "bits")
        paired = torch.tensor([[a == b for b, _ in self.pairs] for a in self.ids])
        paired = paired.reshape(len(self.ids), 1, len(self.pairs))
        self.register_buffer("paired", paired, False)  # [attributes, 1, pairs]
        self.register_buffer("decay", torch.tensor([0.0, *(-1 / (days * DAY) for days in DECAYS_DAYS)]), False)
        self.dense = attribute_kinds(stream, "dense")
        numbers = (len(self.dense) + 2) * hats(torch.zeros(()), self.STEP).shape[0]
        numbers += sum(a.rows for a in self.bits) + 2 * len(self.pairs)
        self.padding = -numbers % 8  # matrix products of any other width are several times slower
        self.lift = nn.Linear(len(self.ids) * embedding_dim, taps * dim, bias=False)
        self.inner = nn.Linear(numbers + self.padding, taps * dim)
        self.outer = nn.Linear(dim, dim)

    def view(self, batch: Batch) -> EventView:
        history = batch.sequences[f"{self.stream.name}.timestamp"]
        row = history.row_to_sample
        position = torch.arange(row.shape[0], device=row.device) - history.offsets[row]
        gap = seconds_ago(history.values, row, batch)
        match = gap.new_zeros(gap.shape[0], 0)
        if self.pairs:
            wanted = torch.stack([batch.features[f.name] for _, f in self.pairs], 1)
            found = [self.column(batch, a) for a, _ in self.pairs]
            match = torch.stack(found, 1).eq(wanted[row]).float()
        return EventView(history, row, position, gap, match)

    def column(self, source: Batch | Embedded, attribute: Feature) -> Tensor:
        return source.sequences[f"{self.stream.name}.{attribute.name}"].values

    def forward(self, batch: Batch, embedded: Embedded, view: EventView) -> Jagged:
        vectors = torch.cat([self.column(embedded, a) for a in self.ids] or [view.gap[:, None][:, :0]], 1)
        numbers = self.numbers(batch, view, vectors.dtype)
        if self.pairs:
            numbers.append(self.similarity(vectors, embedded, view.history))
        hidden = self.inner(torch.cat(numbers, 1))
        lift = self.lift.weight.T.to(hidden.dtype)
        hidden.addmm_(vectors.to(hidden.dtype), lift)  # in place: else it is copied first
        if self.taps > 1:
            hidden = add_taps(hidden, view.position, self.taps)
        return view.history.with_values(self.outer(F.gelu(hidden)))

    @torch.no_grad()
    def numbers(self, batch: Batch, view: EventView, dtype: torch.dtype) -> list[Tensor]:
        """What is known of an event besides its ids: the knots of its numbers, then action bits, match bits, padding.

        The numbers are the dense attributes, days to the request, and days since the event before.
        """
        previous = (view.gap.roll(1) - view.gap).masked_fill(view.position == 0, 0)
        numbers = [*[self.column(batch, a) for a in self.dense], view.gap / DAY, previous / DAY]
        knots = hats(place(torch.stack(numbers, 1)), self.STEP, dtype).flatten(1)
        bits = [unpack_bits(self.column(batch, a), a.rows) for a in self.bits]
        flags = torch.cat([*bits, view.match, view.gap.new_zeros(view.gap.shape[0], self.padding)], 1)
        return [knots, flags.to(dtype)]

    def similarity(self, vectors: Tensor, embedded: Embedded, history: Jagged) -> Tensor:
        """`[T, pairs]`: inner product of the event's and the candidate's embedding, a soft match.

        As one matrix product a sample: the candidate's vectors, each in the rows of the attribute it is compared with.
        """
        wanted = torch.stack([embedded.features[f.name] for _, f in self.pairs], 2)  # [B, E, pairs]
        spread = wanted[:, None] * self.paired.to(wanted.dtype)  # [B, attributes, E, pairs]
        return jagged_dense_bmm(vectors, spread.flatten(1, 2), history.offsets, max_length=history.max_length)

    @torch.no_grad()
    def counts(self, view: EventView, batch: Batch) -> Tensor:
        """float32 `[B, num_counts]`: log(1 + events), then log(1 + matches) of each pair, plain and decayed; over the
        visible events and, where the batch has them, those before."""
        terms = (view.match[:, :, None] * self.decayed(view.gap)[:, None]).flatten(1)  # [T, pairs * decays]
        every = F.pad(terms, (1, 0), value=1.0)  # in front all events count
        sums = view.row.new_zeros(view.history.batch_size, self.num_counts).index_add_(0, view.row, _fixed(every))
        counted = f"{self.stream.name}.counted"
        if counted in batch.features:
            sums[:, 0] += batch.features[counted] * _FIXED_POINT
            by_pair = sums[:, 1:].unflatten(1, (len(self.pairs), len(self.decay)))
            for i, (a, f) in enumerate(self.pairs):
                times = batch.sequences[f"{counted}.{a.name}.{f.name}"]
                row = times.row_to_sample
                by_pair[:, i].index_add_(0, row, _fixed(self.decayed(seconds_ago(times.values, row, batch))))
        return torch.log1p(sums.double() / _FIXED_POINT).float()

    def decayed(self, gap: Tensor) -> Tensor:
        """What an event of `gap` seconds ago weighs in each count of matches, `[T]` to `[T, decays]`."""
        return torch.exp2(gap[:, None] * self.decay)

    @property
    def num_counts(self) -> int:
        return 1 + len(self.pairs) * (1 + len(DECAYS_DAYS))

    def flops(self, rows: int) -> int:
        weights = sum(layer.weight.numel() for layer in (self.lift, self.inner, self.outer))
        similarity = self.lift.in_features // max(1, len(self.ids)) * len(self.pairs)
        return 2 * rows * (weights - self.padding * self.inner.out_features + similarity)


class FeatureTokenizer(nn.Module):
    """The features of a sample, and the match counts of its histories, to tokens `[B, num_feature_tokens, dim]`.

    Every feature becomes one vector of the embedding width: ids by their table, numbers by `NumberEncoding`, bit masks
    by one vector a bit. One matrix lifts them to `dim`, a token-axis map mixes them into all tokens but the last, which
    is an MLP over all features at once.
    """

    def __init__(self, features: list[Feature], num_counts: int, config: ModelConfig, embedding_dim: int) -> None:
        super().__init__()
        self.ids = [f for f in features if f.kind in ("id", "ids")]
        self.dense = [f for f in features if f.kind == "dense"]
        self.bits = [f for f in features if f.kind == "bits"]
        item = [i for i, f in enumerate(self.ids) if f.role == "item"]
        self.register_buffer("item", torch.tensor(item).long(), False)
        self.embedding_dim = embedding_dim
        self.numbers = NumberEncoding(len(self.dense) + num_counts, embedding_dim)
        self.bit_vectors = nn.ModuleList(nn.Linear(f.rows, embedding_dim) for f in self.bits)
        self.count = len(self.ids) + len(self.dense) + num_counts + len(self.bits)
        self.identity = nn.Parameter(torch.randn(self.count, config.dim) * 0.1)
        self.lift = nn.Linear(embedding_dim, config.dim, bias=False)
        self.mix = TokenMix(self.count, config.num_feature_tokens - 1)
        self.inner = nn.Linear(self.count * embedding_dim, config.expert_hidden)
        self.outer = nn.Linear(config.expert_hidden, config.dim)
        self.candidate = nn.Linear(max(1, len(self.item)) * embedding_dim, config.dim)

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """What `vectors` gives to (tokens `[B, num_feature_tokens, dim]`, candidate `[B, dim]`)."""
        lifted = self.lift(vectors) + self.identity.to(vectors.dtype)
        mixed = self.mix(lifted)
        deep = self.outer(F.gelu(self.inner(vectors.flatten(1))))
        item = vectors.index_select(1, self.item) if self.item.numel() else vectors.mean(1, keepdim=True)
        return torch.cat([mixed, deep[:, None]], 1), self.candidate(item.flatten(1))

    def vectors(self, batch: Batch, embedded: Embedded, counts: list[Tensor]) -> Tensor:
        """`[B, count, embedding_dim]`: ids, numbers, match counts, bit masks. counts: `EventTokenizer.counts`."""
        parts = [torch.stack([embedded.features[f.name] for f in self.ids], 1)] if self.ids else []
        numbers = [batch.features[f.name][:, None] for f in self.dense] + counts
        if numbers:
            parts.append(self.numbers(torch.cat(numbers, 1)))
        for feature, vector in zip(self.bits, self.bit_vectors, strict=True):
            parts.append(vector(unpack_bits(batch.features[feature.name], feature.rows))[:, None])
        return torch.cat(parts, 1)

    def flops(self, rows: int) -> int:
        lift = self.count * self.lift.weight.numel()
        dense = sum(layer.weight.numel() for layer in (self.inner, self.outer, self.candidate, *self.bit_vectors))
        return 2 * rows * (lift + dense) + self.mix.flops(rows, self.lift.out_features) + self.numbers.flops(rows)
