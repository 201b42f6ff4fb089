"""Operations of all ranks, checked without playing them: right plans pass, and what is left out or swapped is found."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.parallel.test_meta import corpus, seen
from unisono.cli import main
from unisono.comm.imagined import Made
from unisono.config import DataConfig, ModelConfig, Recipe, Resolved, TrainConfig, resolve
from unisono.train.build.rehearsal import Rehearsed
from unisono_contrib.verify.static import StaticProof, between, prove

PLAN = "pp=2 dp=2 tp=2"
RECIPE = Recipe(
    model=ModelConfig(n_layer=2, n_head=2, d_model=8, context=8, vocab=24),
    data=DataConfig(source="stdlib"),  # not read
    train=TrainConfig(global_batch=4, micro_batch=1),
)
KEPT: dict[int, Rehearsed] = {}


def resolved() -> Resolved:
    return resolve(RECIPE, PLAN, None)


def look(rank: int) -> Rehearsed:
    """Each rank is run once for all tests."""
    from unisono.comm.imagined import imagined
    from unisono.train.build.rehearsal import rehearse

    if rank not in KEPT:
        with imagined(rank, 8) as calls:
            KEPT[rank] = rehearse(resolved().recipe, resolved().plan, corpus("gpt"), rank, calls)
    return KEPT[rank]


def changed(rank: int, change: Callable[[list[Made]], list[Made]]) -> StaticProof:
    """The proof where one rank's calls are others."""

    def one(asked: int) -> Rehearsed:
        own = look(asked)
        return replace(own, calls=change(list(own.calls))) if asked == rank else own

    return prove(resolved(), corpus("gpt"), one)


def without(op: str, axis: str) -> Callable[[list[Made]], list[Made]]:
    def change(calls: list[Made]) -> list[Made]:
        at = next(i for i, call in enumerate(calls) if (call.op, call.axis) == (op, axis))
        return calls[:at] + calls[at + 1 :]

    return change


def first(op: str, axis: str, **fields: int) -> Callable[[list[Made]], list[Made]]:
    def change(calls: list[Made]) -> list[Made]:
        at = next(i for i, call in enumerate(calls) if (call.op, call.axis) == (op, axis))
        return [*calls[:at], replace(calls[at], **fields), *calls[at + 1 :]]  # type: ignore[arg-type]

    return change


def backwards(calls: list[Made]) -> list[Made]:
    """The first collectives of two axes in another order."""
    tp = next(i for i, call in enumerate(calls) if call.axis == "replica")
    dp = next(i for i, call in enumerate(calls) if call.axis == "dp")
    calls[tp], calls[dp] = calls[dp], calls[tp]
    return calls


def test_a_plan_of_eight_ranks_passes_by_six_of_them() -> None:
    proof = prove(resolved(), corpus("gpt"), look)
    assert proof.passed and proof.problems == () and proof.ranks == 8
    assert len(proof.looked_at) == 6 and proof.calls > 8 * 10


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (0, without("send", "pp"), "waits for ever"),
        (4, without("send", "pp"), "waits for ever"),
        (4, without("arrived", "pp"), "waits for ever|never takes|has room"),
        (0, without("all_reduce", "replica"), "waits for ever"),
        (1, without("all_gather", "tp"), "where rank"),
        (5, without("reduce_scatter", "tp"), "where rank"),
        (2, without("all_reduce", "dp"), "where rank|makes"),
        (1, first("all_gather", "tp", nbytes=7), "bytes"),
        (2, first("all_reduce", "dp", nbytes=7), "bytes"),
        (0, first("send", "pp", nbytes=7), "has room for"),
        (4, first("all_reduce", "replica", nbytes=7), "rows bring"),
        (2, backwards, "where rank"),
    ],
)  # fmt: skip
def test_what_lacks_a_partner_is_found(
    rank: int, change: Callable[[list[Made]], list[Made]], words: str
) -> None:
    proof = changed(rank, change)
    assert not proof.passed
    assert any(word in text for word in words.split("|") for text in proof.problems), proof.problems


def test_two_rows_that_wait_for_each_other_are_found() -> None:
    """Each sends only after it has received."""

    def row(peer: int) -> list[Made]:
        ranks = (0, 1)
        return [Made("pp", op, 8, peer, ranks, "pp") for op in ("recv", "arrived", "send")]

    found = list(between([row(1), row(0)], {0: 0, 1: 1}))
    assert len(found) == 2 and all("waits for ever" in text for text in found)
    ahead = [row(1), [*row(0)[2:], *row(0)[:2]]]
    assert list(between(ahead, {0: 0, 1: 1})) == []


def test_the_world_may_have_thousands(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    words = ["verify", "--static", "--json", "--model.n_layer", "2", "--model.n_head", "2", "--model.d_model", "8",
             "--model.context", "8", "--train.global_batch", "2048", "--plan", "dp=1024 pp=2 tp=2 micros=2"]  # fmt: skip
    assert main(words) == 0
    got = json.loads(capsys.readouterr().out)
    (result,) = got["results"]
    assert got["pass"] and result["ranks"] == 4096 and len(result["looked_at"]) == 6


def test_rows_that_hold_the_model_twice_meet() -> None:
    rows = [seen("mlp", "pp=2 schedule=dualpipe dp=2", rank) for rank in (0, 2)]
    assert list(between([row.calls for row in rows], {0: 0, 1: 0, 2: 1, 3: 1})) == []
