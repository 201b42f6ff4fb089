"""Which GPU a rank takes, where there are more of the one than of the other."""

import pytest
import torch

from unisono.comm import device


@pytest.mark.parametrize(("gpus", "taken"), [(4, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 0, 0])])
def test_ranks_take_turns_on_gpus(gpus: int, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stood: list[torch.device] = []
    monkeypatch.setattr(device, "count", lambda: gpus)
    monkeypatch.setattr(device, "adopt", stood.append)
    assert [device.of_rank("nccl", rank).index for rank in range(4)] == taken
    assert [each.index for each in stood] == taken
    assert {device.of_rank("gloo", rank).type for rank in range(4)} == {"cpu"}


def test_beside_gpus_small_numbers_travel_over_cpus() -> None:
    assert device.beside_cpus("nccl") == "cpu:gloo,cuda:nccl" and device.beside_cpus("gloo") == "gloo"
