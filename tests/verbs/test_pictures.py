"""`simulate --out --trace`: pictures and a Chrome trace for every timetable of the contract."""

import gzip
import json
from pathlib import Path

import pytest

from unisono.cli import main

MODEL = (
    "--model.kind gpt --model.n_layer 16 --model.n_head 16 --model.d_model 1024 --model.context 1024"
    " --model.vocab 51200 --train.global_batch 16 --train.micro_batch 1 --cluster dgx-a100:1"
).split()
TIMETABLES = "gpipe 1f1b interleaved:v=2 looped_bfs:v=2 zb1p zb2p zbv dualpipe dualpipev".split()


@pytest.mark.parametrize("schedule", TIMETABLES)
def test_every_timetable_of_the_contract_has_a_trace(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = f"pp=4 dp=2 schedule={schedule} precision=bf16"
    trace = tmp_path / "trace.json.gz"
    assert main(["simulate", *MODEL, "--plan", plan, "--trace", str(trace), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["written"] == [str(trace)]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"simulated pp={row}" for row in range(4)]
    spans = [e for e in events if e["ph"] == "X"]
    # Layers are dealt to chains and stages in different ways, but all of them are computed once for each micro-batch.
    computed = [e for e in spans if e["cat"] in ("forward", "backward", "weight")]
    stages = {"interleaved:v=2": 8, "looped_bfs:v=2": 8, "zbv": 8, "dualpipev": 8}.get(schedule, 4)
    splits = 3 if schedule in ("zb1p", "zb2p", "zbv", "dualpipe", "dualpipev") else 2
    assert len({(e["args"]["stage"] % stages, e["args"]["micro"], e["cat"]) for e in computed}) == len(
        computed
    )
    assert len(computed) >= 2 * stages * 8 and len(computed) <= splits * stages * 8
    end = max(e["ts"] + e["dur"] for e in computed)
    assert all(e["ts"] >= end - 1e-3 for e in spans if e not in computed)
    assert {e["args"].get("axis") for e in spans if e["cat"] == "comm"} == {"dp"}


def test_one_stage_has_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    plan = "dp=8 schedule=accumulate precision=bf16"
    assert main(["simulate", *MODEL, "--plan", plan, "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["simulated all ranks"]
    assert [e["name"] for e in events if e["ph"] == "X"][:4] == [
        "forward 0",
        "backward 0",
        "forward 1",
        "backward 1",
    ]


@pytest.mark.parametrize("name", ["step.png", "folder/step.svg"])
def test_out_is_a_picture(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / name
    assert main(["simulate", *MODEL, "--plan", "pp=4 dp=2 precision=bf16", "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000 and str(out) in capsys.readouterr().out
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [out]


def test_more_stages_than_layers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = "pp=4 dp=2 schedule=interleaved:v=8 precision=bf16"
    assert main(["simulate", *MODEL, "--plan", plan, "--trace", str(tmp_path / "t.json"), "--json"]) == 2
    assert "32 pipeline stages" in json.loads(capsys.readouterr().out)["what"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "model",
    [
        "--model.kind convnet --model.resnet 50 --train.global_batch 64",
        "--model.kind moe --model.vocab 1000",
        "--model.kind dlrm --model.tables 1000,2000 --train.global_batch 64",
    ],
)
def test_every_kind_of_model_is_drawn(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *model.split(),
        "--cluster",
        "dgx-a100",
        "--plan",
        "dp=4 pp=2",
        "--out",
        str(tmp_path / "step.png"),
    ]
    assert main(["simulate", *words]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"step.png"}


def test_a_picture_of_another_format_is_refused_and_no_folder_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.gif"
    assert main(["simulate", *MODEL, "--plan", "dp=8 precision=bf16", "--out", str(out), "--json"]) == 2
    assert "step.png" in json.loads(capsys.readouterr().out)["try"] and not out.exists()
