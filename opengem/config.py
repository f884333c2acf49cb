"""The configuration of a run: frozen dataclasses, checked when made, printed as JSON that re-runs the job.

A recipe (`recipes/`) is a function that returns a `Config`. The command line overrides single fields
(`--model.dim 128`). Every rule is checked whether or not the feature it belongs to is switched on.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from opengem.errors import UserError

ATTENTION = ("block", "window", "full", "none")
ACTIVATIONS = (
    "gelu", "gelu_tanh", "gelu_poly", "gelu_taylor6", "silu", "relu", "relu2", "leaky_relu", "hardswish", "identity",
)  # fmt: skip


def _require(holds: bool, name: str, value: Any, rule: str, fix: str) -> None:
    if not holds:
        raise UserError(f"config {name} = {value!r}: {rule}; {fix}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, name, value, f"must be one of {', '.join(allowed)}", f"for example {allowed[0]}")


def _at_least(name: str, value: float, low: float) -> None:
    _require(value >= low, name, value, f"must be at least {low}", f"set --{name.replace('_', '-')} {low} or more")


@dataclass(frozen=True)
class DataConfig:
    """What is read and how it is batched."""

    batch_size: int = 256
    """samples of one step over all ranks"""
    eval_batch_size: int = 512
    """samples of one evaluation batch on each rank"""
    shuffle_rows: int = 0
    """shuffle inside consecutive windows of this many rows (0: keep time order)"""
    prefetch: int = 2
    """batches prepared ahead by background threads (0: none)"""
    optional_features: tuple[str, ...] = ()
    """names of optional features to use as inputs, or patterns of them ("user_*"); "*" takes them all"""
    train_split: str = "train"
    """split that is trained on"""
    eval_splits: tuple[str, ...] = ("test",)
    """splits evaluated at the end"""

    def __post_init__(self) -> None:
        for name, low in {"batch_size": 1, "eval_batch_size": 1, "shuffle_rows": 0, "prefetch": 0}.items():
            _at_least(f"data.{name}", getattr(self, name), low)


@dataclass(frozen=True)
class SparseConfig:
    """Embedding tables and their optimiser."""

    dim: int = 32
    """width of an embedding row, at most 1,024"""
    max_rows: int = 0
    """hash larger tables to this many rows by modulo (0: a row for every id; ids are range-checked)"""
    init_std: float = 0.02
    """standard deviation of the initial rows"""
    lr: float = 0.05
    """learning rate of row-wise Adagrad"""
    eps: float = 1e-8
    """epsilon of row-wise Adagrad, above 0: rows without a gradient stay as they are"""
    dtype: str = "float32"
    """of stored rows: float32, bfloat16 or float16 (16-bit rows are rounded stochastically)"""
    fully_shard: bool = False
    """several processes: split each copy of the tables over the mesh's sparse_replica ranks"""
    copy_rows: int = 0
    """several processes: tables of at most this many rows are copied to every process instead of sharded"""
    placement: dict[str, str] = field(default_factory=dict)
    """several processes: table -> table, node, row, column or copy, where the plan should not decide"""
    reads: str = "rows"
    """how fully sharded tables are read: rows (those that are needed) or chunks (all, a chunk at a time)"""
    chunk_mb: int = 256
    """most bytes of rows gathered at a time where fully sharded tables are read by chunks"""
    replicas: str = "exact"
    """exact: gradients of all copies are summed, as in one big model; average: each copy steps alone, then they are
    averaged"""
    check_replicas: bool = False
    """compare all copies of the tables and of the dense model bit for bit after every step (slow)"""

    def __post_init__(self) -> None:
        _one_of("sparse.dtype", self.dtype, ("float32", "bfloat16", "float16"))
        _one_of("sparse.replicas", self.replicas, ("exact", "average"))
        _one_of("sparse.reads", self.reads, ("rows", "chunks"))
        _at_least("sparse.chunk_mb", self.chunk_mb, 1)
        for name, low in {"dim": 1, "max_rows": 0, "copy_rows": 0, "init_std": 0.0, "lr": 0.0}.items():
            _at_least(f"sparse.{name}", getattr(self, name), low)
        _require(self.eps > 0, "sparse.eps", self.eps, "must be above 0", "for example 1e-8")
        _require(self.dim <= 1024, "sparse.dim", self.dim, "must be at most 1,024", "for example 256")


