"""One device's step in JAX beside torch's, on one core each: loss and gradients, from the same weights and samples.

python benchmarks/engines.py                       # about two minutes
python benchmarks/engines.py --dtype float64 --rounds 3

Two processes, both bound to one core before they import anything, so both compute with one thread. They take turns:
blocks of steps of the one, then of the other. A row is a size; `torch` and `jax` are medians of a step's seconds, and
the ratio is the median of the pairs' ratios, with the smallest and the largest. `player` is JAX as `verify` plays it,
whose backward computes the forward again; `gradient` is JAX's compiled gradient alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = {
    "tiny": {"n_layer": 2, "n_head": 4, "d_model": 64, "context": 64, "batch": 8},
    "small": {"n_layer": 4, "n_head": 8, "d_model": 256, "context": 128, "batch": 8},
}
BLOCK = 0.5  # seconds that a block of steps takes, about


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9, help="pairs of blocks (default 9)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--play", choices=PLAYS, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        os.sched_setaffinity(0, {options.core})
        serve(PLAYS[options.play](SIZES[options.size[0]], options.dtype))
        return 0
    print("size   what      torch ms    jax ms  jax / torch            (medians; smallest and largest ratio)")
    for size in options.size:
        for what in ("gradient", "player"):
            print(line_of(size, what, pairs(size, what, options.dtype, options.rounds)), flush=True)
    return 0


def line_of(size: str, what: str, seconds: list[tuple[float, float]]) -> str:
    ratios = [jax / torch for torch, jax in seconds]
    torch, jax = (statistics.median(pair[i] for pair in seconds) * 1e3 for i in (0, 1))
    around = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{size:<6} {what:<8} {torch:>9.2f} {jax:>9.2f}  {statistics.median(ratios):>11.2f}  {around}"


def pairs(size: str, what: str, dtype: str, rounds: int) -> list[tuple[float, float]]:
    """(torch's, JAX's) seconds of a step, in blocks that follow each other on one core; either begins in turn."""
    core = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, __file__, "--size", size, "--dtype", dtype, "--core", core, "--play"]
    workers = [
        subprocess.Popen([*command, play], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for play in ("torch", what)
    ]
    try:
        losses = [ask(worker)["loss"] for worker in workers]  # compiled and warm
        if abs(losses[0] - losses[1]) > 1e-3 * losses[0]:
            raise SystemExit(f"the engines do not compute the same loss: {losses}")
        out = []
        for number in range(rounds):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {i: float(ask(workers[i])["seconds"]) for i in order}
            out.append((seconds[0], seconds[1]))
        return out
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def ask(worker: "subprocess.Popen[str]") -> dict[str, Any]:
    """Let a worker compute a block, and hear what it measured."""
    if worker.stdin is None or worker.stdout is None:
        raise ValueError("a worker without pipes")
    worker.stdin.write("go\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def serve(step: Callable[[], float]) -> None:
    """A block of steps for each line on stdin, and their mean seconds on stdout."""
    step()
    begun = time.perf_counter()
    loss = step()
    count = max(1, round(BLOCK / (time.perf_counter() - begun)))
    for _ in sys.stdin:
        begun = time.perf_counter()
        for _ in range(count):
            step()
        print(json.dumps({"seconds": (time.perf_counter() - begun) / count, "loss": loss}), flush=True)


def inputs(sizes: dict[str, int]) -> Any:
    import numpy as np

    tokens = np.random.default_rng(0).integers(256, size=(sizes["batch"], sizes["context"] + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def torch_model(sizes: dict[str, int], dtype: str) -> Any:
    """Our GPT with the weights of seed 0."""
    import torch

    from unisono.models.gpt import GPTConfig
    from unisono.models.init import initialise
    from unisono.spec.model import Facts

    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    keys = {key: value for key, value in sizes.items() if key != "batch"}
    model = GPTConfig(vocab=256, **keys).build(Facts(256, None, None, None))  # type: ignore[arg-type]
    initialise(model, 0)
    return model


def play_torch(sizes: dict[str, int], dtype: str) -> Callable[[], float]:
    import torch

    model = torch_model(sizes, dtype)
    tokens, targets = map(torch.from_numpy, inputs(sizes))

    def step() -> float:
        model.zero_grad()
        loss = model.loss(model(tokens), targets) / targets.numel()
        loss.backward()
        return loss.item()

    return step


def play_jax(sizes: dict[str, int], dtype: str, player: bool) -> Callable[[], float]:
    weights = {name: w.detach().numpy() for name, w in torch_model(sizes, dtype).named_parameters()}
    import jax
    import numpy as np

    from unisono.programs.schedules import SCHEDULES
    from unisono_contrib.verify.engines.jax.net import JaxSizes
    from unisono_contrib.verify.engines.jax.play import player_of
    from unisono_contrib.verify.engines.jax.row import BATCH, P, put

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", dtype == "float64")
    tokens, targets = inputs(sizes)
    numbers = JaxSizes(
        sizes["n_layer"],
        sizes["n_head"],
        sizes["n_head"],
        sizes["d_model"],
        256,
        "learned",
        "gelu",
        "layer",
        True,
        1,
    )
    turns = np.zeros((1, 1)), np.zeros((1, 1))
    timetable = SCHEDULES.read("accumulate").timetable(1, 1)
    whole = player_of(
        timetable, jax.devices(), (1, 1, 1), 3, numbers, (), weights, turns, targets.size, False
    )  # fmt: skip
    stage = whole.stages[0]
    dealt = stage.put(weights)
    if player:

        def step() -> float:
            losses, grads = whole.step({0: dealt}, [(tokens, targets)])
            jax.block_until_ready(grads)
            return float(losses[0][0])

        return step
    x, y = put(tokens, stage.mesh, BATCH), put(targets, stage.mesh, BATCH)
    pair, one = tuple(put(t, stage.mesh, P()) for t in turns), put(np.ones((), dtype), stage.mesh, P())
    loss = float(stage.forward(dealt, x, y, pair)[0])

    def gradient() -> float:
        jax.block_until_ready(stage.backward(dealt, x, y, pair, one))
        return loss

    return gradient


PLAYS: dict[str, Callable[[dict[str, int], str], Callable[[], float]]] = {
    "torch": play_torch,
    "gradient": lambda sizes, dtype: play_jax(sizes, dtype, player=False),
    "player": lambda sizes, dtype: play_jax(sizes, dtype, player=True),
}

if __name__ == "__main__":
    raise SystemExit(main())
