"""Weighted multi-task binary cross entropy, the in-batch softmax, and the running sums behind the training curve.

The loss of a task is the weighted sum of its log losses over the GLOBAL weight sum (over all ranks and micro-batches),
so that moving samples between ranks never changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from opengem import mesh
from opengem.data.batch import Batch
from opengem.data.schema import Feature, Label


def task_weights(batch: Batch, labels: Sequence[Label], esmm: bool = False) -> dict[str, Tensor]:
    """float32 `[B]` for each label: the sample weight where the label counts, else 0.

    A conditional label counts where its condition is 1; under ESMM it counts everywhere. An unknown label (NaN, null in
    the data) counts nowhere.
    """
    counted = [replace(label, given="") if esmm else label for label in labels]
    return {label.name: batch.weights * label.counts(batch.labels) for label in counted}


def multi_task_loss(
    logits: dict[str, Tensor], batch: Batch, labels: Sequence[Label], scale: dict[str, float], esmm: bool = False,
    weight_sums: dict[str, Tensor] | None = None) -> Tensor:
    """Scalar float32 loss: sum over tasks of `scale` x sum(weight x log loss) / weight sum.

    logits: label -> `[B]`. weight_sums: label -> global weight sum (default: that of this batch). A task without weight
    adds 0, so an empty batch has loss 0 and zero gradients.
    """
    weights = task_weights(batch, labels, esmm)
    total = batch.weights.new_zeros((), dtype=torch.float32)
    for label in labels:
        weight, target = weights[label.name], batch.labels[label.name].nan_to_num(0.0)
        if esmm and label.given:
            losses = _product_log_loss(logits[label.name].float(), logits[label.given].float(), target)
        else:
            losses = F.binary_cross_entropy_with_logits(logits[label.name].float(), target, reduction="none")
        mass = weight.sum() if weight_sums is None else weight_sums[label.name]
        total = total + scale.get(label.name, 1.0) * (weight * losses).sum() / mass.clamp_min(1e-30)
    return total


def in_batch_softmax(
    user: Tensor, item: Tensor, batch: Batch, label: str, features: Sequence[Feature], room: int) -> Tensor:
    """Scalar float32: this process's part of the loss of telling the candidate of every positive from all others.

    For a sample with weight w and label y: w y x cross entropy of its own candidate among the candidates of all samples
    of the GLOBAL batch, by inner products of user and item (float32 `[B, dim]`); summed, over the global sum of w y.
    The parts of all processes add up to the loss, as do their gradients. No contrasts to a sample are
    - samples of the same candidate, those with all its `features` of role item (without any, all candidates differ);
    - other positive samples of the same user, with all its `features` of role user (without any, all users differ).
    What is drawn as a candidate often is contrasted often, which is not corrected: where negatives are drawn by
    popularity q, the log loss and this one have the same optimum, log p(item | user) / q(item).

    label: the one that says what is positive; NaN counts as 0. features: ids that tell users and candidates apart.
    room: rows that a process may have; with several processes, ValueError where it has more (alone: any).
    An empty batch, or one without a positive, has loss 0 and zero gradients. Nothing waits for the device. Collective.
    Takes about 3 times the rows of the process x those of the global batch x 4 bytes.
    Source: Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations", RecSys 2019.
    """
    weight = batch.weights * batch.labels[label].nan_to_num(0.0)
    items, users = ([batch.features[f.name] for f in features if f.role == role] for role in ("item", "user"))
    marks = torch.ones_like(batch.rows), (batch.labels[label] > 0).long(), *items, *users
    exists, positive, *ids = mesh.gather_padded(torch.stack(marks, 1), room).T
    rows = mesh.gather_padded(torch.cat([item, weight[:, None]], 1), room)
    scores, mass = user @ rows[:, :-1].T, rows[:, -1].detach().sum()
    same_item, same_user = _all_equal(items, ids[: len(items)]), _all_equal(users, ids[len(items) :])
    own = torch.arange(user.shape[0], device=user.device)[:, None] + mesh.rank() * room  # its place among all
    apart = (exists == 0) | same_item | (same_user & (positive > 0))
    apart = apart & (own != torch.arange(scores.shape[1], device=user.device))
    missed = F.cross_entropy(scores.masked_fill_(apart, -torch.inf), own[:, 0], reduction="none")
    return (weight * missed).sum() / mass.clamp_min(1e-30)


def _all_equal(own: list[Tensor], others: list[Tensor]) -> Tensor | bool:
    """bool `[B, all]`: where each of the columns agrees; False without columns."""
    equal = [mine[:, None] == theirs for mine, theirs in zip(own, others, strict=True)]
    return reduce(torch.logical_and, equal) if equal else False


def _product_log_loss(logits: Tensor, given: Tensor, target: Tensor) -> Tensor:
    """Log loss of p = s(a) s(b), s the sigmoid; 1 - p = s(-a) + s(a) s(-b) keeps it stable for logits of any size."""
    log_p = F.logsigmoid(logits) + F.logsigmoid(given)
    log_not_p = torch.logaddexp(F.logsigmoid(-logits), F.logsigmoid(logits) + F.logsigmoid(-given))
    return -(target * log_p + (1 - target) * log_not_p)


class Meter:
    """Sums of (weight, weight x log loss, weight x label, weight x prediction) per task, kept on the device.

    Progressive validation: `add` takes logits computed BEFORE the step that learns from the batch.
    """

    def __init__(self, labels: Sequence[Label], device: torch.device) -> None:
        self.labels = list(labels)
        self.sums = torch.zeros(len(self.labels), 4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, logits: dict[str, Tensor], batch: Batch) -> None:
        weights = task_weights(batch, self.labels)
        rows = []
        for label in self.labels:
            logit, weight = logits[label.name].float(), weights[label.name]
            target = batch.labels[label.name].nan_to_num(0.0)
            loss = F.binary_cross_entropy_with_logits(logit, target, reduction="none")
            parts = [weight, weight * loss, weight * target, weight * logit.sigmoid()]
            rows.append(torch.stack([part.sum(dtype=torch.float64) for part in parts]))
        self.sums += torch.stack(rows)

    def read(self) -> dict[str, tuple[float, float, float, float]]:
        """label -> (weight, loss sum, label sum, prediction sum) of all processes; collective, one host read."""
        sums = mesh.sum_over_ranks(self.sums.clone()).tolist()
        return {label.name: tuple(row) for label, row in zip(self.labels, sums, strict=True)}

    def reset(self) -> None:
        self.sums.zero_()
