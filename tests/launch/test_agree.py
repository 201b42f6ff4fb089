"""Ranks that differ are refused before the first step, on every rank, and the odd one is named."""

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verbs.jobs import words
from unisono.launch.agree import agree, odd_one, tell
from unisono.spec.errors import UnisonoError, UsageError, UserCodeError

RECIPE = {
    "model": {"kind": "mlp", "hidden": (8,)},
    "data": {"source": "digits"},
    "train": {"steps": 2, "global_batch": 8, "micro_batch": 1, "trace_steps": 0},
    "out": {"dir": "runs", "report": False},
}
TEXT = {
    **RECIPE,
    "model": {"n_layer": 1, "n_head": 1, "d_model": 8, "context": 8},
    "data": {"source": "text:words.txt"},
}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_the_odd_one_is_not_of_the_majority(values: list[int]) -> None:
    error = odd_one([{"same": 1, "seed": value} for value in values], [f"h{i}" for i in range(len(values))])
    if len(set(values)) == 1:
        assert error is None
        return
    assert error is not None and error.rank is not None and error.code == "L05" and error.exit == 2
    odd = values[error.rank]
    most = max(map(values.count, values))
    if values.count(values[0]) == most:
        assert odd != values[0], "on a tie rank 0 is right"
    else:
        assert values.count(odd) < most or any(
            values.count(value) == most for value in values if value != odd
        )
    assert error.host == f"h{error.rank}" and f"seed is {odd}" in error.what


def test_a_fact_that_one_rank_lacks_is_a_difference() -> None:
    error = odd_one([{"threads": 2}, {"threads": 2}, {}], ["a", "b", "c"])
    assert (
        error is not None
        and error.rank == 2
        and error.what == "ranks differ: threads is null, the others have 2"
    )


def on_threads(ranks: int, play: Callable[[Any], Any]) -> list[Any]:
    """What `play(ctx)` returns or raises on each of some ranks, which are threads with one store."""
    from torch.distributed import HashStore

    store, said = HashStore(), [None] * ranks

    def live(rank: int) -> None:
        try:
            said[rank] = play(SimpleNamespace(rank=rank, world=ranks, host=f"h{rank}", store=store))
        except Exception as error:
            said[rank] = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return said


def test_all_go_on_with_their_own_result_where_all_agree() -> None:
    said = on_threads(4, lambda ctx: agree(ctx, "it", lambda: ctx.rank, lambda _: {"data": "ab"}))
    assert said == [0, 1, 2, 3]


def test_every_rank_raises_the_same_error() -> None:
    facts = lambda rank: {"seed": 0, "data": "cd" if rank == 2 else "ab"}
    said = on_threads(4, lambda ctx: agree(ctx, "it", lambda: ctx.rank, facts))
    assert len({error.render() for error in said}) == 1
    assert (
        said[0]
        .render()
        .startswith("error U-L05  ranks differ: data is cd, the others have ab, rank 2, host h2\n")
    )
    assert all(error.shared for error in said)


def test_what_fails_on_one_rank_is_raised_on_all() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise UsageError("no such file: x", code="D02")
        if rank == 3:
            raise UsageError("too late", code="D03")

    said = on_threads(4, lambda ctx: agree(ctx, "it", lambda: work(ctx.rank)))
    assert {(error.code, error.rank, error.what) for error in said} == {("D02", 1, "no such file: x")}


def test_a_users_own_error_keeps_its_traceback_where_it_was_raised() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("no more")

    said = on_threads(3, lambda ctx: agree(ctx, "it", lambda: work(ctx.rank)))
    assert isinstance(said[1], ValueError) and said[1].__traceback__ is not None
    assert all(isinstance(said[rank], UserCodeError) and said[rank].rank == 1 for rank in (0, 2))


def test_rank_0_speaks_for_all() -> None:
    def work(rank: int) -> list[int]:
        assert rank == 0
        return [7]

    assert on_threads(3, lambda ctx: tell(ctx, "it", lambda: work(ctx.rank))) == [[7]] * 3

    def fails() -> None:
        raise UsageError("no whole checkpoint", code="K06")

    said = on_threads(3, lambda ctx: tell(ctx, "it", fails))
    assert {(error.code, error.rank) for error in said} == {("K06", 0)}


def one_rank(
    ctx: Any, place: str, recipe: dict[str, Any], plan: str, resume: str = "", backend: str = ""
) -> Any:
    """A rank of `unisono train`, by itself in `place/rankN` or, where there is none, in `place/all`."""
    from unisono.verbs.train import rank as train_rank

    own = Path(place) / f"rank{ctx.rank}"
    os.chdir(own if own.is_dir() else Path(place) / "all")
    ctx = dataclasses.replace(ctx, backend=backend if backend and ctx.rank == 2 else ctx.backend)
    argument = {
        "recipe": json.dumps(recipe),
        "plan": plan,
        "run_dir": resume or "run",
        "resume": bool(resume),
        "config_text": "",
        "checkpoint": "",
        "auto": False,
        "chaos": "",
        "launches": 0,
        "until": 0,
        "speeds": [],
    }
    Path("run").mkdir(exist_ok=True)
    try:
        return train_rank.main(ctx, argument, train_rank.prepare(argument))
    except UnisonoError as error:
        return {
            **error.as_dict(),
            "steps": Path("run/metrics.jsonl").exists(),
            "line": error.render().splitlines()[0],
        }


