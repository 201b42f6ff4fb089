"""The same, by DeepSpeed's own Muon: stage 3 with accumulation, beside stage 2."""

from unisono_contrib.zoo.bugs.deepspeed_8441_released import ADAPTER, MUON, NEEDS, RIGHT, STACK
from unisono_contrib.zoo.toys_update import MuonStep as Step

__all__ = ["ADAPTER", "NEEDS", "RIGHT", "STACK", "Step"]

ADDRESS = "deepspeedai/DeepSpeed#8443"
CAUSE = "steps_per_micro_batch"
WRONG = {"optimizer": MUON, "zero_optimization": {"stage": 3}}
