"""A small GPT of which every intermediate result is known: what do its parts give on this rank, in one training step?

Dense or with experts (MoE), in a small parallel layout, weights and input fixed. It is written out rather than built
from wrappers so that what a rank computes is recorded *before* it meets what others computed: the first record that
differs names the rank that was wrong, although soon after everybody's differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from evertrain.diagnose.bench import digest, fractions, whole_numbers


@dataclass(frozen=True)
class Layout:
    """Ranks that share a layer (tensor parallel, or by experts), stages, replicas; the first varies fastest."""

    shard: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        return self.shard * self.pp * self.dp

    def rank(self, shard: int, pp: int, dp: int) -> int:
        return (dp * self.pp + pp) * self.shard + shard


LAYOUTS = (Layout(2, 2, 2), Layout(2, 2, 1), Layout(2, 1, 1), Layout(1, 1, 1))


def blocks(ranks: int) -> list[tuple[int, Layout]]:
    """The largest layout that fits, again and again, so that every rank takes part: first rank and layout of each."""
    found, first = [], 0
    while first < ranks:
        layout = next(one for one in LAYOUTS if one.ranks <= ranks - first)
        found.append((first, layout))
        first += layout.ranks
    return found


@dataclass(frozen=True, kw_only=True)
class Sizes:
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    experts: int
    dtype: str

    def words(self, kind: str) -> str:
        experts = f", {self.experts} experts" if kind == "moe" else ""
        return (
            f"{kind} GPT, {self.layers} layers of {self.width}, {self.heads} heads{experts}, {self.batch} x "
            f"{self.context} tokens of {self.vocabulary}, {self.dtype}"
        )


def places(kind: str, layers: int) -> list[str]:
    """All that is recorded, in the order of computation."""
    parts = ["attention", *(["router"] if kind == "moe" else []), "mlp"]
    forward = [f"layer {layer} {part}" for layer in range(layers) for part in parts]
    return [
        "weights",
        *(f"forward {one}" for one in ("embedding", *forward, "head")),
        "loss",
        *(f"backward {one}" for one in ("head", *reversed(forward), "embedding")),
        *(f"reduced {one}" for one in ("embedding", *forward, "head")),
    ]


class Record:
    """Hashes by place."""

    def __init__(self) -> None:
        self._digests: dict[str, list[str]] = {}

    def add(self, place: str, tensor: Tensor) -> None:
        self._digests.setdefault(place, []).append(digest(tensor))

    def entries(self, order: list[str]) -> list[tuple[int, str, str]]:
        """Number in the order of computation, place, and one digest each."""
        numbers = {place: number for number, place in enumerate(order)}
        return sorted(
            (numbers[place], place, hashlib.sha256("".join(found).encode()).hexdigest()[:16])
            for place, found in self._digests.items()
        )


class Groups:
    """The process groups of one rank's block; made by all ranks of the node in the same order."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.first, self.layout = next((f, one) for f, one in reversed(blocks(ranks)) if f <= rank)
        within = rank - self.first
        self.shard = within % self.layout.shard
        self.pp = within // self.layout.shard % self.layout.pp
        self.dp = within // self.layout.shard // self.layout.pp
        self.sharers: Any = None
        self.replicas: Any = None
        """Of this very part."""
        self.stage: Any = None
        """All that hold this stage."""
        for first, layout in blocks(ranks):
            self._make(first, layout, rank)

    def _make(self, first: int, layout: Layout, rank: int) -> None:
        shards, stages, copies = range(layout.shard), range(layout.pp), range(layout.dp)
        kinds = {
            "sharers": [[layout.rank(s, p, d) for s in shards] for p in stages for d in copies],
            "replicas": [[layout.rank(s, p, d) for d in copies] for p in stages for s in shards],
            "stage": [[layout.rank(s, p, d) for s in shards for d in copies] for p in stages],
        }
        for name, members in kinds.items():
            for one in members:
                if len(one) > 1:
                    group = dist.new_group([first + member for member in one])
                    if rank - first in one:
                        setattr(self, name, group)

    def neighbour(self, step: int) -> int:
        return self.first + self.layout.rank(self.shard, self.pp + step, self.dp)


