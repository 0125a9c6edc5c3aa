"""A loop that is stopped anywhere and goes on elsewhere sees the very batches, in the very order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from evertrain import ResumableLoader


class Numbers(Dataset[Any]):
    """Each sample is its own index and a random number; notes what was loaded."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return index, random.random() + torch.rand(1).item()


def plain() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4)


def shuffled() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True)


def seeded() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def weighted() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 23, 30))


def replacing() -> DataLoader[Any]:
    dataset = Numbers()
    own = RandomSampler(dataset, replacement=True, num_samples=70, generator=torch.Generator().manual_seed(1))
    return DataLoader(dataset, batch_size=4, sampler=own, drop_last=True)


def distributed() -> DataLoader[Any]:
    dataset = Numbers()
    return DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, 3, 1, seed=5))


def batches_of_its_own() -> DataLoader[Any]:
    dataset = Numbers()
    return DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 5, False))


def single() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=None, shuffle=True)


def workers() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, prefetch_factor=3)


def persistent() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)


IN_PROCESS = [plain, shuffled, seeded, weighted, replacing, distributed, batches_of_its_own, single]


def epochs(loader: ResumableLoader, stop_after: int | None = None) -> Iterator[Any]:
    """What the loop is given in three epochs; the random numbers go on from where they were saved."""
    given = 0
    for epoch in range(loader.epoch, 3):
        for batch in loader:
            yield epoch, [torch.as_tensor(part).tolist() for part in batch]
            given += 1
            if given == stop_after:
                return


def with_random_state(loader: ResumableLoader) -> dict[str, Any]:
    return {"loader": loader.state_dict(), "torch": torch.get_rng_state(), "random": random.getstate()}


def fresh(make: Callable[[], DataLoader[Any]]) -> ResumableLoader:
    random.seed(0)
    torch.manual_seed(0)
    return ResumableLoader(make())


def check_any_stop(make: Callable[[], DataLoader[Any]], stops: list[int]) -> None:
    wanted = list(epochs(fresh(make)))
    assert len({epoch for epoch, _ in wanted}) == 3
    for stop in stops:
        loader = fresh(make)
        first, saved = [], {}
        for one in epochs(loader):
            first.append(one)
            if len(first) == stop:
                saved = with_random_state(loader)
                break
        again = fresh(make)
        torch.rand(7), random.random()  # whatever the script draws before it loads
        again.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["torch"])
        random.setstate(saved["random"])
        assert first + list(epochs(again)) == wanted, stop


@pytest.mark.parametrize("make", IN_PROCESS)
def test_any_batch_may_be_the_last(make: Callable[[], DataLoader[Any]]) -> None:
    count = len(list(epochs(fresh(make))))
    check_any_stop(make, list(range(1, count, max(1, count // 9))))


@pytest.mark.parametrize("make", [workers, persistent])
def test_workers_that_fetch_ahead_change_nothing(make: Callable[[], DataLoader[Any]]) -> None:
    check_any_stop(make, [2, 6])


def test_epochs_differ_and_are_the_samplers_own() -> None:
    dataset = Numbers()
    sampler = DistributedSampler(dataset, 3, 1, seed=5)
    given = [batch for _, batch in epochs(ResumableLoader(DataLoader(dataset, batch_size=2, sampler=sampler)))]
    indices = [index for batch in given for index in batch[0]]
    wanted = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        wanted += list(sampler)
    assert indices == wanted


def test_what_was_given_is_not_loaded_again() -> None:
    loader = fresh(plain)
    for _ in zip(loader, range(3), strict=False):
        saved = loader.state_dict()
    dataset = Numbers()
    again = ResumableLoader(DataLoader(dataset, batch_size=4))
    again.load_state_dict(saved)
    list(again)
    assert dataset.loaded == list(range(12, 23))


@pytest.mark.parametrize("make", [shuffled, seeded, distributed, single, workers])
def test_making_an_iterator_draws_nothing_from_the_scripts_random_numbers(make: Callable[[], DataLoader[Any]]) -> None:
    loader = fresh(make)
    before = torch.get_rng_state()
    iterator = iter(loader)
    if make is workers:
        next(iterator)
    else:
        loader._order.begin(0, 1, batches=0, samples=0)
        list(loader._order)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_number_of_ranks_goes_on_at_the_same_place_in_the_whole() -> None:
    def loaders(world: int) -> list[ResumableLoader]:
        dataset = Numbers(48)
        return [
            ResumableLoader(DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, world, rank, seed=9)))
            for rank in range(world)
        ]

    everything = list(DistributedSampler(Numbers(48), 1, 0, seed=9))
    given, states = [], []
    for loader in loaders(4):
        for batch, _ in zip(loader, range(2), strict=False):
            given += batch[0].tolist()
            state = loader.state_dict()
        states.append(state)
    assert sorted(given) == sorted(everything[:24])
    rest = []
    for loader, state in zip(loaders(2), states, strict=False):
        loader.load_state_dict(state)
        rest += [index for batch in loader for index in batch[0].tolist()]
    assert sorted(rest) == sorted(everything[24:])


def test_a_restart_after_the_number_of_ranks_has_changed_goes_on_where_it_was() -> None:
    def loader(world: int, state: dict[str, Any]) -> ResumableLoader:
        dataset = Numbers(48)
        made = ResumableLoader(DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, world, 0, seed=9)))
        made.load_state_dict(state)
        return made

    def given(batches: ResumableLoader) -> Iterator[tuple[list[int], dict[str, Any]]]:
        return ((batch[0].tolist(), batches.state_dict()) for batch in batches)

    dataset = Numbers(48)
    first = ResumableLoader(DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, 4, 0, seed=9)))
    halfway = [state for _, state in given(first)][1]
    batches, states = zip(*given(loader(2, halfway)), strict=True)
    assert len(batches) == 4
    for number in range(len(batches)):
        again = loader(2, states[number])
        assert [batch for batch, _ in given(again)] == list(batches[number + 1 :])
    everything = list(DistributedSampler(dataset, 1, 0, seed=9))
    once_more, _ = zip(*given(loader(1, states[1])), strict=True)
    assert [index for batch in once_more for index in batch] == everything[24 + 2 * 2 * 3 :]


def test_a_loop_that_is_left_early_ends_its_epoch() -> None:
    loader = fresh(shuffled)
    for _ in loader:
        break
    assert loader.epoch == 1 and loader.state_dict()["batches"] == 0
    assert len(list(loader)) == len(loader) == 6


def test_an_iterable_dataset_is_refused_with_what_to_use() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match="StatefulDataLoader"):
        ResumableLoader(DataLoader(Stream()))


def test_all_else_is_the_loaders_own() -> None:
    loader = fresh(plain)
    assert loader.batch_size == 4 and loader.dataset.size == 23
