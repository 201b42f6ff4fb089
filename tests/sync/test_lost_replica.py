"""A replica that is killed in a run under a policy whose replicas differ: another one takes its place."""

import json
from pathlib import Path

import pytest

from tests.verbs import jobs

PROOF = Path(__file__).parents[2] / "examples" / "proof.toml"
slow = pytest.mark.slow


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("sync", "kill"),
    [
        (
            "diloco:h=4,fragments=2,delay=1",
            "who=2:step=5",
        ),  # in the step that merges what the one before has sent
        pytest.param("diloco:h=4", "who=1:step=6", marks=slow),  # within a round
        pytest.param("diloco:h=4", "who=0:step=4", marks=slow),  # the first one, in a step that meets
        pytest.param("local_sgd:h=3", "who=1:step=6", marks=slow),
        pytest.param("gossip:ring", "who=1:step=6", marks=slow),
        pytest.param("gossip:exponential,push=true", "who=2:step=6", marks=slow),
        pytest.param("noloco:h=3", "who=1:step=6", marks=slow),
    ],
)
def test_a_replica_that_is_killed_costs_no_step_and_little_of_the_loss(
    tmp_path: Path, sync: str, kill: str
) -> None:
    def trained(name: str, *more: str) -> tuple[dict, list[int]]:
        place = tmp_path / name
        place.mkdir()
        words = [
            str(PROOF),
            "--no-out.report",
            "--train.steps",
            "16",
            "--plan",
            f"dp=3 sync={sync}",
            "--json",
        ]
        done = jobs.unisono(place, "train", *words, *more)
        assert done.code == 0, done.err
        assert not done.left
        lines = (jobs.runs_of(place)[-1] / "metrics.jsonl").read_text().splitlines()
        return done.object, [json.loads(line)["step"] for line in lines]

    calm, steps = trained("calm")
    killed, same_steps = trained("killed", "--chaos", f"kill:{kill}")
    assert steps == same_steps == list(range(1, 17))
    assert killed["val_loss"] == pytest.approx(calm["val_loss"], rel=0.02)
    assert calm["val_loss"] < 5.3