@dataclass(frozen=True)
class StreamConfig:
    """How one event stream is modelled. `name = "*"` stands for every stream no other entry names."""

    name: str = "*"
    max_length: int = 128
    """newest events that are kept"""
    counted: int = 0
    """events before those that still count where their ids are the candidate's; they are not looked up"""
    dim: int = 64
    """token width of this stream"""
    heads: int = 2
    """attention heads; dim must be a multiple"""
    layers: int = 0
    """layers that update this stream (0: all of the model's)"""
    attention: str = "block"
    """self-attention: block, window, full or none"""
    window: int = 64
    """block length, or events visible to each side when attention = window"""
    taps: int = 1
    """events that enter a token: itself and those just before it (1: itself alone)"""

    def __post_init__(self) -> None:
        name = f"model.streams[{self.name}]"
        at_least = {"max_length": 1, "counted": 0, "dim": 1, "layers": 0, "window": 1, "heads": 1, "taps": 1}
        for part, low in at_least.items():
            _at_least(f"{name}.{part}", getattr(self, part), low)
        _one_of(f"{name}.attention", self.attention, ATTENTION)
        even, rule = self.dim % (2 * self.heads) == 0, f"must be heads ({self.heads}) times an even head width"
        _require(even, f"{name}.dim", self.dim, rule, f"for example dim {32 * self.heads}")


@dataclass(frozen=True)
class ModelConfig:
    """The dense tower: Wukong-style experts over features, interleaved with attention over event streams."""

    dim: int = 64
    """width of non-sequence tokens"""
    heads: int = 2
    """attention heads over non-sequence tokens; dim must be a multiple"""
    layers: int = 2
    schedule: str = "GS"
    """one letter per layer, repeated: G = GDPA and fresh seed pooling, S = self-attention and the pooled tokens of the
    layer before, F = all three"""
    streams: tuple[StreamConfig, ...] = (StreamConfig(),)
    num_feature_tokens: int = 16
    """non-sequence tokens the features are projected to"""
    num_summary: int = 8
    """tokens of the feature summary handed to the streams"""
    num_kv: int = 16
    """context tokens a GDPA block attends to"""
    seeds: int = 16
    """learned queries of seed pooling"""
    counting_heads: int = 1
    """of a stream's heads in pooling, those that sum over the history instead of averaging (0: none)"""
    pooled_tokens: int = 8
    """tokens a stream's seeds are mapped to and handed to the feature side"""
    recent_tokens: int = 2
    """newest events handed to the feature side as they are"""
    sumkron_rank: int = 2
    """terms of the SumKron map from seeds to pooled tokens"""
    activation: str = "gelu"
    """element-wise activation of GDPA"""
    experts: int = 2
    """Wukong experts, each on its own partition of the tokens"""
    fm_tokens: int = 4
    """tokens an expert's factorisation machine gives (0: none)"""
    linear_tokens: int = 4
    """tokens an expert's linear compression gives"""
    fm_rank: int = 8
    expert_hidden: int = 128
    cross_layer_attention: bool = True
    """each layer's experts also attend to the outputs of all earlier layers"""
    rope: bool = True
    """rotary positions in self-attention"""
    time_encoding: bool = True
    """rotary time: angles from log(1 + gap / time_scale)"""
    time_scale_s: float = 3600.0
    match: bool = True
    """compare events with the candidate: equal ids, similar embeddings, how often and how lately they matched"""
    head_hidden: int = 128
    """width of the first hidden layer of a task's head, twice the second's"""
    feature_hidden: int = 0
    """width of the first hidden layer of a second head for each task, which reads the features as they come in and adds
    to the logit of the first (0: none)"""
    tower_dim: int = 0
    """width of the vectors of user and candidate that the in-batch softmax compares in training (0: none)"""

    def __post_init__(self) -> None:
        counts = "dim layers num_feature_tokens num_summary num_kv seeds pooled_tokens sumkron_rank experts heads"
        for name in f"{counts} linear_tokens fm_rank expert_hidden head_hidden".split():
            _at_least(f"model.{name}", getattr(self, name), 1)
        _at_least("model.fm_tokens", self.fm_tokens, 0)
        _at_least("model.recent_tokens", self.recent_tokens, 0)
        _at_least("model.feature_hidden", self.feature_hidden, 0)
        _at_least("model.tower_dim", self.tower_dim, 0)
        _at_least("model.num_feature_tokens", self.num_feature_tokens, 2)
        fewest = min((stream.heads for stream in self.streams), default=0)
        rule = f"must lie between 0 and the fewest heads of a stream ({fewest})"
        counting = 0 <= self.counting_heads <= fewest or not self.streams
        _require(counting, "model.counting_heads", self.counting_heads, rule, "0 lets every head average")
        rule = f"must be a multiple of heads ({self.heads})"
        _require(self.dim % self.heads == 0, "model.dim", self.dim, rule, f"for example {32 * self.heads}")
        _one_of("model.activation", self.activation, ACTIVATIONS)
        legal = set(self.schedule) <= set("GSF") and self.schedule[:1] in ("G", "F")
        rule = "must be made of the letters G, S, F, the first G or F (it needs fresh pooled tokens)"
        _require(legal, "model.schedule", self.schedule, rule, "for example GS")
        _require(self.time_scale_s > 0, "model.time_scale_s", self.time_scale_s, "must be above 0", "for example 3600")
        names = [s.name for s in self.streams]
        unique = len(set(names)) == len(names)
        _require(unique, "model.streams", names, "a name stands twice", "keep one entry a stream")


