"""What a run leaves: the contract's files, the contract's keys."""

import gzip
import json
import tomllib
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import Done, unisono
from unisono.observe.metrics import read_lines

pytestmark = pytest.mark.timeout(120)

LINE = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "time", "bytes_sent", "mem_mib"}
TIME = {"data", "forward", "backward", "comm_exposed", "wait", "optim"}
OBJECT = {
    "schema_version",
    "run_dir",
    "steps",
    "loss",
    "val_loss",
    "tokens_per_s",
    "ranks",
    "plan",
    "restarts",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    place = jobs.folder_with(tmp_path_factory.mktemp("trained"))
    done = unisono(place, "train", "recipe.toml", "--out.report", "--train.eval_every", "10", "--json")
    return done, jobs.runs_of(place)[-1]


def test_the_object(trained: tuple[Done, Path]) -> None:
    done, run = trained
    assert done.code == 0 and done.left == (), done.err
    said = done.object
    assert said.keys() >= OBJECT
    assert (said["steps"], said["ranks"], said["restarts"], said["schema_version"]) == (30, 4, 0, 1)
    assert said["plan"].startswith("dp=2 pp=2") and said["run_dir"] == f"runs/tiny/{run.name}"
    assert 0 < said["loss"] < 5.6 and 0 < said["val_loss"] < 5.6 and said["tokens_per_s"] > 0


def test_the_files(trained: tuple[Done, Path]) -> None:
    _, run = trained
    made = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    wanted = {
        "config.resolved.toml",
        "env.json",
        "metrics.jsonl",
        "latest",
        "report.html",
        "report.png",
        "prediction.json",
    }
    wanted |= {f"events/rank{n}.jsonl" for n in range(4)} | {f"trace/rank{n}.json.gz" for n in range(4)}
    wanted |= {"checkpoints/step-000030/manifest.json"}
    assert wanted <= made
    assert "error.json" not in made
    assert not [name for name in made if ".part" in name or ".tmp" in name or name.startswith(".")]
    assert (run / "latest").read_text() == "checkpoints/step-000030\n"
    assert (run.parent / "latest").read_text() == run.name + "\n"


def test_the_lines(trained: tuple[Done, Path]) -> None:
    records, damaged = read_lines(trained[1] / "metrics.jsonl")
    assert damaged == 0 and [record["step"] for record in records] == list(range(1, 31))
    for record in records:
        assert record.keys() >= LINE and record["time"].keys() >= TIME
        assert record["tokens"] == 8 * 8 and record["bytes_sent"] > 0 and record["mem_mib"] > 10
    assert records[-1]["loss"] == trained[0].object["loss"]


def test_the_traces(trained: tuple[Done, Path]) -> None:
    for rank in range(4):
        trace = json.loads(gzip.decompress((trained[1] / "trace" / f"rank{rank}.json.gz").read_bytes()))
        assert trace["distributedInfo"]["rank"] == rank and trace["distributedInfo"]["world_size"] == 4
        assert trace["traceEvents"]


def test_the_config_says_everything_and_where_from(trained: tuple[Done, Path]) -> None:
    text = (trained[1] / "config.resolved.toml").read_text()
    config = tomllib.loads(text)
    assert config["train"]["eval_every"] == 10 and config["plan"].startswith("dp=2 pp=2 micros=2")
    assert "# flag --train.eval_every" in text and "# recipe.toml:" in text and "# default" in text


def test_what_a_person_reads(trained: tuple[Done, Path]) -> None:
    """The end: loss, a sample, the report; validation in between is on the way."""
    err = trained[0].err
    assert [
        line.split()[0] for line in err.splitlines() if line.startswith(("done ", "sample ", "report "))
    ] == [
        "done",
        "sample",
        "report",
    ]
    assert "Traceback" not in err
    assert [step for step, _ in trained[0].object["val"]] == [10, 20, 30]
