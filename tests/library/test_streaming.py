"""A loop of one's own over shards: killed and resumed on other numbers of ranks, it sees what one rank would."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.train.data.stream import shards
from tests.train.data.test_load import refused
from unisono.library.streaming import StreamingLoader

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StreamingLoader]:
    folder = tmp_path_factory.mktemp("shards")
    tars = shards.written(folder / "tar", shards.picture_tars(50, 5), "tar")
    lines = shards.written(folder / "lines", [shards.lines(shards.texts(15, i)) for i in range(4)], "jsonl")

    def made(kind: str = "pictures", batch: int = 8, **more: object) -> StreamingLoader:
        keys = {"image": (3, 6, 6)} if kind == "pictures" else {"context": 24}
        source = f"tar:{tars}" if kind == "pictures" else f"jsonl:{lines},stream=true"
        every = {"seed": 5, "cache": str(folder / "cache"), "workers": 1, "epochs": 3, **keys, **more}
        return StreamingLoader(source, batch, **every)  # type: ignore[arg-type]

    return made


@pytest.mark.parametrize("kind", ["pictures", "text"])
def test_killed_and_resumed_on_other_ranks_it_sees_the_batches_of_one(
    places: Callable[..., StreamingLoader], kind: str
) -> None:
    alone = [batch.inputs for batch in places(kind)]
    samples = len(places(kind).corpus.train)
    assert len(alone) == len(places(kind)) == -(-3 * samples // 8)
    state, seen = places(kind).state_dict(), list[torch.Tensor]()
    for ranks, steps in ((4, 3), (2, 4), (3, 5), (4, 10**6)):
        loaders = [places(kind, rank=rank, world=ranks) for rank in range(ranks)]
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
        walks = [iter(loader) for loader in loaders]
        for _ in range(steps):
            parts = [next(walk, None) for walk in walks]
            if parts[0] is None:
                break
            seen.append(torch.cat([part.inputs for part in parts if part is not None]))
            states = [loader.state_dict() for loader in loaders]
            assert all(each == states[0] for each in states) and len(json.dumps(states[0])) < 1024
            state = states[0]
        for walk in walks:
            next(walk, None)  # read, never used: whoever is killed has read ahead
            walk.close()
    assert len(seen) == len(alone) and all(torch.equal(a, b) for a, b in zip(seen, alone, strict=True))


def test_each_sample_comes_once_an_epoch_and_the_numbers_say_which(
    places: Callable[..., StreamingLoader],
) -> None:
    batches = list(places(batch=10))
    numbers = torch.cat([batch.samples for batch in batches]).reshape(3, -1)
    assert all(sorted(epoch.tolist()) == [*range(50)] for epoch in numbers)
    assert numbers[0].tolist() != numbers[1].tolist()
    for inputs, targets, samples in batches:
        assert [shards.number_of(x) for x in inputs.numpy()] == samples.tolist()
        assert targets.tolist() == (samples % 4).tolist()


def test_a_loader_that_ended_begins_again_and_one_without_end_goes_on(
    places: Callable[..., StreamingLoader],
) -> None:
    loader = places(epochs=1)
    assert [len(list(loader)) for _ in range(2)] == [7, 7]
    endless = iter(places(epochs=None))
    assert sum(len(next(endless).samples) for _ in range(20)) == 160
    endless.close()
    with pytest.raises(TypeError):
        len(places(epochs=None))


def test_the_state_of_other_data_is_refused_and_ranks_must_be_in_the_world(
    places: Callable[..., StreamingLoader],
) -> None:
    loader = places()
    refused("D19", lambda: loader.load_state_dict({**loader.state_dict(), "data": "another"}))
    with pytest.raises(ValueError):
        places(rank=2, world=2)
    parts = [next(iter(places(batch=3, rank=rank, world=4))) for rank in range(4)]
    assert sum(len(part.samples) for part in parts) == 3
    assert np.concatenate([part.targets for part in parts]).shape == (3,)
