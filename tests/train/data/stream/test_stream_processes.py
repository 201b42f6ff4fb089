"""Worker processes prepare the samples that threads would, say what is wrong as they do, and end with their rank."""

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.train.data.stream import shards
from tests.train.data.test_load import refused
from unisono.config import DataConfig, ModelConfig
from unisono.library.streaming import StreamingLoader
from unisono.spec.errors import UserCodeError
from unisono.train.data.dataset import Corpus, fetched
from unisono.train.data.feed import Permuted
from unisono.train.data.load import load

pytestmark = pytest.mark.timeout(120)
SHAPE = (3, 6, 6)
TRANSFORM = """\
import os, time
import numpy as np

def shift(picture, draw):
    pixels = np.asarray(picture).transpose(2, 0, 1)
    return pixels if draw is None else pixels / 255 + draw.normal(size=pixels.shape)

def raises(picture, draw):
    return 1 / 0

def small(picture, draw):
    return np.zeros((3, 2, 2))

def who(picture, draw):
    return np.full((3, 6, 6), os.getpid(), np.float32)

def for_ever(picture, draw):
    print("working", flush=True)
    while True:
        pass
"""


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Corpus]:
    (tmp_path / "mine.py").write_text(TRANSFORM)
    pattern = shards.written(tmp_path / "tar", shards.picture_tars(24, 3), "tar")

    def load_it(kind: str, transform: str = "", source: str = f"tar:{pattern}", **keys: Any) -> Corpus:
        name = f"{tmp_path / 'mine.py'}:{transform}" if transform else ""
        model = keys.pop("model", ModelConfig(kind="convnet", image=SHAPE))
        data = {"val_fraction": 0.25, "cache": str(tmp_path / "cache"), "workers": 2, **keys}
        return load(DataConfig(source=source, worker_kind=kind, transform=name, **data), model)

    return load_it


def read(corpus: Corpus, transform: str = "") -> list[torch.Tensor]:
    """Everything of two epochs, and what is held out."""
    positions = np.arange(2 * len(corpus.train))
    numbers = corpus.train.numbers_at(3, positions)  # type: ignore[attr-defined]
    return [*fetched(corpus.train, 3, positions, numbers), *fetched(corpus.val, 3, *2 * [np.arange(6)])]


@pytest.mark.parametrize("transform", ["", "shift"])
def test_processes_give_the_bits_of_threads(opened: Callable[..., Corpus], transform: str) -> None:
    threads, processes = (read(opened(kind, transform)) for kind in ("threads", "processes"))
    assert len(threads[0]) == 36 and all(map(torch.equal, threads, processes))
    assert len(torch.unique(threads[0], dim=0)) == (36 if transform else 18)  # each visit draws for itself


def test_the_order_of_steps_and_their_draws_are_those_of_any_world(opened: Callable[..., Corpus]) -> None:
    def steps(kind: str, ranks: int) -> list[torch.Tensor]:
        feeds = [Permuted(opened(kind, "shift").train, 3, 12, 1) for _ in range(ranks)]
        shares = [
            range(*pair) for pair in zip(*[np.linspace(0, 12, ranks + 1).astype(int)[i:] for i in (0, 1)])
        ]
        seen = [
            leaf.inputs
            for step in range(3)
            for feed, share in zip(feeds, shares)
            for leaf in feed.fetch(step, share)
        ]
        for feed in feeds:
            feed.close()
        return seen

    assert all(map(torch.equal, steps("threads", 1), steps("processes", 3)))


def test_text_is_tokenised_by_processes(opened: Callable[..., Corpus], tmp_path: Path) -> None:
    pattern = shards.written(tmp_path / "j", [shards.lines(shards.texts(20, i)) for i in range(3)], "jsonl")
    source, model = f"jsonl:{pattern},stream=true,cache_gb=1e-9", ModelConfig(context=16)
    for packing in ("stream", "documents"):
        threads, processes = (
            opened(kind, source=source, model=model, packing=packing).train.fetch(np.arange(20))
            for kind in ("threads", "processes")
        )
        assert all(map(torch.equal, threads, processes))