class _Enter(torch.autograd.Function):
    """Into a part of a layer: what comes back is this rank's share of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Record, place: str, group: Any) -> Tensor:
        ctx.rest = record, place, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        record, place, group = ctx.rest
        gradient = gradient.contiguous()
        record.add(place, gradient)
        return _summed(gradient, group), None, None, None


class _Leave(torch.autograd.Function):
    """Out of a part of a layer: this rank's share of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Record, place: str, group: Any) -> Tensor:
        x = x.contiguous()
        record.add(place, x)
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that hold their experts, or back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], record: Record, places: tuple[str, str], group: Any
    ) -> Tensor:
        ctx.rest = sent, received, record, places[1], group
        if places[0]:
            record.add(places[0], x)
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, record, place, group = ctx.rest
        if place:
            record.add(place, gradient)
        return _exchanged(gradient.contiguous(), received, sent, group), None, None, None, None, None


def _through(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    apply: Callable[..., Tensor] = function.apply
    return apply(*arguments)


def _summed(x: Tensor, group: Any) -> Tensor:
    if group is None:
        return x.clone()
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    if group is None:
        return x.clone()
    result = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


class Part:
    """What one rank holds of the model."""

    def __init__(self, kind: str, sizes: Sizes, groups: Groups, device: torch.device) -> None:
        self.kind, self.sizes, self.groups, self.device = kind, sizes, groups, device
        self.dtype: torch.dtype = getattr(torch, sizes.dtype)
        layout = groups.layout
        self.is_first, self.is_last = groups.pp == 0, groups.pp == layout.pp - 1
        per_stage = sizes.layers // layout.pp
        self.layers = range(groups.pp * per_stage, (groups.pp + 1) * per_stage)
        self.tensor_group = None if kind == "moe" else groups.sharers
        self.weights: dict[str, Tensor] = {}
        width, wide = sizes.width, 4 * sizes.width
        if self.is_first:
            self._weight("embedding", (sizes.vocabulary, width), scale=1.0)
        for layer in self.layers:
            # heads and hidden features are divided among those who share the layer; experts as a whole
            self._weight(f"layer {layer} attention in", (3, width, width), part=1)
            self._weight(f"layer {layer} attention out", (width, width), part=1)
            if kind == "moe":
                self._weight(f"layer {layer} router", (sizes.experts, width))
                for expert in self._experts():
                    self._weight(f"layer {layer} mlp in {expert}", (wide, width))
                    self._weight(f"layer {layer} mlp out {expert}", (width, wide))
            else:
                self._weight(f"layer {layer} mlp in", (wide, width), part=0)
                self._weight(f"layer {layer} mlp out", (width, wide), part=1)
        if self.is_last:
            self._weight("head", (sizes.vocabulary, width))
        replica = groups.dp * layout.shard + groups.shard if kind == "moe" else groups.dp
        shape = (sizes.batch, sizes.context + 1)
        text = F.one_hot(whole_numbers(shape, 0, sizes.vocabulary, f"text {replica}"), sizes.vocabulary).to(device)
        self._tokens, self._targets = text[:, :-1].to(self.dtype), text[:, 1:].float()
        later = torch.ones(sizes.context, sizes.context, dtype=torch.bool, device=device)
        self._later = later.triu(1)

    def _experts(self) -> range:
        held = self.sizes.experts // self.groups.layout.shard
        return range(self.groups.shard * held, (self.groups.shard + 1) * held)

    def _weight(self, name: str, shape: tuple[int, ...], *, part: int | None = None, scale: float = 0.0) -> None:
        """Cut along dimension `part` among those who share the layer."""
        whole = fractions(shape, scale or 2.0 ** -math.ceil(math.log2(shape[-1]) / 2), name)
        if part is not None and self.kind == "dense":
            whole = whole.chunk(self.groups.layout.shard, part)[self.groups.shard]
        self.weights[name] = whole.to(self.dtype).to(self.device).contiguous().requires_grad_()

    def step(self) -> Record:
        """Forward, backward, gradients of all replicas added."""
        record = Record()
        for weight in self.weights.values():
            weight.grad = None
            record.add("weights", weight)
        if self.is_first:
            x = _through(_Leave, self._tokens @ self.weights["embedding"], record, "forward embedding", None)
        else:
            x = self._tokens.new_empty((*self._tokens.shape[:2], self.sizes.width))
            dist.recv(x, self.groups.neighbour(-1))
            x.requires_grad_()
        y = x
        for layer in self.layers:
            y = y + self._attention(layer, y, record)
            y = y + (self._experts_of(layer, y, record) if self.kind == "moe" else self._mlp(layer, y, record))
        if self.is_last:
            torch.autograd.backward(self._loss(y, record))
        else:
            dist.send(y.detach().contiguous(), self.groups.neighbour(1))
            gradient = torch.empty_like(y)
            dist.recv(gradient, self.groups.neighbour(1))
            torch.autograd.backward(y, gradient)
        if not self.is_first:
            assert x.grad is not None
            dist.send(x.grad.contiguous(), self.groups.neighbour(-1))
        self._add_gradients(record)
        return record

    def _norm(self, x: Tensor, record: Record, place: str, group: Any) -> Tensor:
        return _through(_Enter, F.layer_norm(x, x.shape[-1:]), record, f"backward {place}", group)

    def _attention(self, layer: int, x: Tensor, record: Record) -> Tensor:
        place = f"layer {layer} attention"
        h = self._norm(x, record, place, self.tensor_group)
        into = self.weights[f"{place} in"]
        heads = self.sizes.heads * into.shape[1] // self.sizes.width
        q, k, v = (
            (h @ one.T).unflatten(-1, (heads, -1)).transpose(1, 2)  # batch, head, token, feature
            for one in into
        )
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        mixed = scores.masked_fill(self._later, float("-inf")).softmax(-1) @ v
        out = mixed.transpose(1, 2).flatten(2) @ self.weights[f"{place} out"].T
        return _through(_Leave, out, record, f"forward {place}", self.tensor_group)

    def _mlp(self, layer: int, x: Tensor, record: Record) -> Tensor:
        place = f"layer {layer} mlp"
        h = self._norm(x, record, place, self.tensor_group)
        out = F.gelu(h @ self.weights[f"{place} in"].T) @ self.weights[f"{place} out"].T
        return _through(_Leave, out, record, f"forward {place}", self.tensor_group)

    def _experts_of(self, layer: int, x: Tensor, record: Record) -> Tensor:
        """Each token to the one expert that its router likes most."""
        place, sharers = f"layer {layer} mlp", self.groups.sharers
        h = self._norm(x, record, f"layer {layer} router", None).flatten(0, 1)
        logits = _through(
            _Leave, h @ self.weights[f"layer {layer} router"].T, record, f"forward layer {layer} router", None
        )
        probability, chosen = logits.float().softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.stack([(chosen == expert).sum() for expert in range(self.sizes.experts)])
        per_rank = counts.view(self.groups.layout.shard, -1)
        coming = _exchanged(per_rank, [1] * len(per_rank), [1] * len(per_rank), sharers).tolist()
        sent, received = per_rank.sum(1).tolist(), [sum(one) for one in coming]
        rows = _through(_Exchange, h[order], sent, received, record, ("", f"backward {place}"), sharers)
        # by sender, and within it by expert
        parts = torch.split(rows, [count for one in coming for count in one])
        held = len(self._experts())
        done: list[Tensor] = list(parts)
        for at, expert in enumerate(self._experts()):
            mine = torch.cat(parts[at::held])
            hidden = F.gelu(mine @ self.weights[f"{place} in {expert}"].T)
            done[at::held] = torch.split(hidden @ self.weights[f"{place} out {expert}"].T, [one[at] for one in coming])
        back = _through(_Exchange, torch.cat(done), received, sent, record, (f"forward {place}", ""), sharers)
        out = back[order.argsort()] * probability.to(self.dtype).unsqueeze(-1)
        return out.view_as(x)

    def _loss(self, x: Tensor, record: Record) -> Tensor:
        h = self._norm(x, record, "head", None)
        logits = _through(_Leave, h @ self.weights["head"].T, record, "forward head", None)
        loss = -(logits.float().log_softmax(-1) * self._targets).sum() / (self.sizes.batch * self.sizes.context)
        record.add("loss", loss)
        return loss

    def _add_gradients(self, record: Record) -> None:
        for name, weight in self.weights.items():
            assert weight.grad is not None
            part = " ".join(name.split()[:3])
            record.add(f"backward {part}", weight.grad)
            is_shared = self.kind == "moe" and " mlp " not in name
            summed = _summed(weight.grad, self.groups.stage if is_shared else self.groups.replicas)
            record.add(f"reduced {part}", summed)
