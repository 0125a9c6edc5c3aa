"""Where in the data was the loop when it saved? A plain DataLoader that can say, and go on from there.

Counted is what the loop has been given, not what workers have fetched ahead. After a restart the indices up to there
are drawn and dropped, without loading what they stand for. All random numbers of an epoch, those of samplers and of
workers, follow from one seed, the epoch and the batch: a resumed epoch is the same to the bit as one that ran through,
and the script's own random numbers are left alone.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

_STEPS = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


class ResumableLoader:
    """Wraps a DataLoader so that a Checkpointer can keep the place in it.

        loader = evertrain.ResumableLoader(DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)))
        checkpointer = evertrain.Checkpointer({"model": model, "optimizer": optimizer, "loader": loader})
        start = checkpointer.load()
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...

    Each iteration is one epoch; the sampler's `set_epoch` is called for it. The first iteration after a load gives
    what was left of its epoch, which may be nothing. An iteration that is left early ends its epoch. Samplers may be
    anything that draws from torch's random numbers or from a generator of its own.

    With another number of ranks, the samples that all of them have been given together are skipped (with a sampler
    that divides them, such as DistributedSampler).
    """

    def __init__(self, loader: DataLoader[Any], seed: int | None = None) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise TypeError("an IterableDataset has no indices to skip; use torchdata's StatefulDataLoader")
        self._loader = loader
        self._seed = torch.initial_seed() & _MASK if seed is None else seed
        self._epoch = 0
        self._batches = 0
        self._samples = 0
        """Given to the loop in this epoch, on this rank."""
        self._skipped = 0
        """So many of these samples had another number of ranks been given; batches are counted from there."""
        self._before: dict[str, Any] = {}
        """States of the sampler's generators at the beginning of the epoch."""
        self._resumed = False
        self._order = _Order(loader)
        self._base_seeds = torch.Generator()
        self._inner: DataLoader[Any] = copy.copy(loader)
        # a DataLoader refuses to have these set, because a loader in use would not notice
        vars(self._inner).update(
            {self._order.attribute: self._order, "dataset": _Seeded(loader.dataset), "generator": self._base_seeds}
        )

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that is under way, or of the next one."""
        return self._epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._batches = self._samples = self._skipped = 0
        generators = self._order.generators()
        if self._resumed and self._before:
            for name, generator in generators.items():
                generator.set_state(self._before[name])
        else:
            self._before = {name: generator.get_state() for name, generator in generators.items()}
        self._resumed = False
        self._order.begin(
            self._epoch,
            (self._seed + self._epoch * _STEPS) & _MASK,
            batches=self._batches,
            samples=self._skipped,
        )
        self._base_seeds.manual_seed(self._order.seed)
        try:
            for batch in self._inner:
                self._batches += 1
                self._samples += self._order.sizes.popleft()
                yield batch
        finally:
            # also where the loop is left early: CPython ends the iteration then
            self._epoch += 1
            self._batches = self._samples = self._skipped = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "samples": self._samples,
            "skipped": self._skipped,
            "world": self._order.world,
            "seed": self._seed,
            "generators": dict(self._before) if self._samples else self._now(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there with the next iteration."""
        self._epoch, self._seed = state["epoch"], state["seed"]
        self._batches, self._samples, self._skipped = state["batches"], state["samples"], state["skipped"]
        if state["world"] != self._order.world:
            self._batches = 0
            self._samples = self._skipped = self._samples * state["world"] // self._order.world
        self._before = {name: value.clone() for name, value in state["generators"].items()}
        self._resumed = True

    def _now(self) -> dict[str, Any]:
        return {name: generator.get_state() for name, generator in self._order.generators().items()}


class _Indices(list[Any]):
    """The indices of one batch, and the seed for whatever is random about loading it."""

    seed = 0


class _Order:
    """Stands where the DataLoader had its sampler of batches (or of single samples, without batches)."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.batched = loader.batch_sampler is not None
        self.attribute = "batch_sampler" if self.batched else "sampler"
        self._sampler: Any = loader.batch_sampler if self.batched else loader.sampler
        self.seed = 0
        self.sizes: deque[int] = deque()
        """Samples of the batches that are on their way to the loop."""
        self._skipped = (0, 0)

    @property
    def world(self) -> int:
        """Among so many are the samples divided."""
        return int(getattr(self._single, "num_replicas", 1))

    @property
    def _single(self) -> Any:
        return getattr(self._sampler, "sampler", self._sampler)

    def generators(self) -> dict[str, torch.Generator]:
        """What the samplers draw from, if they have something of their own."""
        found = {"batch": self._sampler, "sample": self._single}
        named = {name: getattr(sampler, "generator", None) for name, sampler in found.items()}
        return {name: generator for name, generator in named.items() if isinstance(generator, torch.Generator)}

    def begin(self, epoch: int, seed: int, *, batches: int, samples: int) -> None:
        """The next iteration is this epoch, without its first samples, and without the first batches of the rest."""
        self.seed = seed
        self._skipped = batches, samples
        self.sizes.clear()
        for sampler in (self._sampler, self._single):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        batches, samples = self._skipped
        number = 0
        for indices in self._drawn(samples):
            number += 1
            if number <= batches:
                continue
            marked = _Indices(indices if self.batched else [indices])
            marked.seed = (self.seed + number * _STEPS) & _MASK
            self.sizes.append(len(marked))
            yield marked

    def _drawn(self, samples: int) -> Iterator[Any]:
        """What the sampler says, with random numbers of its own; `samples` are left out."""
        sampler = self._sampler
        if samples and type(sampler) is BatchSampler:
            rest = _Rest(sampler.sampler, samples)
            sampler, samples = BatchSampler(rest, sampler.batch_size, sampler.drop_last), 0
        stream = _Stream(self.seed)
        drawn = iter(sampler)
        while True:
            with stream:
                try:
                    indices = next(drawn)
                except StopIteration:
                    return
            if samples > 0:
                samples -= len(indices) if self.batched else 1
            else:
                yield indices


class _Rest:
    """A sampler without its first samples."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self._sampler, self._skipped, None)


class _Stream:
    """Torch's random numbers, from a seed of their own; outside of it they are what they were."""

    def __init__(self, seed: int) -> None:
        self._own = torch.Generator().manual_seed(seed).get_state()
        self._outer = self._own

    def __enter__(self) -> None:
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = torch.get_rng_state()
        torch.set_rng_state(self._outer)


class _Seeded:
    """The dataset, with all random numbers in a worker set by the batch that it loads."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitems__(self, indices: _Indices) -> Any:
        self._seed(indices)
        many = getattr(self._dataset, "__getitems__", None)
        return many(list(indices)) if callable(many) else [self._dataset[index] for index in indices]

    def __getitem__(self, indices: _Indices) -> Any:
        """Without batches: one sample."""
        self._seed(indices)
        return self._dataset[indices[0]]

    @staticmethod
    def _seed(indices: _Indices) -> None:
        if get_worker_info() is None:
            return  # the script's own random numbers, which a checkpoint keeps
        random.seed(indices.seed)
        torch.manual_seed(indices.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(indices.seed & 0xFFFFFFFF)
