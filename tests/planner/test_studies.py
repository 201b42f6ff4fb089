"""`unisono simulate` with its studies: keys are added to the object and none changed; mistakes have a remedy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import main

GPT = (
    "--model.kind gpt --model.n_layer 24 --model.n_head 16 --model.d_model 2048 --model.context 1024"
    " --model.vocab 51200 --train.global_batch 256 --cluster dgx-a100:8"
).split()
PLAN = ["--plan", "dp=16 tp=4 precision=bf16 micros=4"]


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["simulate", *GPT, *words, "--json"])
    got = json.loads(capsys.readouterr().out)
    return got | {"code": code}


def test_tokens_and_money(capsys: pytest.CaptureFixture[str]) -> None:
    got = said([*PLAN, "--tokens", "1e9", "--cost-per-hour", "2"], capsys)
    steps = -(-(10**9) // (256 * 1024))
    assert got["days_to_train"] == pytest.approx(steps * got["step_s"] / 86400)
    assert got["device_hours"] == pytest.approx(got["days_to_train"] * 24 * 64)
    assert got["cost"] == pytest.approx(2 * got["device_hours"])


def test_failures(capsys: pytest.CaptureFixture[str]) -> None:
    fails = ["--tokens", "1e10", "--mtbf", "1000", "--checkpoint-gb-s", "2", "--restart-s", "300"]
    got = said([*PLAN, *fails], capsys)
    told = got["failures"]
    assert 0.5 < told["goodput"] < 1.0 and told["mtbf_s"] == pytest.approx(1000 * 3600 / 64)
    assert told["days"] == pytest.approx(got["days_to_train"] / told["goodput"])
    assert told["checkpoint_gb"] == pytest.approx(got["parameters"] * 12e-9)
    assert told["daly_s"] == pytest.approx(told["interval_s"], abs=got["step_s"])
    node = said([*PLAN, *fails[:2], "--mtbf", "125/node", *fails[4:]], capsys)["failures"]
    assert node["goodput"] == pytest.approx(told["goodput"])
    assert told["saving"] + told["lost"] + told["goodput"] == pytest.approx(1.0)
    assert told["interval_s"] / got["step_s"] == pytest.approx(round(told["interval_s"] / got["step_s"]))
    slow = said([*PLAN, *fails, "--stragglers", "normal:0.1"], capsys)
    assert slow["failures"]["days"] > slow["step_s"] / got["step_s"] * told["days"] * 0.98
    assert slow["failures"]["days"] == pytest.approx(slow["days_to_train"] / slow["failures"]["goodput"])


def test_stragglers_are_a_part_of_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of the waterfall, of which all else stays as it is without them; what they add slows everything down."""
    calm = said(PLAN, capsys)
    got = said(
        [
            *PLAN,
            "--stragglers",
            "lognormal:0.1",
            "--out",
            str(tmp_path / "step.svg"),
            "--trace",
            str(tmp_path / "t.json"),
        ],
        capsys,
    )
    *others, last = got["waterfall"]
    assert last["what"] == "stragglers" and last["seconds"] == got["stragglers"]["waiting_s"] > 0.0
    assert others == calm["waterfall"]
    assert sum(part["seconds"] for part in got["waterfall"]) == pytest.approx(got["step_s"])
    assert got["stragglers"]["without_s"] == pytest.approx(calm["step_s"])
    for key in ("mfu", "tokens_per_s"):
        assert got[key] * got["step_s"] == pytest.approx(calm[key] * calm["step_s"])
    assert "stragglers" in (tmp_path / "step.svg").read_text()
    waits = [
        e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e.get("cat") == "wait"
    ]
    assert {round(e["dur"] * 1e-6, 6) for e in waits} == {round(last["seconds"], 6)}


def test_what_would_help_counts_stragglers_in(capsys: pytest.CaptureFixture[str]) -> None:
    """Faster arithmetic is worth more where all else of a step is what its ranks wait for."""
    calm, late = said(PLAN, capsys), said([*PLAN, "--stragglers", "lognormal:0.3"], capsys)
    gains = [{row["what"]: row["gain"] for row in got["sensitivities"]} for got in (calm, late)]
    faster = "10 % more arithmetic (FLOP/s) in each device"
    assert gains[1][faster] > gains[0][faster]