def odd_folder(place: Path) -> Path:
    """`all` is where ranks stand, `rank2` a copy where rank 2 stands: as on hosts that share no disk."""
    (place / "all").mkdir()
    (place / "all" / "words.txt").write_text(words())
    return place / "all"


def refused(said: list[dict[str, Any]], line: str) -> None:
    assert {one["line"].rpartition(", host")[0] for one in said} == {line}, said
    assert {one["exit"] for one in said} == {2} and {one["rank"] for one in said} == {2}
    assert not any(one["steps"] for one in said), "before the first step"


@pytest.mark.timeout(120)
def test_another_data_file_on_one_rank(world: Any, tmp_path: Path) -> None:
    usual = odd_folder(tmp_path)
    shutil.copytree(usual, tmp_path / "rank2")
    (tmp_path / "rank2" / "words.txt").write_text(words().replace("the", "thy"))
    said = world(one_rank, 4, group=False, place=str(tmp_path), recipe=TEXT, plan="dp=4")
    assert [one["code"] for one in said] == ["U-L05"] * 4
    data = said[0]["what"].split()
    refused(said, f"error U-L05  ranks differ: data is {data[4]} the others have {data[-1]}, rank 2")
    assert data[4].strip(",") != data[-1]


@pytest.mark.timeout(120)
def test_another_backend_on_one_rank(world: Any, tmp_path: Path) -> None:
    odd_folder(tmp_path)
    said = world(one_rank, 4, group=False, place=str(tmp_path), recipe=TEXT, plan="dp=4", backend="nccl")
    refused(said, "error U-L05  ranks differ: backend is nccl, the others have gloo, rank 2")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("harm", ["gone", "cut", "another save"])
def test_one_ranks_checkpoint_is_not_the_others(world: Any, tmp_path: Path, harm: str) -> None:
    usual = odd_folder(tmp_path)
    alone = {"group": False, "place": str(tmp_path), "recipe": TEXT, "plan": "dp=1"}
    world(one_rank, 1, **alone)
    shutil.copytree(usual, tmp_path / "rank2")
    folder = tmp_path / "rank2" / "run/checkpoints/step-000002"
    if harm == "gone":
        shutil.rmtree(folder)
    elif harm == "cut":
        (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-9])
    else:
        shutil.rmtree(usual / "run")
        world(one_rank, 1, **alone)
    for run in (usual / "run", tmp_path / "rank2" / "run"):
        (run / "metrics.jsonl").unlink()
    more = {**TEXT, "train": {**TEXT["train"], "steps": 4}}
    said = world(one_rank, 4, group=False, place=str(tmp_path), recipe=more, plan="dp=4", resume="run")
    lines = {
        "gone": "error U-K01  checkpoint step-2 is damaged: manifest.json: is missing, and its folder too, rank 2",
        "cut": "error U-K01  checkpoint step-2 is damaged: manifest.json: fails its checksum, rank 2",
        "another save": said[0]["line"].rpartition(", host")[0],
    }
    refused(said, lines[harm])
    assert harm != "another save" or said[0]["what"].startswith("ranks differ: checkpoint is step-000002 ")


@pytest.mark.timeout(120)
def test_a_run_is_not_resumed_on_other_data(world: Any, tmp_path: Path) -> None:
    usual = odd_folder(tmp_path)
    world(one_rank, 1, group=False, place=str(tmp_path), recipe=TEXT, plan="dp=1")
    (usual / "words.txt").write_text(words().replace("the", "thy"))
    more = {**TEXT, "train": {**TEXT["train"], "steps": 4}}
    (said,) = world(one_rank, 1, group=False, place=str(tmp_path), recipe=more, plan="dp=1", resume="run")
    assert said["code"] == "U-K05" and "begun on other data" in said["what"]


@pytest.mark.timeout(120)
def test_a_folder_that_another_run_writes_into_is_refused_by_all(world: Any, tmp_path: Path) -> None:
    from unisono.train.state.writing import locked

    odd_folder(tmp_path)
    (tmp_path / "all" / "run").mkdir()
    with locked(tmp_path / "all" / "run"):
        said = world(one_rank, 2, group=False, place=str(tmp_path), recipe=TEXT, plan="dp=2")
    assert [one["code"] for one in said] == ["U-O02"] * 2 and not any(one["steps"] for one in said)
    assert said[0]["line"].startswith("error U-O02  another run writes into this folder, rank 0")


def test_threads_and_device_count_only_where_bits_are_promised() -> None:
    from unisono.config import Recipe, resolve
    from unisono.verbs.train.rank import facts_of

    ctx = SimpleNamespace(backend="gloo", threads=3, local_rank=0)
    corpus = SimpleNamespace(fingerprint="ab")
    of = {
        sync: facts_of(ctx, resolve(Recipe.model_validate(RECIPE), f"dp=2 sync={sync}", 2), corpus)
        for sync in ("canonical", "every_step")
    }
    assert (
        set(of["canonical"]) - set(of["every_step"]) == {"device", "threads"}
        and of["canonical"]["threads"] == 3
    )
