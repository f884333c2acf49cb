"""Everything a run holds in memory: schema, tables, model, optimiser; built alike to train, evaluate and predict."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.func import functional_call

from opengem import checkpoint, mesh
from opengem.config import Config, MeshSpec, from_json
from opengem.data.batch import Batch
from opengem.data.columns import nearest
from opengem.data.loader import Loader, input_features
from opengem.data.schema import Feature, Schema
from opengem.data.store import Events
from opengem.errors import UserError
from opengem.kernels.adamw.op import in_one_launch
from opengem.loss import in_batch_softmax, multi_task_loss, task_weights
from opengem.model.gem import GEM, Logits, stream_config
from opengem.model.towers import identities
from opengem.optim import Copies, dense_optimizer, gradient_norm, rate, update
from opengem.sparse.collection import Distributed, EmbeddingCollection
from opengem.sparse.sharded import shard


@dataclass(frozen=True)
class Step:
    """What `Job.learn` did. number: counts from 1. loss: of the global batch; norm: of the dense gradients before
    clipping; both 0-dim on the device.

    stopped: copied to the host behind the step, there once `done` has happened (None: already).
    """

    number: int
    loss: Tensor
    norm: Tensor
    stopped: Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, number: int, loss: Tensor, norm: Tensor, stopped: Tensor) -> Step:
        if stopped.device.type != "cuda":
            return cls(number, loss, norm, stopped.clone(), None)
        copy = torch.empty_like(stopped, device="cpu", pin_memory=True).copy_(stopped, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(number, loss, norm, copy, done)

    def finite(self) -> bool:
        """Whether every loss and gradient was, in this step and before; waits until the device has come here."""
        if self.done is not None:
            self.done.synchronize()
        return not self.stopped.item()


@dataclass
class Job:
    """A model in training or in use. `step` counts optimiser steps; `total_steps` shapes the learning-rate schedule."""

    config: Config
    schema: Schema
    device: torch.device
    dtype: torch.dtype
    embeddings: EmbeddingCollection
    model: GEM
    optimizer: torch.optim.Optimizer
    step: int = 0
    total_steps: int = 1
    events: Events | None = None  # histories in memory, shared by the loaders of all splits
    copies: Copies | None = None  # of the parameters, where another dtype than fp32 computes

    def __post_init__(self) -> None:
        self.stopped = torch.zeros((), device=self.device)  # 1 from the first non-finite step on: nothing is updated

    @property
    def max_lengths(self) -> dict[str, int]:
        """stream -> newest events of a history that the model sees."""
        return {s.name: stream_config(self.config.model, s.name).max_length for s in self.schema.streams}

    @cached_property
    def identities(self) -> list[Feature]:
        """What tells users and candidates apart in the in-batch softmax."""
        return identities(input_features(self.schema, self.config.data))

    def forward(self, batch: Batch, ids: Distributed | None = None) -> Logits:
        """Logits `[B]` by label, of a batch on the job's device. ids: where they were distributed ahead."""
        if self.dtype != torch.float32 and (self.copies is None or self.copies.model is not self.model):
            self.copies = Copies(self.model, self.dtype)
        with torch.autocast(self.device.type, self.dtype, enabled=self.copies is not None):
            parameters = {} if self.copies is None else self.copies.named()
            embedded = self.embeddings(batch) if ids is None else self.embeddings.lookup(ids)
            return functional_call(self.model, parameters, (batch, embedded))

    def loss(self, logits: Logits, batch: Batch) -> Tensor:
        """This process's part of the loss of the global batch: the parts of all processes add up to it."""
        optim, labels = self.config.optim, self.schema.labels
        sums = None
        if mesh.world_size() > 1:
            masses = torch.stack([weight.sum() for weight in task_weights(batch, labels, optim.esmm).values()])
            sums = dict(zip((label.name for label in labels), mesh.sum_over_ranks(masses), strict=True))
        loss = multi_task_loss(logits, batch, labels, optim.task_weights, optim.esmm, sums)
        if logits.towers is not None and optim.in_batch_softmax > 0:
            room = -(-self.config.data.batch_size // mesh.world_size())  # what the loader gives a process at most
            label = next((label for label in labels if not label.given), labels[0])
            softmax = in_batch_softmax(*logits.towers, batch, label.name, self.identities, room)
            loss = loss + optim.in_batch_softmax * softmax
        return loss

    def learn(self, loss: Tensor) -> Step:
        """Backward, check, step, without waiting for the device.

        Once a loss or gradient of any process is not finite, neither this step nor a later one updates anything, so
        whoever trains may look at `Step.finite` a step late, but before the job is saved.
        """
        loss.backward()
        loss = mesh.sum_over_ranks(loss.detach().clone())
        grads = self._gradients()
        norm = gradient_norm(list(grads.values()))
        finite = torch.isfinite(loss) & torch.isfinite(norm) & self.embeddings.finite()
        torch.maximum(self.stopped, ~finite, out=self.stopped)
        factor = rate(self.step, self.total_steps, self.config.optim)
        self.update(grads, factor * self.config.optim.lr, norm)
        self.embeddings.step(factor * self.config.sparse.lr, skip=self.stopped)
        self.step += 1
        if self.config.sparse.check_replicas and mesh.world_size() > 1:
            whole = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
            mesh.assert_equal(whole, "the dense parameters")
        return Step.of(self.step, loss, norm, self.stopped)

    def _gradients(self) -> dict[Tensor, Tensor]:
        """Parameter -> gradient of the global batch, taken from the tensors that computed; zeros where it met none, so
        that every parameter has optimiser state, which a checkpoint needs."""
        computed = {p: p for p in self.model.parameters()} if self.copies is None else self.copies.of
        grads = {p: torch.zeros_like(x) if x.grad is None else x.grad for p, x in computed.items()}
        if mesh.world_size() > 1 or not in_one_launch(self.device):
            grads = {p: grad.float() for p, grad in grads.items()}
        mesh.sum_gradients(list(grads.values()))
        for x in computed.values():
            x.grad = None
        return grads

    def update(self, grads: dict[Tensor, Tensor], lr: float, norm: Tensor) -> None:
        """The dense half of a step."""
        update(self.optimizer, grads, self.copies, lr, norm, self.config.optim.clip_norm, self.stopped)

    def loader(self, folder: Path, split: str, training: bool) -> Loader:
        """Batches of one split, in the order training or evaluation reads them."""
        data = self.config.data
        loader = Loader(
            folder,
            self.schema,
            data,
            max_lengths=self.max_lengths,
            split=split,
            batch_size=data.batch_size if training else data.eval_batch_size * mesh.world_size(),
            rank=mesh.rank(),
            world_size=mesh.world_size(),
            seed=self.config.train.seed,
            events=self.events,
            counted={s.name: stream_config(self.config.model, s.name).counted for s in self.schema.streams},
        )
        self.events = loader.events
        return loader

    def state(self, progress: str) -> dict:
        """What a checkpoint holds, under global names. `progress`: JSON text of where the run stands."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "embeddings": self.embeddings.state_dict()}
        state["random"] = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["random"]["cuda"] = torch.cuda.get_rng_state(self.device)
        return state | {"progress": {"json": progress, "fits": self._fits()}}

    def _fits(self) -> str:
        """What must be alike for a checkpoint to mean the same here, beyond the shapes of its tensors."""
        model, inputs = self.config.model, input_features(self.schema, self.config.data)
        lengths = {"max_length": 1, "counted": 0}
        streams = [replace(stream_config(model, s.name), name=s.name, **lengths) for s in self.schema.streams]
        shape = list(self.model.state_dict()), replace(model, streams=()), streams
        return repr((*shape, self.schema.streams, inputs, self.schema.labels))

    def restore(self, path: Path) -> str:
        """Load a complete checkpoint into this job; returns the progress text it was saved with."""
        self.stopped.zero_()
        state = self.state("")
        checkpoint.load(path, state)
        if state["progress"]["fits"] != self._fits():
            raise UserError(f"checkpoint {path} is of another model, or of a data set with other inputs or labels")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group in self.optimizer.param_groups:
            group["fused"] = True  # which a checkpoint may contradict and `optim.update` relies on
        self.embeddings.load_state_dict(state["embeddings"])
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
        return state["progress"]["json"]


def build(config: Config, schema: Schema) -> Job:
    """A fresh job; parameters depend on `train.seed` alone."""
    device, dtype = pick_device(config)
    streams, labels = (["*", *(s.name for s in schema.streams)], [label.name for label in schema.labels])
    given = [("model.streams", s.name, streams) for s in config.model.streams]
    for field, name, known in given + [("optim.task_weights", name, labels) for name in config.optim.task_weights]:
        if name not in known:
            raise UserError(f"config {field}: {name!r} is not in this data set{nearest(name, known)}")
    torch.manual_seed(config.train.seed)
    features = input_features(schema, config.data)
    embeddings = _embeddings(config, schema, features, device)
    model = GEM(schema, features, config.model, config.sparse.dim).to(device)
    if config.train.compile:
        model.compile()
    optimizer = dense_optimizer(model, config.optim)
    return Job(config, schema, device, dtype, embeddings, model, optimizer)


def _embeddings(
    config: Config, schema: Schema, features: list[Feature], device: torch.device) -> EmbeddingCollection:
    """All tables here in a job of one process, else sharded over its mesh."""
    spec = config.mesh.resolve(mesh.world_size())
    if spec.shard > 1 or spec.expert > 1:
        raise UserError(
            f"config mesh.shard = {spec.shard}, mesh.expert = {spec.expert}: training copies the dense model to every "
            "process and does not split it; set both to 1"
        )
    if mesh.world_size() == 1:
        return EmbeddingCollection(schema, features, config.sparse, device, config.train.seed)
    return shard(schema, features, config.sparse, device, config.train.seed, mesh.build(spec, device.type))


def run_config(run: Path) -> Config:
    """The config of a run folder."""
    path = Path(run) / "config.json"
    if not path.is_file():
        raise UserError(f"{run} is no run folder (no config.json); give the --out folder of `opengem train`")
    return from_json(path.read_text(errors="replace"), str(path))


def open_run(run: Path, data: Path) -> Job:
    """The job of a finished or running run folder, at its newest complete checkpoint, on however many processes."""
    job = build(replace(run_config(run), mesh=MeshSpec()), Schema.load(data))
    newest = checkpoint.find(Path(run) / "checkpoints")
    if newest is None:
        raise UserError(f"{run} has no complete checkpoint; train it first with `opengem train ... --out {run}`")
    job.step = job.total_steps = json.loads(job.restore(newest))["step"]  # who learns on does so at the last rates
    return job


def pick_device(config: Config) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype the config stands for on this machine."""
    name, dtype = config.train.device, config.train.dtype
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("config train.device = 'cuda': this machine has no CUDA device; use --train.device cpu or auto")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return device, getattr(torch, dtype)
