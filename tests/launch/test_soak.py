"""The quick part of `tests.launch.soak`: one script of three faults on four ranks, beside the run without."""

from pathlib import Path

import pytest

from tests.launch import pairs, soak
from tests.verbs.jobs import unisono
from unisono_contrib.programs.chaos import counted, sequel
from unisono_contrib.programs.chaos.script import read

pytestmark = pytest.mark.timeout(240)
PLAN = "dp=4 sync=canonical"
FAULTS = "kill:who=3:step=6:phase=update stop:who=0:step=12:phase=forward cut:who=1:step=20:phase=collective"


def test_a_run_that_loses_ranks_ends_in_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    def start(words: list[str]) -> tuple[int, str, str]:
        done = unisono(tmp_path, *words)
        return done.code, done.out, done.err

    recipe = soak.write_recipe(tmp_path, 30)
    plain = soak.run(recipe, PLAN, start=start)
    got = soak.run(recipe, PLAN, 1, FAULTS, start=start)
    soak.compare(got, plain, 30)
    assert (plain.problems, got.problems) == ([], [])
    assert got.digest() == plain.digest() and got.said["loss"] == plain.said["loss"]
    faults = got.said["faults"]
    assert (faults["injected"], faults["losses"], faults["recovered"], got.said["restarts"]) == (3, 3, 3, 3)
    rows = sequel.what_followed(sequel.read(got.run_dir))
    assert [(row["rank"], row["at_step"], row["in"]) for row in rows] == [
        (3, 6, "update"), (0, 12, "forward"), (1, 20, "collective"),
    ]  # fmt: skip
    assert counted.made_again(counted.read(got.run_dir))[0] == 0  # no whole step was lost
    assert not (plain.run_dir / sequel.FILE).exists() and not (plain.run_dir / counted.FOLDER).exists()
    planted = [line for line in counted.read(got.run_dir) if line.get("step") != 7 or line["rank"] != 2]
    assert counted.audit(
        planted, soak.BATCH // soak.MICRO, soak.MICRO, 30
    )  # and the count would have seen it


def test_three_ranks_lost_in_one_step_cost_nobody_else(tmp_path: Path) -> None:
    """The second and the third while the others leave for a meeting, or are at it."""
    script = read("kill:who=1:step=6 kill:who=2:step=6 kill:who=3:step=6:phase=forward", 4, pairs.STEPS)
    recipe = soak.write_recipe(tmp_path, pairs.STEPS)
    plain = pairs.play(recipe, PLAN, 0, "")
    got = pairs.play(recipe, PLAN, 1, pairs.words(script))
    pairs.judged(got, plain, script)
    assert (plain.problems, got.problems) == ([], [])
    assert pairs.source(got) in ("memory", "snapshot") and got.said["restarts"] == 3


def test_pairs_of_faults_are_drawn_alike_and_said_as_they_are() -> None:
    drawn = [pairs.drawn(seed, pairs.KINDS) for seed in range(300)]
    assert drawn == [pairs.drawn(seed, pairs.KINDS) for seed in range(300)]
    assert all(read(pairs.words(script), 4, pairs.STEPS) == script for script in drawn)
    victims = {fault.who for script in drawn for fault in script.faults}
    assert victims == {0, 1, 2, 3, "helper", "supervisor"}
    assert any(
        one.step == two.step and one.phase == two.phase for one, two in (script.faults for script in drawn)
    )
