"""`simulate`: the contract's object, a page that adds up, exit 5 with the cheapest remedy; and no false alarm."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.planner.published import SETS, gpt
from unisono.cli import main
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.formatting import lasting, waterfall
from unisono.planner.memory import verdict
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono_contrib.planner.demand import DoesNotFit, demand

GPT3 = (
    "--model.kind gpt --model.n_layer 96 --model.n_head 96 --model.d_model 12288 --model.context 2048"
    " --model.vocab 51200 --train.global_batch 1536 --train.micro_batch 1"
).split()
FITS = "dp=16 tp=8 pp=8 schedule=interleaved:v=3 precision=bf16 recompute=selective"


def _said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = main(["simulate", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_model_by_flags_alone_has_the_object_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, got = _said(
        [*GPT3, "--plan", FITS, "--cluster", "dgx-a100:128", "--stack", "megatron-2022"], capsys
    )
    assert code == 0 and got["schema_version"] == 1
    assert {"step_s", "tflops_per_device", "mfu", "mem_gib", "bubble", "comm", "days_to_train"} <= set(got)
    assert {"params", "grads", "optim", "activations", "total"} <= set(got["mem_gib"])
    for traffic in got["comm"].values():
        assert set(traffic) == {"bytes", "seconds", "exposed_s"}
    assert got["mfu"] == pytest.approx(got["tflops_per_device"] / 312)
    assert sum(part["seconds"] for part in got["waterfall"]) == pytest.approx(got["step_s"])
    total = sum(size for name, size in got["mem_gib"].items() if name != "total")
    assert got["mem_gib"]["total"] == pytest.approx(total)
    assert got["parameters"] == pytest.approx(175e9, rel=0.01)
    lost = [part for part in got["waterfall"] if not part["what"].startswith("ideal")]
    assert got["bound"] == max(lost, key=lambda part: part["seconds"])["what"]
    assert got["bubble"] == pytest.approx(7 / 3 / (96 + 7 / 3), rel=0.2)


def test_what_does_not_fit_leaves_with_five_and_a_remedy_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, got = _said(
        [
            *GPT3,
            "--plan",
            "dp=128 tp=8 precision=bf16",
            "--cluster",
            "dgx-a100:128",
            "--stack",
            "megatron-2022",
        ],
        capsys,
    )
    assert code == got["exit"] == 5
    assert got["short_gib"] == pytest.approx(got["mem_gib"]["total"] - got["capacity_gib"])
    assert "short by" in got["what"] and got["try"]
    plan = got["try"].partition(":")[0].strip()
    again = " ".join([plan, "tp=8", "precision=bf16"])
    code, got = _said(
        [*GPT3, "--plan", again, "--cluster", "dgx-a100:128", "--stack", "megatron-2022"], capsys
    )
    assert code == 0, (again, got)


@pytest.mark.parametrize("name", SETS)
def test_what_ran_is_not_called_too_large(name: str) -> None:
    read, named, _ = SETS[name]
    for row in read():
        made = stack(named)
        got = verdict(
            row.model, row.plan, made, row.cluster.device, micro_batch=row.micro_batch, micros=row.micros
        )
        assert got.fits, (row.plan, row.micro_batch, got)


def test_the_page_and_the_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--demo", "--cluster", "laptop"]) == 0
    page = capsys.readouterr().out
    assert "where a step goes" in page and "laptop" in page
    assert main(["simulate", "--demo", "--dry-run"]) == 0


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_a_small_network_is_told_in_units_that_show_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of a millisecond with 0.0000 s a part, 0 MiB, and tokens of pictures are no answers."""
    assert main([verb, "--model.kind", "mlp", "--data.source", "digits", "--cluster", "laptop"]) == 0
    page = capsys.readouterr().out
    assert "samples/s" in page and "tokens/s" not in page
    assert " 0 MiB" not in page and "KiB" in page and "0.0000" not in page


