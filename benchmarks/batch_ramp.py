"""Steps and losses: small batches throughout, a batch that grows, one that follows the noise scale, and large batches.

A byte-level GPT learns the standard library's text, by AdamW in cosine decay. `small batches`, `ramp` and
`large batches` see the same samples in the same order. The ramp has the small batch for half of them and the large one
for the rest; its learning rate grows with the root of the batch, and its schedule counts samples. `by noise scale` has
as many steps as the ramp; its batch grows from the small one up to the large one, and what it saw is printed.

`lr` is that of the small batch for all ways, or of each the best of `--lrs` on seed 10; losses are of other seeds. Two
losses are equal where they differ by less than small batches do from seed to seed: by one standard deviation.

python benchmarks/batch_ramp.py --lrs 4e-3             # some 20 minutes on one core
python benchmarks/batch_ramp.py --lrs 2e-3 4e-3 8e-3   # some 35
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unisono_contrib.config.sections.ramp import BatchRamp

SMALL, TUNING = 8, 10
FEWER = 0.25


@dataclass(frozen=True, slots=True)
class Way:
    """How batches are chosen. batch: the last one. keys: of the recipe, beside those that all ways have."""

    steps: int
    batch: int
    micro_batch: int = SMALL
    keys: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and of what it learns from. samples: that small batches, ramp and large batches see."""

    layers: int
    width: int
    samples: int


def ways_of(samples: int, large: int) -> dict[str, Way]:
    """By name."""
    ramp = BatchRamp(SMALL, large, large - SMALL, max(1, samples // 2 // SMALL))
    steps = next(step for step in range(samples) if ramp.before(step) >= samples)
    scaled: dict[str, object] = {
        "train.lr_scaling": "sqrt", "train.lr_base_batch": SMALL, "ramp.scale_lr": "true",
    }  # fmt: skip
    by_steps = {
        "ramp.first": SMALL, "ramp.growth": ramp.growth, "ramp.steps": ramp.steps, "ramp.schedule": "samples",
    }  # fmt: skip
    half = SMALL // 2
    by_noise = {"ramp.by": "noise_scale", "ramp.first": SMALL, "ramp.growth": half}
    return {
        "small batches": Way(samples // SMALL, SMALL),
        "ramp": Way(steps, large, keys={**scaled, **by_steps}),
        "by noise scale": Way(
            steps, large, half, {**scaled, **by_noise, "noise_scale.smoothing": 0.98, "ramp.every": 50}
        ),
        "large batches": Way(
            samples // large, large, keys={k: v for k, v in scaled.items() if k != "ramp.scale_lr"}
        ),
    }


def trained(way: Way, sizes: Sizes, lr: float, seed: int) -> tuple[float, int]:
    """(the last held-out loss in nats a byte, samples that were seen). Raises SystemExit with what the run said, where
    it fails."""
    keys = {
        "seed": seed, "model.n_layer": sizes.layers, "model.n_head": 4, "model.d_model": sizes.width,
        "model.context": 32, "data.source": "stdlib", "data.tokenizer": "byte", "train.steps": way.steps,
        "train.global_batch": way.batch, "train.micro_batch": way.micro_batch, "train.lr": lr,
        "train.warmup_steps": max(1, way.steps // 20), "train.eval_every": 0, "train.eval_batches": 2048 // way.batch,
        "train.save_every": 0, "launch.replan": "false", "launch.threads_per_rank": 1, "out.report": "false",
        **way.keys,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "unisono", "train", "--json", "--quiet", "--out.dir", folder, *words]
        got = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        if got.returncode:
            raise SystemExit(got.stderr[-2000:])
        end = json.loads(got.stdout)
        lines = (Path(end["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    seen = sum(json.loads(line).get("effective_batch", way.batch) for line in lines)
    return end["val_loss"], seen


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=25600)
    parser.add_argument("--large", type=int, default=16, help="the last batch of the ramp, a multiple of 8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lrs", type=float, nargs="+", default=[4e-3])
    parser.add_argument("--ways", nargs="+", help="those whose names begin so; all if absent")
    flags = parser.parse_args(argv)
    sizes = Sizes(flags.layers, flags.width, flags.samples)
    losses = dict[str, list[float]]()
    ways = ways_of(flags.samples, flags.large)
    for name, way in ways.items():
        if flags.ways and not name.startswith(tuple(flags.ways)):
            continue
        tuned = {lr: trained(way, sizes, lr, TUNING)[0] for lr in flags.lrs} if len(flags.lrs) > 1 else {}
        lr = min(tuned, key=tuned.__getitem__) if tuned else flags.lrs[0]
        ends = [trained(way, sizes, lr, seed) for seed in flags.seeds]
        losses[name] = [loss for loss, _ in ends]
        said = " ".join(f"{loss:.4f}" for loss in losses[name])
        seen = statistics.median(samples for _, samples in ends)
        mean = statistics.fmean(losses[name])
        print(
            f"{name:<14} {way.steps:>6} steps {seen:>7} samples  lr {lr:g}  {said}  mean {mean:.4f}",
            flush=True,
        )
        small = losses.get("small batches", [])
        if name != "small batches" and len(small) > 1:
            off, spread = mean - statistics.fmean(small), statistics.stdev(small)
            saved = 1 - way.steps / ways["small batches"].steps
            said = "equal" if off <= spread and saved >= FEWER else "not equal"
            print(
                f"{'':<14} {saved:.0%} fewer steps, loss {off:+.4f}, spread {spread:.4f}: {said}", flush=True
            )


if __name__ == "__main__":
    main()
