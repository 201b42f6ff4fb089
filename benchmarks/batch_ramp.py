"""Steps and losses on the same samples: small batches throughout, a batch that grows, and large batches throughout.

A byte-level GPT of 0.3 M parameters learns the standard library's text, by AdamW in cosine decay. Each way sees as many
samples; the ramp grows from the small batch to the large one over its first steps. The learning rate of each way is the
best of `--lrs` on seed 10; losses are of other seeds.

python benchmarks/batch_ramp.py                      # some 25 minutes on two cores
python benchmarks/batch_ramp.py --samples 3200 --seeds 0 --lrs 1e-3
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from unisono_contrib.config.sections.ramp import BatchRamp

SMALL, TUNING = 8, 10
FEWER = 0.25


def steps_of(samples: int, large: int) -> dict[str, tuple[int, int, BatchRamp | None]]:
    """By way: (steps, batch, ramp). The ramp's own steps take half of all samples."""
    plain = {
        "small batches": (samples // SMALL, SMALL, None),
        "large batches": (samples // large, large, None),
    }
    ramp = BatchRamp(SMALL, large, SMALL, max(1, round(samples / 2 / (large / 2))))
    steps = next(step for step in range(samples) if ramp.before(step) >= samples)
    return {**plain, "ramp": (steps, large, ramp)}


def loss_of(steps: int, batch: int, ramp: BatchRamp | None, lr: float, seed: int) -> float:
    """The last held-out loss, in nats a byte. Raises SystemExit with what the run said, where it fails."""
    keys = {
        "seed": seed, "model.n_layer": 3, "model.n_head": 4, "model.d_model": 88, "model.context": 32,
        "data.source": "stdlib", "data.tokenizer": "byte", "train.steps": steps, "train.global_batch": batch,
        "train.micro_batch": SMALL, "train.lr": lr, "train.warmup_steps": max(1, steps // 20), "train.eval_every": 0,
        "train.eval_batches": 2048 // batch, "train.save_every": 0, "launch.replan": "false", "out.report": "false",
    }  # fmt: skip
    if ramp is not None:
        keys |= {"ramp.first": ramp.first, "ramp.growth": ramp.growth, "ramp.steps": ramp.steps}
    with tempfile.TemporaryDirectory() as folder:
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "unisono", "train", "--json", "--quiet", "--out.dir", folder, *words]
        got = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if got.returncode:
        raise SystemExit(got.stderr[-2000:])
    return json.loads(got.stdout)["val_loss"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=25600)
    parser.add_argument("--large", type=int, default=16, help="the last batch of the ramp, a multiple of 8")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lrs", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3, 4e-3])
    flags = parser.parse_args(argv)
    medians, steps = dict[str, float](), dict[str, int]()
    for name, way in steps_of(flags.samples, flags.large).items():
        tuned = (
            {lr: loss_of(*way, lr, TUNING) for lr in flags.lrs} if len(flags.lrs) > 1 else {flags.lrs[0]: 0.0}
        )
        lr = min(tuned, key=tuned.__getitem__)
        losses = [loss_of(*way, lr, seed) for seed in flags.seeds]
        medians[name], steps[name] = statistics.median(losses), way[0]
        said = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name:<14} {way[0]:>6} steps  lr {lr:g}  {said}  median {medians[name]:.4f}", flush=True)
    saved, gap = 1 - steps["ramp"] / steps["small batches"], medians["ramp"] - medians["small batches"]
    print(f"ramp: {saved:.0%} fewer steps than small batches (at least {FEWER:.0%} asked), loss {gap:+.4f}")


if __name__ == "__main__":
    main()