def test_work_is_done_by_as_many_processes_as_were_named(opened: Callable[..., Corpus]) -> None:
    ids = {int(x[0, 0, 0]) for x in read(opened("processes", "who", workers=3))[0]}
    assert len(ids) == 3 and os.getpid() not in ids
    assert {int(x[0, 0, 0]) for x in read(opened("threads", "who"))[0]} == {os.getpid()}


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_what_is_wrong_is_said_alike(opened: Callable[..., Corpus], tmp_path: Path, kind: str) -> None:
    samples = [(f"{i}", {"png": shards.picture(i)[0], "cls": b"1"}) for i in range(3)]
    samples[1] = ("1", {"png": b"no picture", "cls": b"1"})
    body = shards.archive(samples)
    source = f"tar:{shards.written(tmp_path / 't', [body], 'tar')}"
    error = refused("D14", lambda: read(opened(kind, source=source, val_fraction=0.0)))
    assert error.where == f"{tmp_path / 't' / '000.tar'}:{body.index(b'no picture')}"
    for name, what in (("raises", "ZeroDivisionError: division by zero"), ("small", "[3, 2, 2]")):
        with pytest.raises(UserCodeError) as raised:
            read(opened(kind, name))
        assert what in raised.value.what and f"mine.py:{name}" in raised.value.what
        assert re.search(r"/tar/00\d\.tar:\d+$", raised.value.likely)
        assert name == "small" or "mine.py:9 in raises" in raised.value.where
    refused("C03", lambda: opened(kind, "nothing"))


def test_a_transform_that_nobody_calls_is_refused(opened: Callable[..., Corpus]) -> None:
    error = refused("C06", lambda: opened("threads", "shift", source="stdlib", model=ModelConfig(context=8)))
    assert error.where == "data.transform"


def workers_of(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if "stream.preparing" in " ".join(each.cmdline())]


def test_a_worker_that_is_killed_is_one_clear_error_and_others_come_after_it(
    opened: Callable[..., Corpus],
) -> None:
    before, corpus = workers_of(os.getpid()), opened("processes")
    alike = read(corpus)
    workers = [each for each in workers_of(os.getpid()) if each not in before]
    assert len(workers) == 2
    for worker in workers:
        worker.kill()
    error = refused("D16", lambda: read(corpus))
    assert (
        "ended with -9" in error.what
        and "/tar/00" in error.where
        and error.where.rpartition(":")[2].isdigit()
    )
    psutil.wait_procs(workers, 20)
    assert all(map(torch.equal, alike, read(corpus)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_a_rank_that_is_killed_or_stopped(
    opened: Callable[..., Corpus], tmp_path: Path, how: signal.Signals
) -> None:
    """One whose workers are in the middle of a function that never returns."""
    opened("threads")
    source, said = f"tar:{tmp_path / 'tar'}", os.pipe()
    rank = os.fork()
    if not rank:
        os.dup2(said[1], 2)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            next(iter(StreamingLoader(
                source, 8, image=SHAPE, worker_kind="processes", workers=2, cache=str(tmp_path / "cache"),
                transform=f"{tmp_path / 'mine.py'}:for_ever",
            )))  # fmt: skip
        finally:
            os._exit(9)
    os.close(said[1])
    workers = list[psutil.Process]()
    try:
        with open(said[0], closefd=True) as lines:
            working = (line for line in lines if line == "working\n")  # notes may come between
            next(working), next(working)
            workers = workers_of(rank)
            assert len(workers) == 2
            os.killpg(rank, how) if how is signal.SIGINT else os.kill(rank, how)
            if how is signal.SIGINT:  # the loop waits for its batch until the rank ends
                os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
            assert not psutil.wait_procs(workers, 20)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)


def test_a_loop_of_ones_own_draws_by_position(opened: Callable[..., Corpus], tmp_path: Path) -> None:
    opened("threads")
    keys = {
        "image": SHAPE,
        "epochs": 2,
        "cache": str(tmp_path / "cache"),
        "transform": f"{tmp_path}/mine.py:shift",
    }
    whole = [batch.inputs for batch in StreamingLoader(f"tar:{tmp_path / 'tar'}", 8, **keys)]
    loader = StreamingLoader(f"tar:{tmp_path / 'tar'}", 8, worker_kind="processes", workers=2, **keys)
    loader.load_state_dict({**loader.state_dict(), "position": 16})
    assert all(torch.equal(*pair) for pair in zip(whole[2:], (batch.inputs for batch in loader), strict=True))
