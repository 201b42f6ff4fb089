"""Device-hours, money and energy add up; every device's watts have a source."""

from dataclasses import replace

import pytest

from unisono.planner import clusters, energy
from unisono.planner.tables import bundled


def test_a_bill_adds_up() -> None:
    where = replace(clusters.cluster("dgx-h100:2"), cost_per_hour=2.5)
    got = energy.bill(where, 16, 7200.0, pue=1.2)
    assert got.hours == 32.0 and got.dollars == 80.0
    assert got.kwh == pytest.approx(32 * 0.7 * 1.2)
    half = energy.bill(where, 8, 7200.0, pue=1.2)
    assert (half.dollars, half.kwh) == (40.0, pytest.approx(got.kwh / 2))


def test_what_is_not_known_is_not_made_up() -> None:
    got = energy.bill(clusters.cluster("laptop"), 4, 3600.0)
    assert got.hours == 4.0 and got.dollars is None and got.kwh is None
    assert "kWh" not in energy.as_text(got)


def test_watts_have_a_source_and_are_inherited() -> None:
    for name in bundled("devices.toml").values:
        device = clusters.device(name)
        if device.watts:
            assert device.sources["watts"].origin == "specification" and device.sources["watts"].text
    assert clusters.device("h200-141gb").watts == clusters.device("h100-80gb").watts == 700.0
    assert clusters.device("v100-32gb").watts < clusters.device("a100-80gb").watts
