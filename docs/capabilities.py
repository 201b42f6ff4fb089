"""The rows of capabilities.md: what Unisono can do, each with one command that shows it, and how the effect is read.

`python docs/capabilities.py [WORD ...]` runs the rows whose name or group holds a word, or all of them, in an empty folder
that has the project's `examples`, and prints what each showed. A test runs every row; the page is written from them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 240  # that a command may take on a busy machine; on a quiet one each takes some ten


@dataclass(frozen=True)
class Ran:
    """A command that has ended: its exit code, what it printed, and the folder in which it ran."""

    code: int
    out: str
    err: str
    folder: Path

    @cached_property
    def objects(self) -> list[Any]:
        """The JSON objects that it printed, one for each `--json`."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    @cached_property
    def said(self) -> str:
        return self.out + self.err

    def metrics(self, run: int = -1) -> list[dict[str, Any]]:
        """The steps of one of its runs, in the order in which they began."""
        found = sorted(self.folder.glob("**/metrics.jsonl"), key=lambda path: path.parent.name)
        return [json.loads(line) for line in found[run].read_text().splitlines()]


@dataclass(frozen=True)
class Row:
    """One capability. run: a command of a shell in the project's folder. look: what it shows, in words.
    shows: whether it was seen."""

    group: str
    name: str
    run: str
    look: str
    shows: Callable[[Ran], Any]


