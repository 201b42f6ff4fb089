"""Data loading: what each host has to load adds up to the batch, and only what takes longer than a step shows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planner.parts import together
from tests.planner.published import gpt
from unisono.cli import main
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.formatting import waterfall
from unisono.planner.machines.cluster import Loader
from unisono.planner.simulate import PlanRequest, PlanResult, closed, simulate
from unisono.planner.stack import stack
from unisono.planner.stalls import fed

MODEL = gpt(24, 16, 2048, 1024)
RESNET = "--model convnet --model.resnet 50 --train.global_batch 2048 --train.optimizer sgd --cluster".split()
DEALT = ["--plan", "dp=8 precision=bf16"]


def asked(plan: str, nodes: int = 4, loader: Loader | None = None) -> PlanRequest:
    where = cluster(f"dgx-a100:{nodes}")
    if loader is not None:
        where = replace(where, loader=replace(loader, devices=where.loader.devices))
    keys = Plan.parse(f"{plan} precision=bf16").fill(where.devices)
    return PlanRequest(MODEL, keys, where, stack(where.stack), 2, 8)


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["simulate", *words, "--json"])
    return json.loads(capsys.readouterr().out) | {"code": code}


@pytest.mark.parametrize(
    ("plan", "hosts", "copies"),
    [
        ("dp=32", 4, 1),
        ("dp=4 shard=8", 4, 1),
        ("dp=4 tp=8", 4, 1),
        ("dp=8 tp=4", 4, 1),
        ("dp=2 tp=16", 4, 2),
        ("dp=4 cp=4 tp=2", 4, 1),
        ("dp=16 pp=2", 2, 1),
        ("dp=2 pp=4 tp=4", 1, 1),
        ("shard=8 pp=4", 1, 1),
    ],
)
def test_hosts_of_the_first_stage_load_the_batch(plan: str, hosts: int, copies: int) -> None:
    """copies: hosts that load the same samples, since the ranks that compute on them lie on several."""
    ask = asked(plan)
    got = fed(ask)
    assert (got.hosts, got.hosts * got.each) == (hosts, copies * ask.batch)
    assert got.sample.stored == 2 * MODEL.context


def test_a_loader_that_keeps_up_changes_nothing() -> None:
    calm = simulate(asked("dp=8 tp=4"))
    needs = fed(calm.request).each / calm.price.step
    assert simulate(asked("dp=8 tp=4", loader=Loader(samples=1.01 * needs))).price == calm.price


@pytest.mark.parametrize(
    "given", [Loader(samples=1.0), Loader(bandwidth=2.0 * MODEL.context), Loader(1.0, 1e12)]
)
def test_a_loader_that_does_not_sets_the_pace(given: Loader) -> None:
    """One sample a second, however it is said."""
    calm, got = simulate(asked("dp=8 tp=4")), simulate(asked("dp=8 tp=4", loader=given))
    assert calm.price.step < got.price.step == pytest.approx(fed(got.request).each)
    assert together(got.price) == pytest.approx(got.price.step)
    assert waterfall(got)[-1] == ("data loading", pytest.approx(got.price.step - calm.price.step))
    assert got.price.bare == replace(calm.price, step=pytest.approx(calm.price.step))
    assert got.mfu < calm.mfu
    assert closed(got.request).step == pytest.approx(got.price.step)


def test_what_crosses_the_host_link_counts() -> None:
    def with_link(rate: float) -> PlanResult:
        ask = asked("dp=32")
        device = replace(ask.cluster.device, host=rate)
        return simulate(replace(ask, cluster=replace(ask.cluster, device=device)))

    got, ask = with_link(1e3), asked("dp=32")
    link = 1e3 * ask.stack.host_link
    assert got.price.step == pytest.approx(ask.micro_batch * ask.micros * MODEL.sample.copied / link)
    assert with_link(0.0).price.loading == with_link(25e9).price.loading == 0.0


def test_a_file_says_what_flags_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('like = "dgx-a100"\nloader_samples_s = 9000\nloader_gb_s = 2\n')
    file = said([*RESNET, str(mine), *DEALT], capsys)
    flags = said([*RESNET, "dgx-a100", *DEALT, "--loader-samples-s", "9000", "--loader-gb-s", "2"], capsys)
    assert file["step_s"] == flags["step_s"] and file["data"] == flags["data"]
    told = flags["data"]
    assert told["limit"] == "decoding" and told["gives"] == 9000 and told["exposed_s"] > 0.0
    assert told["gives_samples_s"]["storage"] == pytest.approx(2e9 / (3 * 224 * 224))
    assert flags["samples_per_s"] == pytest.approx(9000)
    small = said([*RESNET, str(mine), *DEALT, "--sample-kb", "300"], capsys)["data"]
    assert (small["limit"], small["gives"]) == ("storage", pytest.approx(2e9 / 3e5))


def test_what_nobody_has_said_is_counted_as_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    told = said([*RESNET, "dgx-a100", *DEALT], capsys)["data"]
    assert not told["said"] and told["exposed_s"] == 0.0
    assert main(["simulate", *RESNET, "dgx-a100", *DEALT]) == 0
    assert "assumed fast enough" in capsys.readouterr().out


def test_where_data_is_waited_for_a_faster_loader_is_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    got = said([*RESNET, "dgx-a100", *DEALT, "--loader-samples-s", "3000"], capsys)
    first, *others = got["sensitivities"]
    assert "data loading" in first["what"] and first["gain"] == pytest.approx(0.1)
    assert all(row["gain"] <= 1e-9 for row in others if row["kind"] == "buy")
    assert got["bound"] == "data loading"


@pytest.mark.slow
def test_a_sweep_keeps_what_the_flags_say_at_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--sweep", "devices=8,16", "--plan", "precision=bf16", "--loader-samples-s", "100"]
    points = said([*RESNET, "dgx-a100", *sweep], capsys)["sweep"]["points"]
    assert [point["step_s"] for point in points] == [pytest.approx(20.48), pytest.approx(10.24)]


def test_mixtures_refuse_a_loader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = said(["--demo", "--cluster", "dgx-a100:1+dgx-v100:1", "--loader-gb-s", "1"], capsys)
    assert got["code"] == 2 and "--loader-gb-s" in got["what"]
    pool = '[[pool]]\nlike = "dgx-a100"\nloader_gb_s = 1\n[[pool]]\nlike = "dgx-v100"\n'
    file = tmp_path / "two.toml"
    file.write_text(pool + '[join]\nname = "x"\nbandwidth_gb_s = 3\nlatency_us = 30\n')
    assert "loaders" in said(["--demo", "--cluster", str(file)], capsys)["what"]