def test_stragglers_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that always differ are no stragglers of a step; a rank that is late one time in ten is."""
    events = tmp_path / "events"
    events.mkdir()
    for rank in range(2):
        steps = [
            {
                "kind": "step",
                "step": n,
                "time": {"forward": (1.0 + rank) * (2.0 if n % 10 == 9 else 1.0), "wait": 9.0},
            }
            for n in range(201)
        ]
        (events / f"rank{rank}.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    got = said([*PLAN, "--stragglers", f"measured:{tmp_path}"], capsys)["stragglers"]
    # Of 64 ranks somebody is nearly always at 2 beside a mean of 1.1.
    assert (
        got["waiting_s"] / got["without_s"] == pytest.approx(2 / 1.1 - 1, rel=0.1)
        and "400 steps" in got["law"]
    )
    (tmp_path / "empty" / "events").mkdir(parents=True)
    assert said([*PLAN, "--stragglers", f"measured:{tmp_path / 'empty'}"], capsys)["code"] == 2


def test_lossy_plans_say_so_and_send_less(capsys: pytest.CaptureFixture[str]) -> None:
    plain = said(PLAN, capsys)
    assert plain["fidelity"] == "ROUNDING" and plain["sensitivities"]
    lossy = said(["--plan", f"{PLAN[1]} codec=tests/codecs/own.py:Largest:ratio=0.01"], capsys)
    assert lossy["fidelity"] == "LOSSY" and "Largest" in lossy["fidelity_why"]
    assert lossy["comm"]["dp"]["bytes"] < 0.2 * plain["comm"]["dp"]["bytes"]
    assert lossy["comm"]["tp"] == plain["comm"]["tp"]


def test_sweep_with_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scaling.svg"
    words = ["--plan", "precision=bf16 tp=4 pp=1 zero=2", "--sweep", "devices=8,64", "--out", str(out)]
    got = said(words, capsys)
    assert got["code"] == 0 and [p["devices"] for p in got["sweep"]["points"]] == [8, 64]
    assert all("tp=4" in p["plan"] for p in got["sweep"]["points"]) and out.read_bytes()
    weak = said([*words[:4], "--weak"], capsys)["sweep"]
    assert [p["global_batch"] for p in weak["points"]] == [256, 2048]
    nodes = said([*words[:2], "--sweep", "nodes=1,8"], capsys)["sweep"]
    assert [p["step_s"] for p in nodes["points"]] == [p["step_s"] for p in got["sweep"]["points"]]


def test_batches(capsys: pytest.CaptureFixture[str]) -> None:
    got = said([*PLAN, "--batches", "--noise-scale", "512"], capsys)["batches"]
    assert got["enough"] >= 16 and got["fastest"] and got["says"]


@pytest.mark.parametrize(
    ("words", "said_"),
    [
        (["--mtbf", "100"], "--checkpoint-gb-s"),
        (["--mtbf", "100/rack"], "HOURS/node"),
        (["--stragglers", "norml:0.1"], "normal"),
        (["--sweep", "devices=12"], "16 devices"),
        (["--sweep", "device=8"], "devices"),
        (["--sweep", "device"], "did you mean devices?"),
        (["--sweep", "devices"], "says no values for devices"),
        (["--sweep", "devices="], "says no values for devices"),
        (["--sweep", "devices=64..8"], "devices=8..64"),
        (["--sweep", "devices=8..64", "--mtbf", "100", "--batches"], "--mtbf --batches"),
        (["--stragglers", "normal"], "normal:0.05"),
        (["--stragglers", "normal:"], "normal:0.05"),
        (["--stragglers", "measured"], "which file"),
        (["--stragglers", "measured:nothing.txt"], "nothing.txt: No such file or directory"),
        (["--model", "gtp"], "did you mean gpt?"),
        (["--sweep", "devices=8", "--out", "x.gif"], ".png"),
        (["--weak"], "--sweep"),
        (["--tokens", "-1"], "a number of tokens"),
    ],
)
def test_mistakes_have_a_remedy(words: list[str], said_: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = said([*PLAN, *words], capsys)
    assert got["code"] == 2
    assert said_ in got["what"] + got["try"]


def test_a_model_without_a_context_cannot_be_swept_over_it(capsys: pytest.CaptureFixture[str]) -> None:
    pictures = ["--model.kind", "mlp", "--data.source", "digits", "--train.global_batch", "64"]
    assert main(["simulate", *pictures, "--cluster", "dgx-a100", "--sweep", "context=8..16", "--json"]) == 2
    assert "no context to vary" in json.loads(capsys.readouterr().out)["what"]


def test_the_page_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *GPT, *PLAN, "--tokens", "1e9", "--batches"]) == 0
    page = capsys.readouterr().out
    assert (
        "what would help\n" in page
        and "% faster training" in page
        and "device-hours" in page
        and "which batch" in page
    )
    assert main(["simulate", *GPT, "--sweep", "devices=8..64", "--dry-run"]) == 0


def test_one_price_and_what_would_help_load_neither_torch_nor_numpy_and_sweeps_no_torch() -> None:
    sweep = ["--plan", "precision=bf16 tp=4 pp=1 shard=1", "--sweep", "devices=8,16"]
    for words, absent in (([*PLAN, "--batches"], {"torch", "numpy"}), (sweep, {"torch", "PIL"})):
        script = f"from unisono.cli import main; main({['simulate', *GPT, *words, '--json']}); import sys; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert absent.isdisjoint(done.stdout.splitlines()[-1].split())