def test_what_is_far_too_large_is_said_in_tebibytes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--model.n_layer",
        "96",
        "--model.n_head",
        "96",
        "--model.d_model",
        "12288",
        "--model.vocab",
        "51200",
    ]
    assert main(["simulate", *sizes, "--cluster", "dgx-h100", "--plan", "dp=1"]) == 5
    said = capsys.readouterr().err
    assert "TiB" in said and "e+0" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--demo", "--cluster", "dgx-a10:2"], "dgx-a100"),
        (["--demo", "--stack", "megatron"], "megatron-2022"),
        (["--model.kind", "mlp"], "--model.image"),
        (["--demo", "--model.kind", "mpl"], "gpt"),
        (["--model.d_model", "130", "--model.n_head", "4"], "n_head one of 1 2 5 10 13"),
        (["--plan", "dp=16", "--train.global_batch", "16"], "larger cluster"),
        (
            ["--plan", "pp=4 micros=6 schedule=interleaved:v=1", "--train.global_batch", "12"],
            "micros=4 or micros=8",
        ),
        (["--plan", "pp=4 micros=12 schedule=interleaved:v=9", "--train.global_batch", "12"], "fewer stages"),
        (
            ["--cluster", "dgx-a100", "--plan", "dp=8 offload=params:to=disk", "--train.global_batch", "8"],
            "loader.bandwidth",
        ),
        (
            [
                "--cluster",
                "dgx-a100",
                "--plan",
                "dp=8 blocks=0:offload=params:to=disk",
                "--train.global_batch",
                "8",
            ],
            "loader.bandwidth",
        ),
        (["--cluster", "dgx-a100", "--plan", "cp=3"], "cp=3 does not divide the context 64"),
        (["--cluster", "dgx-a100", "--plan", "cp=8 cp_kind=ulysses"], "cp_kind=ring"),
    ],
)
def test_mistakes_have_a_remedy(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, got = _said(words, capsys)
    assert code == 2
    assert said in got["what"] + got["try"]


def test_a_plan_of_one_device_has_no_traffic_and_no_bubble() -> None:
    ask = PlanRequest(
        gpt(4, 4, 256, 256), Plan.parse("precision=bf16"), cluster("dgx-a100"), stack("plain"), 2, 4
    )
    got = simulate(ask)
    demand(got)
    assert got.price.comm == {} and got.bubble == 0.0
    assert sum(seconds for _, seconds in waterfall(got)) == pytest.approx(got.price.step)


def test_a_model_that_nothing_helps_says_so() -> None:
    ask = PlanRequest(gpt(96, 96, 12288, 2048), Plan.parse("tp=4"), cluster("laptop"), stack("plain"), 1, 1)
    with pytest.raises(DoesNotFit, match="short by") as caught:
        demand(simulate(ask))
    assert "more devices" in caught.value.fix


def test_simulate_loads_neither_torch_nor_numpy() -> None:
    script = f"from unisono.cli import main; main({['simulate', '--demo', '--json']}); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {"torch", "numpy"}.isdisjoint(done.stdout.splitlines()[-1].split())


def test_the_classifiers_products_are_no_gain_of_the_others() -> None:
    """The ideal counts them; where a model is little else, products would be quicker than at peak without them."""
    where = cluster("dgx-a100")
    ask = PlanRequest(
        gpt(2, 8, 1024, 1024, vocab=200_000), Plan.parse("dp=8 precision=bf16"), where, stack("plain"), 8, 1
    )
    parts = dict(waterfall(simulate(ask)))
    assert parts["products below peak"] > 0.0
    assert sum(parts.values()) == pytest.approx(simulate(ask).price.step)


def test_attention_has_a_line_of_its_own() -> None:
    """Four times the tokens of a sample at a quarter of the samples: products stay, attention is four times as much."""
    where, made = cluster("dgx-a100"), stack("megatron-2022")
    parts: list[dict[str, float]] = []
    for context, batch in ((1024, 16), (4096, 4)):
        ask = PlanRequest(gpt(8, 32, 4096, context), Plan.parse("tp=8 precision=bf16"), where, made, batch, 1)
        parts.append(dict(waterfall(simulate(ask))))
    short, long = parts
    assert long["products below peak"] == pytest.approx(short["products below peak"], rel=0.02)
    assert long["attention below peak"] > 3 * short["attention below peak"] > 0


def test_a_smaller_micro_batch_is_a_remedy_however_much_smaller() -> None:
    """One of 64 needs an eighth of an eighth of the activations; more devices are not what is missing."""
    small = replace(cluster("dgx-a100"), device=replace(cluster("dgx-a100").device, memory=20e9))
    ask = PlanRequest(
        gpt(24, 16, 2048, 2048), Plan.parse("tp=2 precision=bf16"), small, stack("plain"), 64, 1
    )
    with pytest.raises(DoesNotFit) as caught:
        demand(simulate(ask))
    assert caught.value.fix.startswith("micro_batch=")
    size = int(caught.value.fix.partition(":")[0].split()[0].removeprefix("micro_batch="))
    assert 64 % size == 0 and size < 32


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.5, "500 ms"), (119.0, "119 s"), (600.0, "10 min"), (7200.0, "2 h"), (1e6, "11.6 days")],
)
def test_lengths_of_time_are_said_in_a_unit_that_suits_them(seconds: float, said: str) -> None:
    assert lasting(seconds) == said


def test_the_page_leaves_out_what_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", *GPT3, "--plan", FITS, "--cluster", "dgx-a100:128", "--stack", "megatron-2022"])
        == 0
    )
    page = capsys.readouterr().out
    shares = [
        float(line.split(" %")[0].split()[-1]) for line in page.splitlines() if "#" in line and " %" in line
    ]
    assert shares and all(abs(share) > 0 for share in shares)
