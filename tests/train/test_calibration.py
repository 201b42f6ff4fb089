"""Calibration against its definition, and an ensemble's mean."""

import math

import pytest
import torch

from unisono.spec.training import IGNORED
from unisono_contrib.train.calibration import BINS, Calibration, EnsembleCalibration, probabilities


def defined(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """ECE, target by target and bin by bin, as the paper writes it."""
    confidence, likeliest = probs.max(1)
    total = 0.0
    for i in range(BINS):
        here = [
            k
            for k, c in enumerate(confidence.tolist())
            if i / BINS <= c < (i + 1) / BINS or (i == BINS - 1 and c == 1)
        ]
        if here:
            accuracy = sum(int(likeliest[k] == targets[k]) for k in here) / len(here)
            total += (
                len(here) / len(targets) * abs(accuracy - sum(float(confidence[k]) for k in here) / len(here))
            )
    return total


def test_it_is_what_it_is_defined_as_in_whatever_parts_it_is_added() -> None:
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(400, 7), torch.randint(7, (400,))
    targets[:200] = logits[:200].argmax(1)
    probs, whole, parts = probabilities(logits), Calibration(), Calibration()
    whole.add(probs, targets)
    for part in range(0, 400, 37):
        parts.add(probs[part : part + 37], targets[part : part + 37])
    got = whole.as_dict()
    assert got == pytest.approx(parts.as_dict(), abs=1e-12)
    assert got["ece"] == pytest.approx(defined(probs, targets), abs=1e-12)
    assert got["nll"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits.double(), targets)))
    assert got["accuracy"] == float((probs.argmax(1) == targets).double().mean())


def test_who_is_sure_and_right_is_calibrated_and_who_is_sure_and_wrong_is_not() -> None:
    sure = torch.tensor([[50.0, 0.0]] * 10)
    for targets, ece in ((torch.zeros(10), 0.0), (torch.ones(10), 1.0), (torch.tensor([0, 1] * 5), 0.5)):
        one = Calibration()
        one.add(probabilities(sure), targets.long())
        assert one.as_dict()["ece"] == pytest.approx(ece, abs=1e-9)
    assert Calibration().as_dict() == {}


def test_members_are_averaged_as_probabilities_and_what_does_not_count_is_left_out() -> None:
    torch.manual_seed(1)
    logits = [torch.randn(2, 5, 4) for _ in range(3)]
    targets = torch.randint(4, (2, 5))
    targets[0, 1:3] = IGNORED
    sums = EnsembleCalibration([Calibration() for _ in logits])
    sums.add(logits, targets)
    mean = torch.stack([one.double().softmax(-1) for one in logits]).mean(0)
    kept = targets != IGNORED
    expected = -mean[kept].gather(1, targets[kept][:, None]).log().mean()
    assert sums.mean.as_dict()["nll"] == pytest.approx(float(expected))
    assert sums.mean.as_dict()["nll"] <= sum(m.as_dict()["nll"] for m in sums.members) / 3, "Jensen"
    same = EnsembleCalibration([Calibration(), Calibration()])
    same.add([logits[0], logits[0]], targets)
    assert same.mean.as_dict() == pytest.approx(same.members[0].as_dict())


def test_log_odds_of_one_class() -> None:
    probs = probabilities(torch.tensor([[0.0], [math.log(3.0)]]))
    assert probs.tolist() == [pytest.approx([0.5, 0.5]), pytest.approx([0.25, 0.75])]
