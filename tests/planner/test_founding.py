"""The founding table computed again: counted models are the published ones, and GPT-3's hours are not an A100's."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("founding_table", ROOT / "benchmarks" / "founding_table.py")
if _spec is None or _spec.loader is None:
    raise FileNotFoundError("benchmarks/founding_table.py")
table = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = table
_spec.loader.exec_module(table)


def test_residual_networks_are_counted_to_the_last_weight() -> None:
    """Parameters as torchvision's; multiply-adds of He et al., 2015, table 1, a little more for v1.5's strides."""
    for blocks, parameters, adds in (((3, 4, 6, 3), 25_557_032, 3.8e9), ((3, 4, 23, 3), 44_549_160, 7.6e9)):
        counted, flops = table.bottlenecks(blocks)
        assert counted == parameters
        assert flops / 2 == pytest.approx(adds, rel=0.09) and flops / 2 > adds


def test_said_hours_mean_a_speed_that_its_device_can_have() -> None:
    resnet, bert = table.resnet101(), table.bert_base()
    assert resnet.hours[0] < resnet.said < resnet.hours[1]
    assert 0.25 < bert.implied / table.A100 < 0.35 and bert.hours[1] < bert.said
    assert bert.parameters == pytest.approx(108e6, rel=0.02)


def test_gpt3_is_that_of_a_v100() -> None:
    model, said = table.gpt3(), 3.1e6
    flops = model.step_flops(1) * table.GPT3_TOKENS / 2048
    assert flops == pytest.approx(3.14e23, rel=0.03)  # Brown et al., 2020, table D.1
    assert flops / (said * 3600) == pytest.approx(28e12, rel=0.04)
    assert said / 24 / 365 == pytest.approx(355, abs=1.5)
