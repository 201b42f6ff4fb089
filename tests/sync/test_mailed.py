"""diloco through a mailbox: runs without a connection compute what replicas of one run compute."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from tests.sync.mailed import (
    FACTS,
    SYNC,
    Peer,
    inner_state,
    kept,
    letter_of,
    like,
    outer_of,
    peer,
    published,
    together,
    zed,
)
from tests.sync.outer import distance, flat, play, recipe_of
from unisono.config import LaunchConfig, resolve
from unisono.config.resolve import on_any_ranks
from unisono.spec.errors import ConfigProblems, HangError, UsageError
from unisono.train.step.run import Run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


@pytest.fixture(params=["memory", "file"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/box"


@pytest.fixture
def url() -> str:
    return f"memory://{uuid4().hex}"


def test_two_runs_compute_the_bits_of_two_replicas(source: Path, any_url: str) -> None:
    """Weights after every step, momentum, what the inner optimiser keeps, and the samples that were read."""
    one = partial(peer, source, url=any_url, steps=8, peers=2)
    runs = together(lambda: one("a"), lambda: one("b"))
    inner: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    whole = play(
        recipe_of(source, 8, 4, optimizer="adamw", clip=0.5), f"dp=2 collective=messages {SYNC}",
        watch=lambda run, step: inner.update({(run.mesh.rank, step): inner_state(run)}),
    )  # fmt: skip
    for replica, run in enumerate(runs):
        other = whole[replica]
        assert run.steps == [*range(8)]
        for mine, theirs in zip(run.weights, other.weights, strict=True):
            assert torch.equal(mine, flat(theirs))
        for name, x in other.state.items():
            assert torch.equal(run.state[name], x), name
        assert all(torch.equal(run.center[name], x) for name, x in other.center.items())
        assert all(torch.equal(run.inner[key], x) for key, x in inner[replica, 7].items())
        assert run.said("consensus") == pytest.approx(
            [m["consensus"] for m in other.metrics if "consensus" in m]
        )
        assert run.said("cohort") == [2, 2, 2] and run.said("round") == [1, 2, 3]


def test_what_is_posted_and_fetched_is_counted(source: Path, url: str) -> None:
    runs = together(*(partial(peer, source, name, url, steps=6, peers=3) for name in "abc"))
    size = sum(x.nbytes for x in runs[0].center.values())
    for run in runs[1:]:  # the first one publishes too
        assert all(size < n < 1.3 * size for n in run.said("posted_bytes"))
        assert all(2 * size < n < 2.6 * size for n in run.said("fetched_bytes"))
    assert all(3 * size < n < 3.6 * size for n in runs[0].said("posted_bytes"))


def test_a_peer_that_leaves_is_waited_for_no_longer_and_one_that_joins_has_all_from_its_first_merge_on(
    source: Path, url: str
) -> None:
    joined, merged = threading.Event(), threading.Event()

    def wait_for_c(run: object, step: int) -> None:
        if step == 6:  # the first step of the third round: b has gone
            merged.set()
            assert joined.wait(30)

    def late() -> Peer:
        assert merged.wait(30)
        return peer(source, "c", url, watch=lambda run, step: joined.set(), peers=2)

    a, b, c = together(
        lambda: peer(source, "a", url, watch=wait_for_c, peers=2),
        lambda: peer(source, "b", url, until=6, peers=2),
        late,
    )
    assert a.said("cohort") == [2, 2, 2, 2] and b.steps == [*range(6)] and c.steps == [*range(6, 12)]
    for step in (8, 11):  # a third and a fourth round: a and c
        assert torch.equal(a.weights[step], c.weights[c.steps.index(step)])
    for name in a.state:
        assert torch.equal(a.state[name], c.state[name]), name
    assert float(a.state["rounds"]) == 4
    read_twice = [sample for step in a.samples + b.samples + c.samples for sample in step]
    assert {*map(tuple, a.samples)}.isdisjoint(map(tuple, b.samples))
    assert len(read_twice) == 2 * (12 + 6 + 6)


def test_who_comes_later_reads_samples_of_an_order_of_its_own(source: Path, url: str) -> None:
    places = []
    for name in "abcab":
        peer(source, name, url, until=1, peers=1, watch=lambda run, step: places.append(run.sync.lane))
    assert [(lane.place, lane.count) for lane in places[::2]] == [(0, 1), (1, 1), (2, 1), (0, 1), (1, 1)]


def test_a_peer_counts_for_its_tokens(source: Path, url: str) -> None:
    sync = "sync=diloco:h=3,outer_lr=1,outer_momentum=0"
    start: list[dict[str, torch.Tensor]] = []
    first = lambda run, step: start.append(outer_of(run)) if step < 0 else None
    small, large = together(
        lambda: peer(source, "a", url, sync, steps=3, peers=2, watch=first),
        lambda: peer(source, "b", url, sync, steps=3, peers=2, batch=6),
    )
    a, b = (letter_of(url, 0, name) for name in "ab")
    assert b.weight == 3 * a.weight == 3 * 3 * 2 * 8
    for name, x in small.center.items():
        want = start[0][name] - (a.tensors[name] + 3 * b.tensors[name]) / 4
        assert distance(x, want) < 1e-14 and torch.equal(x, large.center[name])


def with_zed(url: str, rounds: int, value: float = 0.01, tokens: float = 48.0) -> Callable[..., None]:
    """Before the first step, zed posts for so many rounds; it is further than the run, which need not wait for it."""

    def write(run: Run, step: int) -> None:
        if step < 0:
            box = zed(url)
            for round in range(rounds):
                box.post(round, like(outer_of(run), value), tokens, FACTS)

    return write


def closed_by_zed(url: str, starts: list[dict[str, torch.Tensor]]) -> Callable[..., None]:
    """Round 0 is over before the run under test posts; in round 1 zed has posted already."""
    box = zed(url)

    def write(run: Run, step: int) -> None:
        starts.append(outer_of(run))
        if step == 1:
            box.post(0, like(starts[0], 0.01), 48.0, FACTS)
            assert [letter.peer for letter in box.collect(0, quorum=1)] == ["zed"]
            box.post(1, like(starts[0], 0.02), 48.0, FACTS)

    return write


def test_a_late_delta_counts_in_the_next_round_where_there_is_a_quorum_and_is_dropped_where_not(
    source: Path,
) -> None:
    keeps, drops = (f"memory://{uuid4().hex}" for _ in "ab")
    starts: list[dict[str, torch.Tensor]] = []
    kept = peer(source, "c", keeps, steps=6, watch=closed_by_zed(keeps, starts), quorum=1)
    peer(source, "c", drops, steps=6, watch=closed_by_zed(drops, []))
    late, both = (letter_of(keeps, round, "c") for round in (0, 1))
    alone = letter_of(drops, 1, "c")
    assert kept.said("cohort") == [1, 2]
    assert (late.weight, both.weight, alone.weight) == (48.0, 96.0, 48.0)
    for name, x in starts[0].items():  # in round 0 zed alone counts: Nesterov's first step
        assert distance(starts[4][name], x - 0.7 * 1.5 * 0.01) < 1e-12
        assert distance(both.tensors[name], (late.tensors[name] + alone.tensors[name]) / 2) < 1e-12
    assert float(kept.state["late_tokens"]) == 0
    assert all(not x.any() for name, x in kept.state.items() if name.endswith("/late"))


@pytest.mark.parametrize("gone", [True, False])
def test_a_run_that_slept_through_rounds_goes_on_from_what_others_have_published(
    source: Path, url: str, gone: bool
) -> None:
    """gone: its round is over and dropped; else others have ended the round, and the next one too."""
    box, seen, round = zed(url), dict[str, Any](), 4 if gone else 2

    def write(run: Run, step: int) -> None:
        if step == 1:
            if not gone:
                box.post(0, like(outer_of(run), 0.01), 48.0, FACTS)
                box.collect(0, quorum=1)
            published(url, round, outer_of(run))
            box.leave()
        if step == 2:
            seen.update(step=run.step, outer=outer_of(run), state=kept(run))

    run = peer(source, "c", url, steps=18, watch=write, until=round * 3 + 2)
    assert run.steps == [0, 1, 2, round * 3, round * 3 + 1]
    assert all(bool((x == 0.25).all()) for x in seen["outer"].values())
    assert all(bool((x == 0.125).all()) for n, x in seen["state"].items() if n.endswith("outer_momentum"))
    assert seen["step"] == round * 3 and int(seen["state"]["rounds"]) == round and not seen["state"]["tokens"]


@pytest.mark.parametrize("at", [4, 6])
def test_a_run_that_is_started_again_goes_on_as_if_it_had_not_ended(
    source: Path, tmp_path: Path, at: int
) -> None:
    whole_url, url = (f"memory://{uuid4().hex}" for _ in "ab")
    whole = peer(source, "c", whole_url, watch=with_zed(whole_url, 4))
    folder = tmp_path / "run"
    first = peer(
        source, "c", url, watch=with_zed(url, 4), save_at=at, folder=folder, until=at + 1, leaves=False
    )
    again = peer(source, "c", url, begin=next((folder / "checkpoints").iterdir()))
    assert first.steps == [*range(at + 1)] and again.steps == [*range(at, 12)]
    for mine, theirs in zip(again.weights, whole.weights[at:], strict=True):
        assert torch.equal(mine, theirs)
    assert all(torch.equal(again.state[name], x) for name, x in whole.state.items())


def test_a_run_that_is_started_again_finds_that_others_are_further(
    source: Path, tmp_path: Path, url: str
) -> None:
    folder = tmp_path / "run"
    peer(source, "c", url, save_at=4, folder=folder, until=5, leaves=False)
    start = zed(url).join()[1]
    assert start is not None
    published(url, 3, {name: x for name, x in start.tensors.items() if not name.startswith("momentum/")})
    again = peer(source, "c", url, begin=next((folder / "checkpoints").iterdir()), until=10)
    assert again.steps == [9]
    assert all(bool((x == 0.25).all()) for x in again.center.values())


def test_a_run_that_stops_at_the_end_of_a_round_posts_and_merges_when_it_comes_back(
    source: Path, tmp_path: Path
) -> None:
    whole_url, url, folder = f"memory://{uuid4().hex}", f"memory://{uuid4().hex}", tmp_path / "run"
    whole = peer(source, "c", whole_url, watch=with_zed(whole_url, 4))
    first = peer(
        source,
        "c",
        url,
        watch=with_zed(url, 4),
        stop=lambda step: step == 5,
        until=7,
        save_at=6,
        folder=folder,
    )
    assert first.said("round") == [1] and letter_of(url, 1, "c").weight == 48.0
    again = peer(source, "c", url, begin=next((folder / "checkpoints").iterdir()))
    for mine, theirs in zip(again.weights, whole.weights[6:], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("plan", ["", "tp=2 "])
def test_a_request_to_stop_is_heard_while_a_run_waits_for_others(
    source: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    monkeypatch.setattr("unisono.comm.outside._TURN", 0.05)
    folder, box, calls = tmp_path / "run", zed(url), list[int]()
    box.beat(0)

    def stop(step: int) -> bool:
        calls.append(step)
        return step > 2 or (step == 2 and calls.count(2) > 2)

    first = peer(source, "c", url, plan + SYNC, stop=stop, until=4, save_at=3, folder=folder)
    assert [report.stop for report in first.reports] == [False, False, False, True]
    assert not first.said("cohort") and letter_of(url, 0, "c").weight == 48.0
    assert [living.name for living in box.peers()] == ["zed"]
    box.post(0, letter_of(url, 0, "c").tensors, 48.0, FACTS)
    box.leave()
    again = peer(source, "c", url, plan + SYNC, begin=next((folder / "checkpoints").iterdir()), steps=6)
    assert again.steps == [3, 4, 5] and int(again.state["rounds"]) == 2
    assert {peer.name for peer in zed(url).peers()} == set()


@pytest.mark.parametrize("plan", ["tp=2", "shard=2", "pp=2", "dp=2"])
def test_a_run_may_be_cut_inside_in_any_way(source: Path, plan: str) -> None:
    urls = [f"memory://{uuid4().hex}" for _ in "ab"]
    whole = peer(source, "c", urls[0], steps=6, watch=with_zed(urls[0], 2))
    for round in range(2):  # letters hold whole parameters
        zed(urls[1]).post(round, letter_of(urls[0], round, "zed").tensors, 48.0, FACTS)
    sync = f"{SYNC},inside=2" if plan == "dp=2" else SYNC
    cut = peer(source, "c", urls[1], f"{plan} {sync}", steps=6)
    one, other = (letter_of(url, 1, "c") for url in urls)
    assert one.weight == other.weight
    for name, x in one.tensors.items():
        assert distance(other.tensors[name], x) < 1e-9, name
    assert whole.said("round") == cut.said("round") == [1, 2]


def test_who_waits_for_peers_that_do_not_come_ends_in_words(source: Path, url: str) -> None:
    with pytest.raises(HangError, match="1 of 2 peers have come"):
        peer(source, "c", url, peers=2, timeout=0.01)
    assert zed(url).peers() == ()


def test_peers_that_play_something_else_are_refused(source: Path, url: str) -> None:
    def write(run: Run, step: int) -> None:
        if step < 0:
            zed(url).post(0, like(outer_of(run), 0.01), 48.0, {**FACTS, "h": 5})

    with pytest.raises(UsageError, match="peer zed has h 5, this one, c, 3") as error:
        peer(source, "c", url, watch=write)
    assert error.value.code == "L05"


@pytest.mark.parametrize(
    ("plan", "launch", "says"),
    [
        (SYNC, {"mailbox": "memory://x"}, "this run has none"),
        (SYNC, {"peer": "milan"}, "without a mailbox this run has no peers"),
        (
            "sync=every_step",
            {"mailbox": "memory://x", "peer": "a"},
            "has nothing to exchange through a mailbox",
        ),
        (
            "dp=2 sync=gossip",
            {"mailbox": "memory://x", "peer": "a"},
            "has nothing to exchange through a mailbox",
        ),
        (
            f"dp=2 {SYNC}",
            {"mailbox": "memory://x", "peer": "a"},
            "the replicas of a run are in lock-step, and dp=2",
        ),
        (f"{SYNC},fragments=2", {"mailbox": "memory://x", "peer": "a"}, "fragments=2 needs a link"),
        (f"{SYNC},delay=1", {"mailbox": "memory://x", "peer": "a"}, "delay=1 needs a link"),
        (f"{SYNC},warmup=3", {"mailbox": "memory://x", "peer": "a"}, "warmup=3 needs a link"),
        (
            f"dp=2 {SYNC},inside=2 codec=int8",
            {"mailbox": "memory://x", "peer": "a"},
            "goes through a mailbox as it is",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(
    source: Path, plan: str, launch: dict[str, Any], says: str
) -> None:
    recipe = recipe_of(source, 6).model_copy(update={"launch": LaunchConfig(**launch)})
    with pytest.raises(ConfigProblems) as error:
        resolve(recipe, f"{plan} precision=fp64")
    assert any(says in problem.what for problem in error.value.problems)


def test_a_plan_that_is_only_asked_about_has_no_peers(source: Path) -> None:
    recipe = recipe_of(source, 6).model_copy(update={"launch": LaunchConfig(mailbox="memory://x", peer="a")})
    assert resolve(on_any_ranks(recipe), "dp=2 precision=fp64").plan.dp == 2
