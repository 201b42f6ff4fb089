"""What a smaller model loses: `python benchmarks/compress.py`

Trains a GPT of bytes on the standard library's text, then prints bytes of weights and loss on held-out text of: this
teacher whole, pruned, in 8 and in 4 bits; a small student alone; the same student taught by it, at equal steps, once
for each `--hint weight:temperature`. All losses are nats per byte over the same validation batches. `--out` keeps the
runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GPT = {
    "kind": "gpt",
    "context": 128,
    "positions": "rotary",
    "norm": "rms",
    "activation": "swiglu",
    "bias": False,
}
TEACHER = {"n_layer": 4, "n_head": 4, "d_model": 128}
STUDENT = {"n_layer": 2, "n_head": 2, "d_model": 48}
SMALLER = (
    ("pruned 0.5", ("--prune", "0.5")),
    ("pruned 2:4", ("--prune", "2:4")),
    ("int8", ("--quantise", "int8")),
    ("int4", ("--quantise", "int4")),
    ("2:4 and int4", ("--prune", "2:4", "--quantise", "int4")),
)
HINTS = ("0.5:1", "0.5:2", "0.9:1", "0.9:2")


def unisono(folder: Path, *words: str) -> dict[str, Any]:
    """One command, and the object that it prints. Raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *words, "--json"], cwd=folder, check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


def recipe(folder: Path, name: str, sizes: dict[str, Any], train: dict[str, Any]) -> str:
    """The file of a run on the standard library's text."""
    said = {"model": GPT | sizes, "data": {"source": "stdlib"}, "train": train, "out": {"report": False}}
    lines = [f'name = "{name}"', 'plan = "dp=2"']
    for section, keys in said.items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    (folder / f"{name}.toml").write_text("\n".join(lines) + "\n")
    return f"{name}.toml"


def trained(
    folder: Path, name: str, sizes: dict[str, Any], given: argparse.Namespace, **more: Any
) -> dict[str, Any]:
    """What `train` says of a run, with the bytes of its weights in a folder for transformers."""
    train = {
        "global_batch": given.batch,
        "lr": 3e-3,
        "min_lr": 3e-4,
        "eval_batches": given.eval_batches,
        **more,
    }
    train |= {"warmup_steps": train["steps"] // 10, "lr_schedule": "cosine", "eval_every": train["steps"]}
    began = time.perf_counter()
    told = unisono(folder, "train", recipe(folder, name, sizes, train))
    written = unisono(folder, "export", told["run_dir"])
    size = sum(path.stat().st_size for path in (folder / written["out"]).glob("*.safetensors"))
    return {**told, "bytes": size, "seconds": time.perf_counter() - began}


def row(name: str, size: int, loss: float, note: str = "") -> None:
    print(f"{name:<36}{size:>12,}{loss:>10.4f}  {note}".rstrip(), flush=True)


def compare(folder: Path, given: argparse.Namespace) -> None:
    print(f"{'':<36}{'bytes':>12}{'loss':>10}")
    teacher = trained(folder, "teacher", TEACHER, given, steps=given.steps)
    row("teacher", teacher["bytes"], teacher["val_loss"], f"{given.steps} steps, {teacher['seconds']:.0f} s")
    for name, flags in SMALLER:
        made = unisono(folder, "export", teacher["run_dir"], *flags)["compressed"]
        row(f"teacher, {name}", made["bytes"]["after"], made["loss"]["after"])
    steps = given.student_steps
    alone = trained(folder, "alone", STUDENT, given, steps=steps)
    row("student alone", alone["bytes"], alone["val_loss"], f"{steps} steps, {alone['seconds']:.0f} s")
    for hint in given.hint or HINTS:
        weight, temperature = hint.split(":")
        loss = f"distil:teacher={teacher['run_dir']},weight={weight},temperature={temperature}"
        taught = trained(folder, f"taught-{weight}-{temperature}", STUDENT, given, steps=steps, loss=loss)
        gain = f"{taught['val_loss'] - alone['val_loss']:+.4f}, {taught['seconds']:.0f} s"
        row(f"student, weight {weight}, temperature {temperature}", taught["bytes"], taught["val_loss"], gain)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="of the teacher (500)")
    parser.add_argument("--student-steps", type=int, default=250, help="of each student (250)")
    parser.add_argument("--batch", type=int, default=32, help="samples of 128 bytes a step (32)")
    parser.add_argument(
        "--eval-batches", type=int, default=16, help="batches that a loss is measured on (16)"
    )
    parser.add_argument("--hint", action="append", default=[], metavar="WEIGHT:TEMPERATURE")
    parser.add_argument("--out", type=Path, help="where the runs stay; else they go")
    given = parser.parse_args(words)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        compare(given.out, given)
    else:
        with tempfile.TemporaryDirectory() as name:
            compare(Path(name), given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