@dataclass(frozen=True)
class OptimConfig:
    """Dense AdamW and what guards a step."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.95, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 100
    """steps of linear warm-up, dense and sparse"""
    final_lr_fraction: float = 1.0
    """the rates fall linearly to this fraction over the pass (1: constant)"""
    clip_norm: float = 1.0
    """dense gradient norm limit (0: no clipping)"""
    task_weights: dict[str, float] = field(default_factory=dict)
    """loss weight by label (1 where not named)"""
    esmm: bool = False
    """train a conditional label on all samples, as its condition's probability times its own (ESMM)"""
    in_batch_softmax: float = 0.5
    """weight of the in-batch softmax in the loss, where the model has towers; task weights do not change it"""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "warmup_steps", "clip_norm", "in_batch_softmax"):
            _at_least(f"optim.{name}", getattr(self, name), 0)
        fraction, legal = self.final_lr_fraction, all(0 <= b < 1 for b in self.betas)
        _require(0 <= fraction <= 1, "optim.final_lr_fraction", fraction, "must lie in [0, 1]", "1: a constant rate")
        _require(legal, "optim.betas", self.betas, "must lie in [0, 1)", "for example .95 .999")
        for task, weight in self.task_weights.items():
            _at_least(f"optim.task_weights[{task}]", weight, 0)


@dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how often it saves and reports, where it runs."""

    steps: int = 0
    """stop after this many steps at the latest (0: when the passes over the training split are over)"""
    epochs: int = 1
    """passes over the training split; tables are re-initialised between passes, since a second pass overfits them"""
    seed: int = 0
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: str = "auto"
    """compute dtype: auto (bfloat16 on GPU, float32 on CPU), float32 or bfloat16; master weights stay float32"""
    compile: bool = False
    """torch.compile the model"""
    pipeline: bool = True
    """copy the next batches to the device and distribute their ids while one trains; changes no bit of the results,
    but a fault in one of the next two batches ends the run before this one is learned from and saved"""
    save_every: int = 1000
    """steps between checkpoints (0: only at the end)"""
    keep_checkpoints: int = 2
    log_every: int = 20
    """steps between lines of metrics.jsonl"""
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "save_every"):
            _at_least(f"train.{name}", getattr(self, name), 0)
        _require(0 <= self.seed < 2**63, "train.seed", self.seed, "must lie in [0, 2^63)", "for example 0")
        for name in ("epochs", "keep_checkpoints", "log_every"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        _one_of("train.device", self.device, ("auto", "cpu", "cuda"))
        _one_of("train.dtype", self.dtype, ("auto", "float32", "bfloat16"))


@dataclass(frozen=True)
class MeshSpec:
    """How many ranks lie on each axis of the job's mesh (`mesh.py`); 0 stands for the ranks that are left."""

    replica: int = 0
    """copies of the dense model (0: as many as ranks are left)"""
    shard: int = 1
    """ranks that share one copy of the dense model (0: all that are left)"""
    expert: int = 1
    """ranks inside a shard group that hold different experts; divides shard"""
    sparse_replica: int = 1
    """copies of the embedding tables"""
    sparse_shard: int = 0
    """ranks that share one copy of the tables (0: all that are left)"""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _at_least(f"mesh.{item.name}", getattr(self, item.name), int(item.name in ("expert", "sparse_replica")))

    def resolve(self, world_size: int) -> MeshSpec:
        """The same spec with every degree set. UserError names the product, the world size and the legal choices."""
        replica, shard = _fill(world_size, "replica", self.replica, "shard", self.shard)
        _, sparse_shard = _fill(world_size, "sparse_replica", self.sparse_replica, "sparse_shard", self.sparse_shard)
        if shard % self.expert:
            choices = ", ".join(map(str, _divisors(shard)))
            raise UserError(f"mesh expert = {self.expert} does not divide shard = {shard}; legal: {choices}")
        return dataclasses.replace(self, replica=replica, shard=shard, sparse_shard=sparse_shard)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _fill(world_size: int, outer: str, degree: int, inner: str, inner_degree: int) -> tuple[int, int]:
    """Both degrees, of which at most one was 0; UserError unless their product is the number of ranks."""
    degree = degree or max(world_size // max(inner_degree, 1), 1)
    inner_degree = inner_degree or max(world_size // degree, 1)
    if degree * inner_degree != world_size:
        choices = ", ".join(f"{d} x {world_size // d}" for d in _divisors(world_size))
        raise UserError(
            f"mesh {outer} {degree} x {inner} {inner_degree} = {degree * inner_degree} ranks, but the job has "
            f"{world_size}; legal {outer} x {inner}: {choices}"
        )
    return degree, inner_degree


@dataclass(frozen=True)
class Config:
    """Everything that defines a run besides the data folder and the run folder."""

    name: str = "custom"
    data: DataConfig = DataConfig()
    sparse: SparseConfig = SparseConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = TrainConfig()
    mesh: MeshSpec = MeshSpec()


def to_json(config: Config) -> str:
    """JSON that `from_json` (and `opengem train FILE.json`) turns back into the same config."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(text: str, where: str = "config") -> Config:
    """Parse what `to_json` wrote. Unknown keys and wrong types raise UserError naming the field."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from error
    return _build(Config, raw, where)


def _build(kind: type, raw: Any, where: str) -> Any:
    """A dataclass of type `kind` from plain JSON values."""
    if not isinstance(raw, dict):
        raise UserError(f"{where}: wanted an object with fields of {kind.__name__}, got {raw!r}")
    hints = typing.get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    for key in raw:
        if key not in known:
            raise UserError(f"{where}.{key}: no such field; fields are {', '.join(sorted(known))}")
    return kind(**{key: _value(hints[key], value, f"{where}.{key}") for key, value in raw.items()})


def _value(kind: Any, raw: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build(kind, raw, where)
    if origin is tuple and isinstance(raw, list):
        kinds = [args[0]] * len(raw) if args[-1] is Ellipsis else list(args)
        if len(kinds) == len(raw):
            return tuple(_value(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, raw, strict=True)))
    if origin is dict and isinstance(raw, dict):
        return {key: _value(args[1], value, f"{where}[{key}]") for key, value in raw.items()}
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if not isinstance(kind, types.GenericAlias) and origin is None and type(raw) is kind:
        return raw
    raise UserError(f"{where} = {raw!r}: wanted {getattr(kind, '__name__', kind)}")
