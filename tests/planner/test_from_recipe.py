"""What nobody named is taken openly, what cannot be played is marked, and a wrong key is refused for its own reason."""

import json
from pathlib import Path

import pytest

from unisono import config
from unisono.cli import main
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.from_recipe import assuming
from unisono.verbs.train.room import expected
from unisono_contrib.planner.mixture import mixture

GPT = ["--model.kind", "gpt", "--model.n_layer", "4", "--model.n_head", "8", "--model.d_model", "512",
       "--model.context", "512", "--model.vocab", "512"]  # fmt: skip
BATCH = ["--train.global_batch", "64"]


def answered(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("where", "taken"),
    [
        ("dgx-a100", "bf16"),
        ("dgx-h100:8", "bf16"),
        ("tpu-v4", "bf16"),
        ("dgx-v100", "fp16"),
        ("laptop", None),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_an_accelerator_is_asked_about_in_its_mixed_precision(
    verb: str, where: str, taken: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [verb, *GPT, *BATCH, "--cluster", where, *([] if verb == "plan" else ["--plan", "dp=2"])]
    assert main(words) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    if taken is None:
        assert first.startswith("plan ") and "precision" not in first
        return
    assert first.startswith("assumed ") and f"precision={taken}" in first
    chosen = next(line for line in rest if line.startswith("plan ")).removeprefix("plan").strip()
    # What the page calls the plan is what train would do.
    assert Plan.parse(chosen).precision == taken and Plan.parse(chosen).check() == []


def test_what_is_named_is_not_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'plan = "precision=fp32"\n[model]\nkind = "gpt"\nvocab = 256\n[train]\nglobal_batch = 64\nsteps = 9\n'
    )
    told = answered(["plan", str(recipe), "--cluster", "dgx-a100"], capsys)
    assert all(row["assumed"] == [] and "bf16" not in row["plan"] for row in told["plans"])
    got = config.load(None, [("train.dtype", "float64"), ("train.global_batch", "8")])
    assert assuming(got, Plan(), [cluster("dgx-a100")]) == (Plan(precision="fp64"), ())
    both = assuming(config.load(None, []), Plan(), mixture("dgx-a100+dgx-v100").pools)
    assert both[0].precision == "fp16" and "v100" in both[1][0]


@pytest.mark.parametrize(
    ("verb", "where", "dp"),
    [("simulate", "dgx-a100", 8), ("plan", "dgx-a100", 8), ("simulate", "dgx-a100+dgx-h100", 16)],
)
def test_every_price_knows_how_many_servers_there_are(
    verb: str, where: str, dp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [verb, *GPT, *BATCH, "--cluster", where, "--plan", f"dp={dp} sync=ssp:s=4", "--launch.servers"]
    got = [answered([*words, servers], capsys) for servers in ("1", "2", "8")]
    seconds = [(each["plans"][0] if verb == "plan" else each)["step_s"] for each in got]
    assert seconds[0] > seconds[1] > seconds[2]


def test_a_run_expects_what_its_servers_take() -> None:
    seconds = []
    for servers in ("1", "2"):
        got = config.load(None, [("plan", "dp=4 sync=ssp:s=4"), ("launch.servers", servers)])
        seconds.append(json.loads(expected(got.recipe, got.plan, {}) or "{}")["step_s"])
    assert seconds[0] > seconds[1]


def test_a_batch_that_nobody_named_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *GPT, "--train.steps", "9", "--cluster", "dgx-a100", "--plan", "dp=8 precision=bf16"]
    assert answered(words, capsys)["assumed"] == ["global_batch=32, the default, as nobody named one"]
    assert answered([*words, *BATCH], capsys)["assumed"] == []
    derived = [*words[:-1], "dp=8 micros=2 precision=bf16", "--train.micro_batch", "2"]
    told = answered(derived, capsys)
    assert told["assumed"] == [] and told["batch"]["global_batch"] == 32


def test_what_train_cannot_play_is_priced_when_asked_for_and_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*GPT, *BATCH, "--cluster", "dgx-a100"]
    assert answered(["simulate", *words, "--plan", "dp=8 precision=bf16"], capsys)["not_built"] == []
    told = answered(["simulate", *words, "--plan", "dp=8 precision=fp16 recompute=selective"], capsys)
    assert told["not_built"] == []
    told = answered(["simulate", *words, "--plan", "dp=8 precision=bf16:stochastic"], capsys)
    assert told["not_built"] == []
    assert answered(["simulate", *words, "--plan", "cp=2 dp=4"], capsys)["not_built"] == []
    every = answered(["plan", *words, "--plan", "cp=2", "--all-keys"], capsys)["plans"]
    assert every and all(row["not_built"] == [] for row in every)
    assert all(row["not_built"] == [] for row in answered(["plan", *words], capsys)["plans"])
    sparse = [*words, "--model.kind", "moe", "--model.n_experts", "4"]
    assert answered(["plan", *sparse], capsys)["plans"][0]["not_built"] == []


@pytest.mark.parametrize(
    ("held", "flags", "code"),
    [("precision=fp64", [], "P15"),
     ("precision=bf16", ["--train.dtype", "float64"], "P15")],
)  # fmt: skip
def test_a_held_key_that_nothing_can_be_played_with_is_refused_for_that_reason(
    held: str, flags: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", *GPT, *BATCH, *flags, "--cluster", "dgx-h100:8", "--plan", held]
    told = answered(words, capsys, code=2)
    assert code in json.dumps(told) and held.partition("=")[0] in told["what"] and "batch" not in told["what"]


def test_a_precision_that_the_device_lacks_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *GPT, *BATCH, "--plan", "dp=8 precision=bf16", "--cluster"]
    assert main([*words, "dgx-v100"]) == main([*words, "dgx-a100"]) == 0
    assert capsys.readouterr().out.count("v100-32gb has no bf16") == 1


@pytest.mark.parametrize(("text", "many"), [("1T", 1e12), ("300B", 3e11), ("2e9", 2e9), ("15.5m", 1.55e7)])
def test_a_number_of_tokens_says_how_long_training_takes(
    text: str, many: float, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*GPT, *BATCH, "--cluster", "dgx-a100", "--tokens", text]
    best = answered(["plan", *words], capsys)["plans"][0]
    assert best["days_to_train"] == pytest.approx(many / best["tokens_per_s"] / 86400, rel=1e-2)
    own = answered(["simulate", *words, "--plan", best["plan"]], capsys)
    assert own["days_to_train"] == pytest.approx(best["days_to_train"])
    assert main(["plan", *words]) == 0
    page = capsys.readouterr().out
    assert all(f"\n{name} " in page for name in ("memory", "speed", "training", "error", "batch"))


@pytest.mark.parametrize("text", ["0", "many", "1Q", "T"])
def test_what_is_no_number_of_tokens_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *GPT, "--tokens", text]) == 2
    assert "300B" in capsys.readouterr().err


def test_a_length_that_nobody_named_is_20_tokens_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *GPT, *BATCH, "--cluster", "dgx-a100", "--plan", "dp=8 precision=bf16"]
    told = answered(words, capsys)
    (said,) = told["assumed"]
    assert said.startswith("training for") and "20 a parameter" in said
    days = 20 * told["active_parameters"] / told["tokens_per_s"] / 86400
    assert told["days_to_train"] == pytest.approx(days, rel=0.01)
    assert answered([*words, "--tokens", "1B"], capsys)["assumed"] == []


def test_a_plan_that_leaves_devices_out_is_told_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *GPT, *BATCH, "--cluster", "dgx-a100:8", "--plan", "dp=3"]
    assert main([*words, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert "takes 3 of 64 devices" in str(told) and "dp=64" in str(told)
    said = answered(words[:-2], capsys)["assumed"]
    assert any(one.startswith("plan dp=1") for one in said)
