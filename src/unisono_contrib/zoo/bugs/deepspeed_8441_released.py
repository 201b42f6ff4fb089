"""The same, by DeepSpeed's own Muon: stage 0, the default, beside stage 2."""

from unisono_contrib.zoo.toys_update import MuonStep as Step

__all__ = ["Step"]

ADDRESS = "deepspeedai/DeepSpeed#8441"
STACK = "DeepSpeed 0.19.5 itself"
CAUSE = "optimizer_is_sgd"
NEEDS = "deepspeed==0.19.5"
ADAPTER = "deepspeed"
MUON = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}}
RIGHT = {"optimizer": MUON, "zero_optimization": {"stage": 2}}
WRONG = {"optimizer": MUON}
