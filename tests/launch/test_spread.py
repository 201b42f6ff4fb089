"""Who sits where, and what a run goes on with when hosts are lost or come."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.members import Members, Shape, assign
from unisono.config import Recipe, resolve
from unisono.launch.background_replanner import Situation
from unisono.launch.run.membership import among_host, places
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.verbs.train.planning import LOOKS, Replanner, best_for
from unisono.verbs.train.spreading import Spreading, hosts_of, shrunk, spread_of

RECIPE = {"model": {"kind": "gpt", "n_layer": 4, "n_head": 2, "d_model": 32, "context": 16, "vocab": 64},
          "train": {"global_batch": 16, "micro_batch": 2, "steps": 100}}  # fmt: skip


def resolved(plan: str, **train: int):
    return resolve(Recipe.model_validate({**RECIPE, "train": {**RECIPE["train"], **train}}), plan)


@given(st.dictionaries(st.integers(0, 5), st.integers(1, 4), min_size=1), st.data())
def test_ranks_sit_in_different_slots_and_who_sits_stays(room: dict[int, int], data) -> None:
    every = [(host, index) for host, count in room.items() for index in range(count)]
    held = data.draw(st.lists(st.sampled_from(every), unique=True))
    ranks = data.draw(st.integers(1, len(every)))
    chosen = places(room, ranks, held)
    assert len(set(chosen)) == ranks and set(chosen) <= set(every) and chosen == sorted(chosen)
    assert len(set(chosen) & set(held)) == min(ranks, len(held)), (
        "a process that lives is kept before one is made"
    )
    for rank, (host, _) in enumerate(chosen):
        local, count = among_host(chosen, rank)
        assert count == sum(other == host for other, _ in chosen) and 0 <= local < count
    with pytest.raises(ValueError):
        places(room, len(every) + 1)


def test_fewer_replicas_share_the_same_leaves() -> None:
    found = resolved("dp=4")
    spread = spread_of(found.recipe, replace(found.plan, dp=3))
    assert spread is not None and spread.ranks == 3 and spread.speeds == (1.0,) * 3
    given_ = assign(8, Shape(dp=3), Members.first(3), spread.speeds)
    assert sorted(leaf for leaves in given_.values() for leaf in leaves) == list(range(8))


@pytest.mark.parametrize(
    ("plan", "room", "ranks"),
    [
        ("dp=4", 3, 3),
        ("dp=4 sync=canonical", 3, 3),
        ("dp=4 sync=every_step:speeds=2/1/1/1", 3, 3),
        ("dp=2 pp=2", 3, 2),
        ("dp=4", 9, 4),
        ("dp=2 shard=2", 2, 2),
    ],
)
def test_a_run_shrinks_to_the_replicas_that_there_is_room_for(plan: str, room: int, ranks: int) -> None:
    found = resolved(plan)
    spread = Spreading(found.recipe, found.plan)(room, "")
    assert spread is not None and spread.ranks == ranks
    inner = Plan.parse(spread.plan)
    assert (inner.pp, inner.shard) == (found.plan.pp, found.plan.shard)


def test_where_no_replica_fits_the_planner_is_asked() -> None:
    found = resolved("pp=4")
    assert shrunk(found.recipe, found.plan, 3) is None
    assert Spreading(found.recipe, found.plan)(3, "") is None
    spread = Spreading(found.recipe, found.plan, lambda ranks: Plan.parse("pp=2") if ranks == 2 else None)(
        3, ""
    )
    assert spread is not None and spread.ranks == 2
    other = partial(best_for, found.recipe, found.plan, {"HOME": "/nonexistent"})
    spread = Spreading(found.recipe, found.plan, other)(3, "")
    assert spread is not None and 1 <= spread.ranks <= 3


def test_hosts_are_named_this_one_first() -> None:
    assert hosts_of("localhost,b,c:3", 4)[0] == 2
    assert [(guest.name, guest.room) for guest in hosts_of("localhost,b,c:3", 4)[1]] == [("b", 2), ("c", 3)]
    for wrong in (
        "b,localhost",
        "",
        "localhost,b:0",
        "localhost,b:x",
        "localhost,b,b",
        "localhost,-oProxyCommand=x",
    ):
        with pytest.raises(UsageError):
            hosts_of(wrong, 4)


def situation(plan: str, **changed) -> Situation:
    found = resolved(plan)
    spread = spread_of(found.recipe, found.plan)
    assert spread is not None
    base = Situation(spread, spread.ranks, 1, spread.ranks, 0.5, 200, 1.0, 20e6, 1e-3, {}, True)
    return replace(base, **changed)


def replanner(plan: str) -> Replanner:
    found = resolved(plan)
    return Replanner(found.recipe, found.plan, {"HOME": "/nonexistent"})


def test_leaves_go_to_the_quicker_replicas_once_it_is_sure() -> None:
    even = situation("dp=4", busy=dict.fromkeys(range(4), 0.1), changed=False)
    uneven = replace(even, busy={0: 0.1, 1: 0.1, 2: 0.1, 3: 0.4})
    asked = replanner("dp=4")
    for now in (even, *[uneven] * (LOOKS - 1), even, *[uneven] * (LOOKS - 1)):
        assert asked(now).spread is None, "it may pass"
    told = asked(uneven)
    assert told.spread is not None and told.spread.ranks == 4 and "replica 3" in told.spread.why
    given_ = assign(8, Shape(dp=4), Members.first(4), told.spread.speeds)
    assert len(given_[3]) == 1 and sum(map(len, given_.values())) == 8


def test_on_one_host_the_same_command_has_the_same_bits() -> None:
    uneven = situation("dp=4", busy={0: 0.1, 1: 0.1, 2: 0.1, 3: 0.4}, changed=False, hosts=1)
    asked = replanner("dp=4")
    assert all(asked(uneven).spread is None for _ in range(2 * LOOKS))


def test_a_canonical_run_keeps_its_leaves_where_it_must() -> None:
    """Its replicas have powers of two of them."""
    uneven = situation("dp=4 sync=canonical", busy={0: 0.1, 1: 0.1, 2: 0.1, 3: 0.15}, changed=False)
    asked = replanner("dp=4 sync=canonical")
    assert all(asked(uneven).spread is None for _ in range(2 * LOOKS))


def test_a_move_has_to_pay() -> None:
    told = replanner("dp=4")(situation("dp=4"))
    assert told.spread is not None or "planner" in told.says
    last = replanner("dp=4")(situation("dp=4", left=1, move_s=100.0))
    assert last.spread is None and "planner" in last.says
