"""What a run is told beforehand: all of the price, from this machine's file where there is one."""

from pathlib import Path

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.predict import as_json, calibration, here, parts_of, predict
from unisono.planner.price import price
from unisono.planner.stack import stack
from unisono.planner.work.networks import Network
from unisono.spec.errors import UsageError
from unisono.spec.workload import Product, Workload, WorkPart

PLANS = ("dp=1", "dp=2", "shard=2 zero=2", "shard=2 zero=3", "tp=2", "pp=2", "dp=2 pp=4", "dp=2 shard=2 tp=2")
MEASURED = 'like = "laptop"\n[device]\nlike = "cpu"\nreserved_gb = { value = 0.5, origin = "measured here", source = "" }\n'


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("name", ["laptop", "dgx-a100:4"])
def test_parts_are_those_a_clock_tells_apart_and_add_up_to_the_price(text: str, name: str) -> None:
    where, plan, model = cluster(name), Plan.parse(text), gpt(8, 4, 64, 128)
    made = stack(where.stack)
    told = predict(model, plan, where, made, micro_batch=2, micros=4)
    if plan.world <= where.devices:
        whole = price(model, plan, where, made, micro_batch=2, micros=4)
        assert told.step == pytest.approx(whole.step)
        assert told.parts == parts_of(whole)
    axes = {axis for axis in ("dp", "shard", "tp") if getattr(plan, axis) > 1}
    assert {part for part in told.parts if part.startswith("comm")} == {f"comm {axis}" for axis in axes}
    assert told.parts["compute"] > 0 and (told.parts["wait"] > 0) == (plan.pp > 1)
    assert told.mem_mib > 0


def test_more_ranks_than_devices_are_priced_all_the_same() -> None:
    where, model = cluster("laptop"), gpt(8, 4, 64, 128)
    few, many = (
        predict(model, Plan.parse(f"dp={n}"), where, stack("plain"), micro_batch=2, micros=1) for n in (4, 16)
    )
    assert many.parts["comm dp"] > few.parts["comm dp"] > 0


def test_the_machines_own_file_comes_first_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "HOME": "/nowhere"}
    assert calibration(environ) == tmp_path / "unisono" / "cluster.toml"
    assert calibration({"HOME": "/h"}) == Path("/h/.cache/unisono/cluster.toml")
    where, _, measured = here(environ)
    assert (where.name, measured) == ("laptop", False)
    calibration(environ).parent.mkdir()
    calibration(environ).write_text(MEASURED)
    where, made, measured = here(environ)
    assert (where.name, measured, where.device.reserved) == ("cluster", True, 0.5e9)
    model, plan = gpt(2, 2, 32, 16), Plan.parse("dp=2")
    held = predict(model, plan, where, made, micro_batch=1, micros=1).mem_mib
    plain = predict(model, plan, cluster("laptop"), made, micro_batch=1, micros=1).mem_mib
    assert held - plain == pytest.approx(0.5e9 / 2**20)
    calibration(environ).write_text("nodes = many\n")
    with pytest.raises(UsageError):
        here(environ)


def test_an_error_is_told_for_models_alone_whose_prices_were_held_beside_measurements() -> None:
    part = WorkPart("part", 100, 200, 10, 10, products=(Product(1, 10, 10),), moved=30, kernels=3)
    network = Network(Workload((part, part, part)))
    for model, is_known in ((gpt(2, 2, 32, 16), True), (network, False)):
        got = predict(
            model, Plan.parse("dp=2"), cluster("laptop"), stack("plain-cpu"), micro_batch=1, micros=1
        )
        assert (got.error is not None) == is_known
        assert (as_json(got, True)["error_pct"] is not None) == is_known
