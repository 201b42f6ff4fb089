"""The same, by DeepSpeed's own Muon: stage 3 with accumulation, beside stage 2."""

import torch
from torch import nn

from unisono_contrib.zoo.bugs.deepspeed_8441_released import ADAPTER, MUON, NEEDS, RIGHT, STACK
from unisono_contrib.zoo.toys_update import MuonStep

__all__ = ["ADAPTER", "NEEDS", "RIGHT", "STACK"]

ADDRESS = "deepspeedai/DeepSpeed#8443"
CAUSE = "steps_per_micro_batch"
WRONG = {"optimizer": MUON, "zero_optimization": {"stage": 3, "reduce_scatter": False}}


class SquareMuonStep(MuonStep):
    """Weights of one shape: this stage gathers no others over Gloo."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6, bias=False), nn.GELU(), nn.Linear(6, 6, bias=False))


Step = SquareMuonStep