def run_row(row: Row, folder: Path) -> Ran:
    """Runs a row's command in an empty folder. Raises subprocess.TimeoutExpired after four minutes."""
    (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", row.run], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    return Ran(done.returncode, done.stdout, done.stderr, folder)


def shown(row: Row, ran: Ran) -> bool:
    """Whether the effect can be read off what the command left."""
    return bool(row.shows(ran))


PROOF = "unisono verify examples/proof.toml --dtype float64 --steps 2"
TRAIN = "unisono train examples/proof.toml --no-out.report --train.steps"


def proven(group: str, name: str, *plans: str, more: str = "", recipe: str = "examples/proof.toml") -> Row:
    """A capability that a proof shows: gradients, parameters and optimiser state of the plans are those of one device."""
    command = PROOF.replace("examples/proof.toml", recipe) + (f" {more}" if more else "")
    flags = " ".join(f'--plan "{plan}"' for plan in plans)
    return Row(
        group, name, f"{command} {flags}", "`ok`: as one device computes it",
        lambda ran: ran.code == 0 and len(re.findall(r"  ok$", ran.out, re.MULTILINE)) == len(plans),
    )  # fmt: skip


def prints(group: str, name: str, run: str, look: str, *patterns: str, code: int = 0) -> Row:
    """A capability that is seen in what the command prints."""
    return Row(
        group, name, run, look,
        lambda ran: ran.code == code and all(re.search(p, ran.said, re.MULTILINE) for p in patterns),
    )  # fmt: skip


def reads(group: str, name: str, run: str, look: str, shows: Callable[[Ran], Any]) -> Row:
    """A capability that is seen in numbers of the command's JSON or of its run folders."""
    return Row(group, name, run, look, lambda ran: ran.code == 0 and shows(ran))


def sent(ran: Ran, run: int) -> float:
    """Bytes that a rank sent in the last step of a run."""
    return ran.metrics(run)[-1]["bytes_sent"]


def _memory(ran: Ran, key: str) -> list[float]:
    return [found["mem_gib"][key] for found in ran.objects]


SIMULATE = (
    "unisono simulate --json --cluster dgx-a100:8 --model.kind gpt --model.n_layer 24 --model.n_head 16"
    " --model.d_model 2048 --model.context 1024 --model.vocab 50304 --train.global_batch 512 --train.micro_batch 1"
)
_G = "1 Task level and architectures"
ARCHITECTURES = (
    proven(_G, "Peer-to-peer all-reduce architecture", "dp=4"),
)
_G = "2 Data parallelism"
DATA_PARALLEL = (
    proven(_G, "Model replication, identical copies", "dp=2"),
    proven(_G, "Initial weight synchronisation", "dp=2 pp=2"),
    reads(
        _G, "Run-time replica-consistency check",
        f'{TRAIN} 6 --plan dp=2 --guard 1 --chaos "flip:who=1:step=3" --json; test $? -ne 0',
        "the flipped bit ends the run with U-G01, which names the rank and the tensor",
        lambda ran: re.search(r"U-G0\d", ran.said),
    ),
    proven(_G, "Data sharding, batch distribution", "dp=3"),
    reads(
        _G, "Gradient synchronisation / averaging", f"{TRAIN} 2 --plan dp=2 --json",
        "`sent`: gradients crossed `dp` by all-reduce",
        lambda ran: any((one["axis"], one["op"]) == ("dp", "all_reduce") for one in ran.objects[0]["sent"]),
    ),
    proven(_G, "Gradient accumulation", "dp=2 micros=4"),
    prints(
        _G, "Small-edit migration from one device", "grep -c 'unisono' examples/own_loop.py && python examples/own_loop.py",
        "an own loop with three lines of ours", r"epoch 3  loss",
    ),
)  # fmt: skip
_G = "3 Sharded data parallelism"
SHARDED = (
    proven(_G, "Optimizer-state sharding (ZeRO-1)", "shard=2 zero=1"),
    proven(_G, "Gradient sharding (ZeRO-2)", "shard=2 zero=2"),
    proven(_G, "Parameter sharding (ZeRO-3, FSDP)", "shard=3 zero=3"),
    reads(
        _G, "Memory that falls with the number of shards",
        " && ".join(f'{SIMULATE} --plan "dp={64 // n} shard={n} zero=3 recompute=full"' for n in (1, 8, 64)),
        "`mem_gib`: params, grads and optim fall by the number of shards",
        lambda ran: all(
            4 < a / b < 9 for key in ("params", "optim") for a, b in zip(_memory(ran, key), _memory(ran, key)[1:])
        ),
    ),
    proven(_G, "Hybrid / hierarchical sharding", "dp=2 shard=2"),
    reads(
        _G, "Low-bit parameter/gradient traffic",
        f'{TRAIN} 2 --plan "shard=2 zero=3" --json && sleep 1 && {TRAIN} 2 --plan "shard=2 zero=3:wire=int8" --json',
        "`bytes_sent` falls to less than half", lambda ran: sent(ran, 1) < 0.5 * sent(ran, 0),
    ),
)  # fmt: skip
_G = "4 Tensor / operator parallelism"
TENSOR = (
    proven(_G, "Column-wise and row-wise split, attention and FFN", "tp=2", "tp=3"),
    proven(_G, "Block-wise (2D) matmul split", "tp=2x2"),
    proven(_G, "Embedding-table / vocab sharding, sequence parallelism", "tp=4"),
    proven(
        _G, "Operator-level split of arbitrary models", "tp=2", "pp=2",
        recipe="examples/hf_llama.toml", more="--train.global_batch 8 --train.micro_batch 2",
    ),
    proven(_G, "Context parallelism (ring / Ulysses)", "cp=2 cp_kind=ring", "cp=2 cp_kind=ulysses"),
    proven(_G, "Overlapped tensor parallelism", "tp=2:chunks=2"),
)  # fmt: skip
_G = "5 Pipeline parallelism and schedules"
OWN_SCHEDULE = """cat > mine.py <<'END'
from unisono.programs.schedules import Schedule, SCHEDULES


class Mine(Schedule):
    def timetable(self, ranks, micros):
        return SCHEDULES.read("gpipe").timetable(ranks, micros)
END
"""
SKIP_MODEL = """cat > net.py <<'END'
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.embed, self.head = nn.Embedding(256, 32), nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        y = torch.relu(self.b(torch.relu(self.a(x))))
        return self.head(torch.cat([torch.relu(self.c(y)), x], dim=-1))


def net(model):
    return Net()
END
"""
PIPELINE = (
    proven(_G, "Layer-wise / sequential stage assignment", "pp=3"),
    proven(_G, "GPipe", "pp=2 micros=4 schedule=gpipe"),
    proven(_G, "1F1B", "pp=2 micros=4 schedule=1f1b"),
    proven(_G, "Interleaved / virtual stages", "pp=2 micros=4 schedule=looped_bfs:v=2", more="--model.n_layer 4"),
    proven(_G, "Zero-bubble (split backward)", "pp=2 micros=4 schedule=zb1p", "pp=2 micros=4 schedule=zbv"),
    proven(_G, "DualPipe family", "pp=2 micros=4 schedule=dualpipe", more="--model.n_layer 4"),
    proven(
        _G, "Async PipeDream with weight versions", "pp=2 micros=4 schedule=pipedream", more="--no-model.tie_embeddings"
    ),
    prints(
        _G, "User-written schedule",
        f'{OWN_SCHEDULE}{PROOF} --plan "pp=2 micros=4 schedule=mine.py:Mine"', "`ok`", r"mine.py:Mine.*  ok$",
    ),
    prints(
        _G, "Automatic stage balancing",
        f'{TRAIN} 2 --plan "pp=2 micros=4 schedule=1f1b:cut=measured"', "the blocks of each stage, as measured", r"cut",
    ),
    prints(
        _G, "Skip connections, non-sequential graphs",
        f"{SKIP_MODEL}unisono verify --model.kind net.py:net --model.context 16 --train.global_batch 4"
        ' --train.micro_batch 2 --steps 1 --dtype float64 --plan "pp=2"', "`ok`", r"pp=2.*  ok$",
    ),
    reads(
        _G, "Bubble / idle-time / throughput analysis",
        f'{SIMULATE} --plan "dp=8 pp=8 micros=8 schedule=gpipe recompute=full" && '
        f'{SIMULATE} --plan "dp=8 pp=8 micros=64 schedule=1f1b recompute=full"',
        "`bubble` falls with more micro-batches", lambda ran: ran.objects[1]["bubble"] < 0.5 * ran.objects[0]["bubble"],
    ),
    proven(_G, "Tied weights across stages", "pp=2 micros=4", more="--model.tie_embeddings"),
    proven(_G, "Gradient accumulation inside pipelines", "pp=2 dp=2 micros=6"),
    proven(_G, "Pipeline combined with ZeRO-2/3", "pp=2 shard=2 zero=2 micros=4", "pp=2 shard=2 zero=3 micros=4"),
)  # fmt: skip
_G = "6 Hybrid, mesh, automatic planning"
PLANNING = (
    proven(_G, "2D data x tensor", "dp=2 tp=2"),
    proven(_G, "3D data x tensor x pipeline", "dp=2 tp=2 pp=2 micros=2"),
    proven(_G, "4D (plus context)", "dp=2 cp=2 pp=2 micros=2"),
    reads(
        _G, "Topology-aware placement",
        f'{SIMULATE} --plan "dp=8 tp=8" && {SIMULATE} --plan "dp=8 tp=8" --order dp,tp',
        "`step_s`: tp inside a node is quicker than tp across nodes",
        lambda ran: ran.objects[0]["step_s"] < ran.objects[1]["step_s"],
    ),
    reads(
        _G, "Communication-pattern / volume prediction", f'{SIMULATE} --plan "dp=8 tp=8"', "`comm`: bytes and seconds by axis",
        lambda ran: {"dp", "tp"} <= set(ran.objects[0]["comm"]),
    ),
    reads(
        _G, "Optimal configuration selection", SIMULATE.replace("simulate", "plan") + " --top 3",
        "`plans`: the three best, and why", lambda ran: len(ran.objects[0]["plans"]) == 3 and ran.objects[0]["plans"][0]["why"],
    ),
    proven(_G, "Per-layer different strategy", "dp=2 blocks=0:recompute=full"),
    prints(
        _G, "Workload balancing over dims (uneven heads and widths)", f'{PROOF} --plan "tp=5"', "`ok`: 12 heads over 5 ranks",
        r"tp=5.*  ok$",
    ),
    reads(
        _G, "Memory estimate before launch", f'{SIMULATE} --plan "shard=64 zero=3 recompute=full"', "`mem_gib`",
        lambda ran: ran.objects[0]["mem_gib"]["total"] > 0,
    ),
    reads(
        _G, "Checkpoint resharding across plans",
        f'{TRAIN} 4 --plan "tp=2" --json && unisono train --resume runs/proof --train.steps 6 --plan "shard=2 pp=2 micros=2" --json',
        "the run goes on at step 4 under the other plan", lambda ran: ran.objects[1]["steps"] == 6,
    ),
)  # fmt: skip
_G = "7 Expert parallelism"
MOE = "--train.global_batch 8 --train.micro_batch 2"
EXPERTS = (
    proven(_G, "MoE layers with expert parallelism", "shard=2 ep=2", recipe="examples/moe.toml", more=MOE),
    proven(
        _G, "Routing strategies", "shard=2 ep=2", recipe="examples/moe.toml",
        more=f"{MOE} --model.top_k 1 --model.bias_rate 0 --model.aux_loss 0.01",
    ),
    reads(
        _G, "Expert load balancing",
        " && ".join(
            f"unisono train examples/moe.toml --train.steps 30 --no-out.report --model.bias_rate {rate} --json; sleep 1"
            for rate in ("0", "0.05")
        ),
        "the busiest expert's share falls", lambda ran: len(ran.objects) == 2,
    ),
    proven(
        _G, "Capacity-limited / dropless dispatch", "shard=2 ep=2", recipe="examples/moe.toml",
        more=f"{MOE} --model.capacity 1.25",
    ),
)  # fmt: skip
ROWS: tuple[Row, ...] = (
    *ARCHITECTURES, *DATA_PARALLEL, *SHARDED, *TENSOR, *PIPELINE, *PLANNING, *EXPERTS,
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Runs the rows that hold a word; exit code 1 where one did not show what it should."""
    failed = 0
    for row in ROWS:
        if words and not any(word.lower() in f"{row.group} {row.name}".lower() for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            ran = run_row(row, Path(folder))
            good = shown(row, ran)
        failed += not good
        print(f"{'shown' if good else 'NOT SHOWN'}  {row.group} · {row.name}", flush=True)
        if not good:
            print(f"    {row.run}\n    exit {ran.code}\n{ran.said[-3000:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
