"""Who is late: its rank, part of the step, module and beginning, and nobody where nobody is."""

import pytest

from tests.report.late import MODULES, lines, nobody, steps
from unisono.report.stragglers import NOBODY, stragglers


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optim"])
@pytest.mark.parametrize("who", [0, 3])
def test_rank_phase_and_beginning(phase: str, who: int) -> None:
    late = lambda step, rank: (0.2, phase, "") if rank == who and step >= 21 else (0.0, "", "")
    (one,) = stragglers(steps(lines(late)))
    assert (one.rank, one.phase, one.since_step, one.until_step, one.rotating) == (who, phase, 21, 60, False)
    assert one.cost_s_per_step == pytest.approx(0.2, abs=0.02) and 0.6 < one.share < 0.8
    assert one.module == "" and f"rank {who} is late in {phase}, since step 21" in one.says()


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("module", MODULES)
def test_the_module_as_it_was_timed(phase: str, module: str) -> None:
    late = lambda step, rank: (0.2, phase, module) if rank == 2 and step >= 8 else (0.0, "", "")
    (one,) = stragglers(steps(lines(late)))
    assert (one.rank, one.phase, one.module) == (2, phase, module)


@pytest.mark.parametrize("module", MODULES)
def test_the_module_by_when_its_gradients_left(module: str) -> None:
    """No module was timed, and each has a bucket of its own."""
    late = lambda step, rank: (0.2, "backward", module) if rank == 1 else (0.0, "", "")
    (one,) = stragglers(steps(lines(late, timed=0, buckets=len(MODULES))))
    assert (one.rank, one.phase, one.module) == (1, "backward", module)


def test_one_bucket_says_nothing_of_modules() -> None:
    late = lambda step, rank: (0.2, "backward", "head") if rank == 1 else (0.0, "", "")
    (one,) = stragglers(steps(lines(late, timed=0)))
    assert (one.rank, one.phase, one.module) == (1, "backward", "")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_healthy_ranks_are_not_blamed(ranks: int, seed: int) -> None:
    """Steps differ by a tenth, or by half: then all wait for whoever is last, and no rank is to blame."""
    assert stragglers(steps(lines(nobody, ranks, 300, noise=0.08, seed=seed))) == []
    for one in stragglers(steps(lines(nobody, ranks, 300, noise=0.5, seed=seed))):
        assert one.rotating and one.rank == NOBODY


@pytest.mark.parametrize("turn", [1, 3, 12])
def test_ranks_that_take_turns_are_blamed_on_nobody(turn: int) -> None:
    late = lambda step, rank: (0.2, "data", "") if step // turn % 4 == rank else (0.0, "", "")
    (one,) = stragglers(steps(lines(late, steps=240)))
    assert one.rotating and one.rank == NOBODY and one.phase == "data"
    assert one.cost_s_per_step == pytest.approx(0.2, abs=0.02)


def test_a_tenth_of_a_step_is_silence() -> None:
    late = lambda step, rank: (0.007, "backward", "") if rank == 2 else (0.0, "", "")
    assert stragglers(steps(lines(late, noise=0.0))) == []
    late = lambda step, rank: (0.02, "backward", "") if rank == 2 else (0.0, "", "")
    assert [one.rank for one in stragglers(steps(lines(late, noise=0.0)))] == [2]


def test_two_one_after_the_other() -> None:
    """Each of them has its own beginning and end."""

    def late(step: int, rank: int) -> tuple[float, str, str]:
        if rank == 1 and step <= 50:
            return 0.3, "data", ""
        return (0.2, "backward", "blocks.2.mlp") if rank == 3 and step > 90 else (0.0, "", "")

    first, second = stragglers(steps(lines(late, steps=150)))
    assert (first.rank, first.phase, first.since_step, first.until_step) == (1, "data", 1, 50)
    assert (second.rank, second.module, second.since_step) == (3, "blocks.2.mlp", 91)


def test_a_late_stage_is_compared_with_its_like() -> None:
    """No other rank of the pipeline has its blocks: they are compared with those of others that are of one kind."""
    late = lambda step, rank: (0.2, "backward", "blocks.2.mlp") if rank == 2 else (0.0, "", "")
    written = lines(late)
    for of_step in written:
        for rank, said in enumerate(of_step):
            busy = said["time"]["forward"] + said["time"]["backward"]
            said["calls"] = [["pp", "recv", 4096, "backward", "", 0.01, 0.01 + 0.3 - busy, 0.01, 0]]
            here = {name: pair for name, pair in said.get("modules", {}).items() if f"blocks.{rank}." in name}
            said |= {"modules": here} if "modules" in said else {}
    (one,) = stragglers(steps(written, {rank: {"pp": rank} for rank in range(4)}))
    assert (one.rank, one.phase, one.module) == (2, "backward", "blocks.2.mlp")


def test_where_rows_are_left_out_the_ranks_own_times_count() -> None:
    """The row of the call for which others waited is not there on the one that was late for it."""
    late = lambda step, rank: (0.2, "forward", "") if rank == 1 else (0.0, "", "")
    written = lines(late)
    for of_step in written:
        for rank, said in enumerate(of_step):
            said["calls_left_out"] = 1
            said["calls"] = said["calls"] if rank > 1 else []
    (one,) = stragglers(steps(written))
    assert (one.rank, one.phase) == (1, "forward")


def test_a_run_of_one_rank_and_no_steps() -> None:
    assert stragglers([]) == [] and stragglers(steps(lines(nobody, ranks=1))) == []
