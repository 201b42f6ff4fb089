"""Whether a batch 16 times as large reaches the loss of the base batch in as many samples: figures over three seeds.

    python benchmarks/large_batch.py digits --json large.json    an MLP on handwritten digits, about 10 minutes
    python benchmarks/large_batch.py gpt --json large.json       a byte-level GPT of 0.3 M parameters, about an hour
    python benchmarks/large_batch.py digits --share 0.05         with a twentieth of the samples, to try it out

A file is gone on with where it was cut off. The base is AdamW at its best learning rate. Beside the large-batch
optimisers stands AdamW with the large batch: at the rate that a scaling rule makes of the base's, and at its own best
rate; and for the GPT Muon. A rate is chosen on a seed that is not printed, by doubling and halving from a start until a
lower one and a higher one are worse. All runs decay by a cosine to a tenth after a warm-up over a tenth of their
samples.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

from kept_runs import SIZES, KeptRuns, OneProcess, WholeRun, loss_of, tuned

from unisono.config import DataConfig, Recipe, TrainConfig
from unisono_contrib.measure.benches import columns
from unisono_contrib.models.mlp import MLPConfig

SEEDS, TUNING = (0, 1, 2), 10
TIMES = 16
WITHIN = 0.02  # of the base's loss


@dataclass(frozen=True, slots=True)
class LargeRun(WholeRun):
    """One run on one device. task: `digits` or `gpt`. base: batch for which `lr` was chosen, with `rule`."""

    task: str = "gpt"
    base: int = 0
    rule: str = "none"

    def recipe(self) -> Recipe:
        digits = self.task == "digits"
        return Recipe(
            name="large-batch", seed=self.seed,
            model=MLPConfig(hidden=(64, 64)) if digits else SIZES["small"],
            data=DataConfig(source="digits", val_fraction=0.2) if digits else DataConfig(source="stdlib"),
            train=TrainConfig(
                steps=self.steps, global_batch=self.batch, micro_batch=self.batch, optimizer=self.optimizer,
                lr=self.lr, **self.keys(), lr_scaling=self.rule, lr_base_batch=self.base or None,
                warmup_steps=max(1, self.steps // 10), eval_batches=max(1, (256 if digits else 512) // self.batch),
            ),
        )  # fmt: skip

    def keys(self) -> dict[str, Any]:
        """Where decay is a part of the gradient it is as small as is usual there. LARS has a coefficient with which its
        rates suit the biases, which plain descent steps by the same."""
        if self.optimizer == "lars":
            return {"trust_coefficient": 0.02, "weight_decay": 1e-4}
        return {"weight_decay": 1e-4} if self.optimizer == "sgd" else {}


@dataclass(frozen=True, slots=True)
class LargeTask:
    """batch, samples: of the base. lrs: where the search for each optimiser's learning rate begins."""

    name: str
    batch: int
    samples: int
    lrs: dict[str, float]

    def run(self, optimizer: str, lr: float, seed: int, times: int, **more: Any) -> LargeRun:
        """A run over all samples. times: its batch over the base's."""
        batch = times * self.batch
        return LargeRun(
            "dp=1", seed, self.samples // batch, lr, optimizer=optimizer, batch=batch, task=self.name, **more
        )


STARTS = {"adamw": 4e-3, "lamb": 1e-2, "lans": 1e-2, "lars": 0.2, "sgd": 0.1}
TASKS = {
    "digits": LargeTask("digits", 8, 32_768, STARTS),
    "gpt": LargeTask("gpt", 2, 16_384, STARTS | {"muon": 4e-3}),
}


def study(kept: KeptRuns, task: LargeTask) -> list[tuple[str, LargeRun]]:
    """(name, its run on the tuning seed) of each way, the base's first."""
    nursery = OneProcess()

    def best(optimizer: str, times: int) -> LargeRun:
        def loss(lr: float) -> float:
            return loss_of(kept.play(nursery, task.run(optimizer, lr, TUNING, times)))

        return task.run(optimizer, tuned(loss, task.lrs[optimizer]), TUNING, times)

    base = best("adamw", 1)
    ways = [("adamw, base batch", base)]
    for rule in ("linear", "sqrt"):
        scaled = task.run("adamw", base.lr, TUNING, TIMES, base=task.batch, rule=rule)
        ways.append((f"adamw, {rule} rule", scaled))
    return ways + [(f"{name}, tuned", best(name, TIMES)) for name in task.lrs]


def table(kept: KeptRuns, task: LargeTask, seeds: tuple[int, ...]) -> list[str]:
    """What is printed: of each way its losses on all seeds, and their median over the base's."""
    rows, base, nursery = [], 0.0, OneProcess()
    for name, run in study(kept, task):
        losses = [loss_of(kept.play(nursery, replace(run, seed=seed))) for seed in seeds]
        middle = statistics.median(losses)
        base = base or middle
        rate = run.recipe().train.peak_lr
        near = "yes" if middle <= (1 + WITHIN) * base else "no"
        shown = " ".join(f"{loss:.4f}" for loss in losses)
        rows.append(
            (name, str(run.batch), str(run.steps), f"{rate:.4g}", shown, f"{middle / base:.3f}", near)
        )
    head = ("way", "batch", "steps", "lr", "held-out loss by seed", "over base", f"within {WITHIN:.0%}")
    return columns(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=tuple(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--share", type=float, default=1.0, help="of the samples; less than 1 to try it out")
    parser.add_argument("--json", metavar="FILE", help="runs; what is there already is not run again")
    options = parser.parse_args()
    task = TASKS[options.task]
    task = replace(task, samples=int(task.samples * options.share))
    print("\n".join(table(KeptRuns(options.json), task, tuple(options.seeds))))


if __name__ == "__main__":
    sys.exit(main())
