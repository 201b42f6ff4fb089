"""Weights in the forms of other frameworks: files of `torch.save`, folders of DCP, of DeepSpeed's ZeRO, of Megatron."""

from unisono.train.foreign import Form
from unisono_contrib.train.foreign.dcp import DcpWeights, is_dcp, open_state
from unisono_contrib.train.foreign.inert import SUFFIXES, open_torch_file
from unisono_contrib.train.foreign.megatron import is_megatron, open_megatron
from unisono_contrib.train.foreign.zero import is_zero, open_zero

FORMS: tuple[Form, ...] = (
    (lambda p: p.is_file() and p.suffix in SUFFIXES, open_torch_file),
    (is_dcp, DcpWeights),
    (is_zero, open_zero),
    (is_megatron, open_megatron),
)

STATES = ((is_dcp, open_state),)
