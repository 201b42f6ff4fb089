"""Sections that act on the steps of one run are refused where clients make rounds."""

import pytest

from unisono.config import Recipe, resolve
from unisono.spec.errors import ConfigProblems
from unisono_contrib.config.sections.callbacks import CallbacksConfig
from unisono_contrib.config.sections.early_stopping import EarlyStoppingConfig
from unisono_contrib.config.sections.ema import EmaConfig
from unisono_contrib.config.sections.federated import FederatedConfig


@pytest.mark.parametrize(
    "section", [EmaConfig(), EarlyStoppingConfig(), CallbacksConfig()], ids=lambda x: x.name
)
def test_they_are_refused_beside_federated(
    section: EmaConfig | EarlyStoppingConfig | CallbacksConfig,
) -> None:
    told = Recipe().model_copy(update={"federated": FederatedConfig(), section.name: section})
    with pytest.raises(ConfigProblems) as caught:
        resolve(told, "dp=1")
    said = f"[{section.name}] follows the steps of one run"
    assert any(problem.what.startswith(said) for problem in caught.value.problems)
