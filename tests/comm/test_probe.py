"""What sums gradients between hosts, measured: ranks agree, it can be said in a plan, and is what then sums."""

from typing import Any

import pytest
import torch

from tests.comm.test_collectives import dp_of, drawn
from unisono.comm.collectives import COLLECTIVES
from unisono.comm.collectives.memory import live as memory
from unisono.programs.collectives import pick
from unisono.spec.errors import UsageError
from unisono_contrib.comm import probe as probing
from unisono_contrib.comm.threads import run

pytestmark = pytest.mark.timeout(100)


@pytest.fixture
def several_hosts(monkeypatch):
    """Ranks that do not see each other's memory."""
    monkeypatch.setattr(memory, "sees_all", lambda pg: False)


def probed(ctx, sizes, budget):
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    return probing.probe(world, sizes, budget)


def test_ranks_agree_on_what_they_measure(world) -> None:
    found = world(probed, 3, sizes=(1 << 12, 1 << 14), budget=60.0)
    assert found[0] == found[1] == found[2]
    picks = tuple(pick.Pick(*one) for one in found[0])
    assert pick.read(pick.written(picks)) == picks
    assert COLLECTIVES.read(f"auto:by={pick.written(picks)}"), "a plan can name it"
    assert not any(world(probed, 2, sizes=(1 << 12,), budget=0.0)), "what takes too long is not measured"


def summed(rank, text):
    dp, sums = dp_of(rank, 3, text), []
    for numel in (100, 1000, 20_000, 60_000):
        x = drawn(rank, numel)
        dp.start_all_reduce(x).wait()
        sums.append(x)
    assert dp.algorithm is not None
    ways = [dp.algorithm.pick("all_reduce", x, True).member.name for x in sums]
    return sums, ways, dp.says(), dp.algorithm.settled()


def test_each_size_goes_the_way_that_the_plan_names(several_hosts) -> None:
    theirs = run(3, lambda rank: summed(rank, "engine")[0])
    got = run(3, lambda rank: summed(rank, "auto:by=tree-1000/ring-200000"))
    for (mine, ways, said, settled), sums in zip(got, theirs, strict=True):
        assert ways == ["tree", "ring", "ring", "engine"]
        assert "by=tree-1000/ring-200000" in said and settled == "", "nothing was measured"
        for x, y in zip(mine, sums, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)
    assert all(torch.equal(x, y) for mine in got[1:] for x, y in zip(mine[0], got[0][0], strict=True))
    declared = COLLECTIVES.read("auto:by=tree-1000/ring-200000")
    ways = [declared.way("all_reduce", n, 3, later=True).name for n in (1000, 1001, 200_001)]
    assert ways == ["tree", "ring", "engine"]


def test_what_was_measured_is_said_and_can_be_named(several_hosts, monkeypatch) -> None:
    monkeypatch.setattr(probing, "probe", lambda pg: pick.read("direct-8000"))
    for _, ways, said, settled in run(3, lambda rank: summed(rank, "auto:measured=true")):
        assert ways == ["direct", "direct", "engine", "engine"] and settled == "auto:by=direct-8000"
        assert f"collective={settled}" in said
    monkeypatch.setattr(probing, "probe", lambda pg: ())
    assert {each[3] for each in run(3, lambda rank: summed(rank, "auto:measured=true"))} == {"auto"}


def test_on_one_host_nothing_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(probing, "probe", lambda pg: pytest.fail("it was measured"))
    for text in ("auto:measured=true", "auto:by=ring-200000"):
        for _, ways, said, settled in run(3, lambda rank, text=text: summed(rank, text)):
            assert "ring" not in ways and said.startswith("memory") and settled == ""


@pytest.mark.parametrize(
    "text", ["auto:by=auto-10", "auto:by=memory-10", "auto:by=rnig-10", "auto:by=ring-x"]
)
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        COLLECTIVES.read(text)
