"""Constants of the planner's model that are measured on this machine, beside those that are shipped.

python benchmarks/measured.py     about a minute; let nothing else run on the core

launch: host seconds of one kernel, of a block of our own GPT that is so small that its arithmetic takes no time. step:
what a step of `train` on such a model takes beside the block's kernels. cpu: FLOP/s of one core by dtype, and bytes/s
of its copies. Of each the quickest of several tries, since what else runs on a machine only ever slows it.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peers import Task, ours

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import NullChannel
from unisono.measure.timings import copies, products
from unisono.models.gpt import GPTConfig
from unisono.models.gpt.net import Block
from unisono.planner.clusters import device
from unisono.planner.stack import stack
from unisono.planner.work.blocks import BACKWARD_LAUNCHES, FORWARD_LAUNCHES
from unisono.train.build.build import connect, place_of
from unisono.train.data.load import load

HOST, TRIES, CALLS, EDGE, COPIED = torch.device("cpu"), 8, 200, 1024, 256 << 20
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
LEAST = Recipe(
    name="least",
    model=ModelConfig(n_layer=1, n_head=1, d_model=8, context=1),
    data=DataConfig(source="stdlib", tokenizer="byte"),
    train=TrainConfig(steps=100_000, global_batch=1, clip=1.0),
)


def main() -> None:
    torch.set_num_threads(1)
    kernel, whole = launch(), step()
    said("launch, us", 1e6 * kernel, 1e6 * stack("plain").launch)
    beside = whole - kernel * (FORWARD_LAUNCHES + BACKWARD_LAUNCHES)
    said("step on a processor, us", 1e6 * beside, 1e6 * stack("plain-cpu").step)
    cpu = device("cpu")
    for name, dtype in DTYPES.items():
        seconds = min(products([(EDGE, EDGE, EDGE)], HOST, dtype)[0][3] for _ in range(TRIES))
        said(f"cpu {name}, TFLOP/s", 2.0 * EDGE**3 / seconds / 1e12, cpu.peak[name] / 1e12)
    moved = 2 * COPIED
    said("cpu bandwidth, TB/s", moved / min(copies([COPIED] * TRIES, HOST))[1] / 1e12, cpu.bandwidth / 1e12)


def said(what: str, found: float, shipped: float) -> None:
    print(f"{what:<24} {found:.4g}, shipped {shipped:.4g}", flush=True)


def launch() -> float:
    """Host seconds of a kernel: both passes over one block of width 8 and one token, over the kernels counted."""
    torch.manual_seed(0)
    block = Block(GPTConfig(n_layer=1, n_head=1, d_model=8, context=1, vocab=8))
    x_BTD = torch.randn(1, 1, 8, requires_grad=True)
    return quickest(lambda: block(x_BTD).sum().backward()) / (FORWARD_LAUNCHES + BACKWARD_LAUNCHES)


def step() -> float:
    """Seconds of one step of ours, on one rank."""
    resolved = resolve(LEAST, "dp=1", 1)
    place = place_of(0, 1, 0, "gloo", 600.0)
    connect(place, None)
    task = Task(resolved.recipe, resolved.batch.micros, place, load(LEAST.data, LEAST.model))
    with tempfile.TemporaryDirectory() as folder:
        racer = ours(task, resolved.plan, "dp=1", NullChannel(), Path(folder))
        found = quickest(racer.step)
        racer.close()
    return found


def quickest(call: Callable[[], object]) -> float:
    """Median seconds of a call, of the quickest of the tries."""
    return min(statistics.median(timed(call) for _ in range(CALLS)) for _ in range(TRIES))


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
