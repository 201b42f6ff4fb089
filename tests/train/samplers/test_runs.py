"""`unisono train` with samplers beside its ranks computes what it computes without, and outlives none of them."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked
from unisono.observe.metrics import read_steps

RECIPE = """
name = "sums"
[model]
kind = "gpt"
n_layer = 1
n_head = 2
d_model = 32
context = 8
positions = "rotary"
[data]
source = "sums"
packing = "none"
[post]
kind = "grpo"
group = 4
max_new_tokens = 3
sft_steps = 30
temperature = 1.5
[train]
steps = 36
global_batch = 32
micro_batch = 4
lr = 1e-2
[out]
report = false
"""
