"""The rows of capabilities.md: what Unisono can do, each with one command that shows it, and how the effect is read.

`python docs/capabilities.py [WORD ...]` runs the rows whose name or group holds a word, or all of them, in an empty
folder that has the project's `examples`, and prints what each showed. A test runs every row; the page is written from
them.
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
from itertools import pairwise
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

    def events(self) -> list[list[dict[str, Any]]]:
        """What each rank of its last run recorded."""
        last = max(self.folder.glob("**/events"), key=lambda path: path.parent.name)
        return [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(last.glob("rank*"))
        ]


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
        ["bash", "-c", row.run],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    return Ran(done.returncode, done.stdout, done.stderr, folder)


def shown(row: Row, ran: Ran) -> bool:
    """Whether the effect can be read off what the command left."""
    return bool(row.shows(ran))


PROOF = "unisono verify examples/proof.toml --dtype float64 --steps 2"
TRAIN = "unisono train examples/proof.toml --no-out.report --train.steps"
SERVED = (
    "unisono simulate examples/priced/gpt_1b.toml --json --cluster dgx-a100:4 --train.global_batch 512 --plan"
)


def proven(group: str, name: str, *plans: str, more: str = "", recipe: str = "examples/proof.toml") -> Row:
    """A capability that a proof shows: gradients, parameters and optimiser state are those of one device."""
    command = PROOF.replace("examples/proof.toml", recipe) + (f" {more}" if more else "")
    flags = " ".join(f'--plan "{plan}"' for plan in plans)
    return Row(
        group,
        name,
        f"{command} {flags}",
        "`ok`: as one device computes it",
        lambda ran: ran.code == 0 and len(re.findall(r"  ok$", ran.out, re.MULTILINE)) == len(plans),
    )


def prints(group: str, name: str, run: str, look: str, *patterns: str, code: int = 0) -> Row:
    """A capability that is seen in what the command prints."""
    return Row(
        group,
        name,
        run,
        look,
        lambda ran: ran.code == code and all(re.search(p, ran.said, re.MULTILINE) for p in patterns),
    )


def reads(group: str, name: str, run: str, look: str, shows: Callable[[Ran], Any]) -> Row:
    """A capability that is seen in numbers of the command's JSON or of its run folders."""
    return Row(group, name, run, look, lambda ran: ran.code == 0 and shows(ran))


def sent(ran: Ran, run: int) -> float:
    """Bytes that a rank sent in the last step of a run."""
    return ran.metrics(run)[-1]["bytes_sent"]


def _total(ran: Ran, run: int) -> float:
    return sum(step["bytes_sent"] for step in ran.metrics(run))


def _texts(ran: Ran, pattern: str) -> list[str]:
    return [path.read_text() for path in ran.folder.glob(pattern)]


def _near(one: float, other: float) -> bool:
    return abs(one - other) < 1e-4


def _pushed(steps: Sequence[dict[str, Any]]) -> float:
    """Bytes that the first rank pushed to servers in these steps."""
    return sum(step["ledger"].get("dp/push//", 0) for step in steps)


def _grows(few: float, many: float, reduced: float) -> bool:
    """Bytes of a server of 4 and of 32 workers, and of a rank of an all-reduce of 32."""
    return many > 6 * few and reduced < few


def _staleness(ran: Ran) -> list[int]:
    """Gradients by their staleness, over all steps."""
    counts = [step.get("staleness_counts", []) for step in ran.metrics()]
    return [sum(line[i] for line in counts if i < len(line)) for i in range(max(map(len, counts)))]


def _busiest(ran: Ran, run: int) -> float:
    """Tokens of the busiest expert over the mean, summed over the layers; the least of the last ten steps."""
    return min(sum(step["router"]["busiest"]) for step in ran.metrics(run)[-10:])


def _ops(ran: Ran) -> set[str]:
    return {row["op"] for row in ran.objects[0]["rows"] if "op" in row}


def _falls(numbers: Sequence[float]) -> bool:
    return all(a > b for a, b in pairwise(numbers))


def _memory(ran: Ran, key: str) -> list[float]:
    return [found["mem_gib"][key] for found in ran.objects]


SIMULATE = "unisono simulate examples/priced/gpt_1b.toml --json --cluster dgx-a100:8"
SWEEP = "unisono sweep examples/sweeps"
_G = "1 Task level and architectures"
ARCHITECTURES = (
    reads(
        _G,
        "Independent task / job-level execution",
        f"{SWEEP}/seeds.toml --workers 2 --train.steps 4 --json",
        "trials are runs of their own, two at a time: each with a folder and a state",
        lambda ran: (
            [Path(ran.folder, row["run_dir"]).is_dir() for row in ran.objects[0]["trials"]] == [True] * 2
        ),
    ),
    reads(
        _G,
        "Parallel hyper-parameter search",
        f"{SWEEP}/lr.toml --workers 2 --json && unisono train runs/lr/best.toml --dry-run --json",
        "trials that were stopped early, one that was trained to the end, and its recipe",
        lambda ran: (
            {row["state"] for row in ran.objects[0]["trials"]} == {"pruned", "done"}
            and ran.objects[1]["recipe"]["train"]["lr"] == ran.objects[0]["best"]["params"]["train.lr"]
        ),
    ),
    reads(
        _G,
        "Ensemble training",
        f"{SWEEP}/seeds.toml --workers 2 --train.steps 4 && unisono evaluate runs/seeds/trial-* --json",
        "NLL, accuracy and calibration error of both members, and of the mean of their probabilities",
        lambda ran: (
            len(ran.objects[0]["members"]) == 2
            and ran.objects[0]["ensemble"]["nll"]
            <= max(member["nll"] for member in ran.objects[0]["members"])
        ),
    ),
    reads(
        _G,
        "Centralised parameter server",
        f'{TRAIN} 8 --plan dp=2 --json && sleep 1 && {TRAIN} 8 --plan "dp=2 sync=ssp:s=0" --json',
        "a server that waits for all workers: `val_loss` of lock-step, and what is pushed to it in `ledger`",
        lambda ran: _pushed(ran.metrics()) > 0 and _near(*(each["val_loss"] for each in ran.objects)),
    ),
    reads(
        _G,
        "Sharded / decentralised parameter server",
        f'{TRAIN} 8 --plan "dp=2 sync=async" --launch.servers 2',
        "both ranks serve weights: `dp.serve` in the events of each",
        lambda ran: all(any(step.get("bytes", {}).get("dp.serve") for step in rank) for rank in ran.events()),
    ),
    reads(
        _G,
        "Worker-server push/pull patterns",
        'unisono train examples/clicks.toml --no-out.report --train.steps 12 --plan "dp=2 sync=ssp:s=2"',
        "of tables, the rows that a batch has read are pushed: less than the tables' bytes",
        lambda ran: 0 < _pushed(ran.metrics()[-1:]) < 4 * 10_000,
    ),
    reads(
        _G,
        "Post-training by rewards (GRPO)",
        'unisono train examples/grpo.toml --no-out.report --plan "dp=2 sync=canonical" --post.sft_steps 2'
        " --train.steps 6 --post.max_staleness 1",
        "weights of at most one update before draw the sequences, and their version is there: `staleness` is 0, then"
        " 1",
        lambda ran: (
            [step["staleness"] for step in ran.metrics() if "staleness" in step] == [0.0, 1.0, 1.0, 1.0]
        ),
    ),
    reads(
        _G,
        "Post-training by preferences (DPO)",
        "unisono train examples/dpo.toml --no-out.report --plan dp=2 --train.steps 30",
        "the share of pairs whose right answer has gained more than the wrong one on the reference rises above 0.6",
        lambda ran: max(step["preferred_share"] for step in ran.metrics()[-5:]) > 0.6,
    ),
    reads(
        _G,
        "Supervised fine-tuning, the same bits however documents are packed",
        'unisono train examples/sft.toml --no-out.report --train.steps 20 --plan "dp=2 sync=canonical" && unisono train'
        ' examples/sft.toml --no-out.report --train.steps 20 --plan "dp=1 sync=canonical" --data.packing none'
        " --train.micro_batch 32",
        "losses and gradient norms of all steps are equal to the last bit",
        lambda ran: (
            [(step["loss"], step["grad_norm"]) for step in ran.metrics(0)]
            == [(step["loss"], step["grad_norm"]) for step in ran.metrics(1)]
        ),
    ),
    reads(
        _G,
        "Rollouts of stale weights, none of which is thrown away",
        "unisono train examples/grpo.toml --name lengths --no-out.report --plan dp=2 --post.sft_steps 10 --train.steps"
        " 20 --post.samplers 2 --post.max_staleness 2 && unisono report runs/lengths --json",
        "as many sequences are trained as samplers drew, and a Kolmogorov-Smirnov test accepts their lengths",
        lambda ran: ran.objects[-1]["lengths"]["alike"] and ran.objects[-1]["lengths"]["lost"] == 0,
    ),
    reads(
        _G,
        "Rollout workers with acknowledged weights",
        'unisono train examples/grpo.toml --no-out.report --plan "dp=2 sync=canonical" --train.micro_batch 8'
        " --post.sft_steps 2 --train.steps 6 --post.samplers 2",
        "processes beside the ranks draw, from weights whose digests they acknowledge: `logprob_gap` of trainer and"
        " sampler is 0.0",
        lambda ran: {step["logprob_gap"] for step in ran.metrics() if "logprob_gap" in step} == {0.0},
    ),
    prints(
        _G,
        "RPC with distributed autograd",
        "python examples/parameter_server.py",
        "two trainers and a server learn by remote calls",
        r"^loss 0\.0\d+  staleness",
    ),
    proven(_G, "Peer-to-peer all-reduce architecture", "dp=4"),
    proven(
        _G,
        "Diffusion by flow matching",
        "dp=2",
        "shard=2",
        "cp=2",
        recipe="examples/dit.toml",
        more="--model.n_layer 2 --model.d_model 32 --train.global_batch 8 --train.micro_batch 2 --steps 4",
    ),
    reads(
        _G,
        "Aggregation bottleneck / scalability analysis",
        f'{SERVED} "dp=4 sync=async precision=bf16" && {SERVED} "dp=32 sync=async precision=bf16" && '
        f'{SERVED} "dp=32 precision=bf16"',
        "`comm.dp`: what one server moves grows with the workers, what a rank of an all-reduce sends does not",
        lambda ran: _grows(*(each["comm"]["dp"]["bytes"] for each in ran.objects)),
    ),
)
_G = "2 Data parallelism"
DATA_PARALLEL = (
    proven(_G, "Model replication, identical copies", "dp=2"),
    proven(_G, "Initial weight synchronisation", "dp=2 pp=2"),
    reads(
        _G,
        "Run-time replica-consistency check",
        f'{TRAIN} 6 --plan dp=2 --guard 1 --chaos "flip:who=1:step=3" --json; test $? -ne 0',
        "the flipped bit ends the run with U-G01, which names the rank and the tensor",
        lambda ran: re.search(r"U-G0\d", ran.said),
    ),
    proven(_G, "Data sharding, batch distribution", "dp=3"),
    reads(
        _G,
        "Gradient synchronisation / averaging",
        f"{TRAIN} 2 --plan dp=2 --json",
        "`ledger`: gradients crossed `dp` by all-reduce",
        lambda ran: any(key.startswith("dp/all_reduce") for key in ran.metrics()[-1]["ledger"]),
    ),
    proven(_G, "Gradient accumulation", "dp=2 micros=4"),
    prints(
        _G,
        "Small-edit migration from one device",
        "grep -c 'unisono' examples/own_loop.py && python examples/own_loop.py",
        "a training loop of its own with three lines of Unisono",
        r"epoch 3  loss",
    ),
    prints(
        _G,
        "nanoGPT's and torchtitan's scripts in at most 12 new lines",
        'for n in nanogpt titan; do unisono prove examples/doors/${n}_after.py --plan "dp=2 shard=2"; done',
        "`ok` for both: as one process computes it",
        r"\bok$(.|\n)*\bok$",
    ),
)
_G = "3 Sharded data parallelism"
SHARDED = (
    proven(_G, "Optimizer-state sharding (ZeRO-1)", "shard=2 zero=1"),
    proven(_G, "Gradient sharding (ZeRO-2)", "shard=2 zero=2"),
    proven(_G, "Parameter sharding (ZeRO-3, FSDP)", "shard=3 zero=3"),
    reads(
        _G,
        "Memory that falls with the number of shards",
        " && ".join(f'{SIMULATE} --plan "dp={64 // n} shard={n} zero=3 recompute=full"' for n in (1, 8, 64)),
        "`mem_gib`: params, grads and optim fall by the number of shards",
        lambda ran: all(4 < a / b < 9 for key in ("params", "optim") for a, b in pairwise(_memory(ran, key))),
    ),
    proven(_G, "Hybrid / hierarchical sharding", "dp=2 shard=2"),
    reads(
        _G,
        "Low-bit parameter/gradient traffic",
        f'{TRAIN} 2 --plan "shard=2 zero=3" --json && sleep 1 && {TRAIN} 2 --plan "shard=2 zero=3:wire=int8" --json',
        "`bytes_sent` falls to less than half",
        lambda ran: sent(ran, 1) < 0.5 * sent(ran, 0),
    ),
)
_G = "4 Tensor / operator parallelism"
TENSOR = (
    proven(_G, "Column-wise and row-wise split, attention and FFN", "tp=2", "tp=3"),
    proven(_G, "Block-wise (2D) matmul split", "tp=2x2"),
    proven(_G, "Embedding-table / vocab sharding, sequence parallelism", "tp=4"),
    proven(
        _G,
        "Operator-level split of arbitrary models",
        "tp=2",
        "pp=2",
        recipe="examples/hf_llama.toml",
        more="--train.global_batch 8 --train.micro_batch 2",
    ),
    proven(_G, "Context parallelism (ring / Ulysses)", "cp=2 cp_kind=ring", "cp=2 cp_kind=ulysses"),
    proven(_G, "Overlapped tensor parallelism", "tp=2:chunks=2"),
)
_G = "5 Pipeline parallelism and schedules"
OWN_SCHEDULE = """cat > mine.py <<'END'
def pairs(ranks, micros):
    row = []
    for i in range(0, micros, 2):
        both = range(i, min(i + 2, micros))
        row += [f"F{m}" for m in both] + [f"B{m}" for m in both]
    return [row] * ranks
END
"""
SKIP_MODEL = """cat > net.py <<'END'
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.embed, self.head = nn.Embedding(vocab, 32), nn.Linear(64, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        y = torch.relu(self.b(torch.relu(self.a(x))))
        return self.head(torch.cat([torch.relu(self.c(y)), x], dim=-1))


def net(vocab):
    return Net(vocab)
END
"""
PIPELINE = (
    proven(_G, "Layer-wise / sequential stage assignment", "pp=3"),
    proven(_G, "GPipe", "pp=2 micros=4 schedule=gpipe"),
    proven(_G, "1F1B", "pp=2 micros=4 schedule=1f1b"),
    proven(
        _G, "Interleaved / virtual stages", "pp=2 micros=4 schedule=looped_bfs:v=2", more="--model.n_layer 4"
    ),
    proven(
        _G,
        "Zero-bubble (split backward)",
        "pp=2 micros=4 schedule=zb1p",
        "pp=2 micros=4 schedule=zbv",
        more="--model.n_layer 4",
    ),
    proven(_G, "DualPipe family", "pp=2 micros=4 schedule=dualpipe", more="--model.n_layer 4"),
    proven(
        _G,
        "Async PipeDream with weight versions",
        "pp=2 micros=4 schedule=pipedream",
        more="--no-model.tie_embeddings --train.clip 0",
    ),
    prints(
        _G,
        "User-written schedule",
        f'{OWN_SCHEDULE}{PROOF} --plan "pp=2 micros=4 schedule=mine.py:pairs"',
        "`ok`",
        r"mine.py:pairs.*  ok$",
    ),
    prints(
        _G,
        "Automatic stage balancing",
        f'{TRAIN} 2 --plan "pp=2 micros=4 schedule=1f1b:cut=measured"',
        "the blocks of each stage, chosen from measured times",
        r"stages by measured seconds: \d+/\d+ blocks",
    ),
    prints(
        _G,
        "Skip connections, non-sequential graphs",
        f"{SKIP_MODEL}unisono verify --model.kind net.py:net --model.context 16 --train.global_batch 4"
        ' --train.micro_batch 2 --steps 1 --dtype float64 --plan "pp=2"',
        "`ok`",
        r"pp=2.*  ok$",
    ),
    reads(
        _G,
        "Bubble / idle-time / throughput analysis",
        f'{SIMULATE} --plan "dp=8 pp=8 micros=8 schedule=gpipe recompute=full" --train.global_batch 64 && '
        f'{SIMULATE} --plan "dp=8 pp=8 micros=64 schedule=1f1b recompute=full"',
        "`bubble` falls with more micro-batches",
        lambda ran: ran.objects[1]["bubble"] < 0.5 * ran.objects[0]["bubble"],
    ),
    proven(_G, "Tied weights across stages", "pp=2 micros=4", more="--model.tie_embeddings"),
    proven(_G, "Gradient accumulation inside pipelines", "pp=2 dp=2 micros=6"),
    proven(
        _G, "Pipeline combined with ZeRO-2/3", "pp=2 shard=2 zero=2 micros=4", "pp=2 shard=2 zero=3 micros=4"
    ),
)
_G = "6 Hybrid, mesh, automatic planning"
PLANNING = (
    proven(_G, "2D data x tensor", "dp=2 tp=2"),
    proven(_G, "3D data x tensor x pipeline", "dp=2 tp=2 pp=2 micros=2"),
    proven(_G, "4D (plus context)", "dp=2 cp=2 pp=2 micros=2"),
    reads(
        _G,
        "Topology-aware placement",
        f'{SIMULATE} --plan "dp=8 tp=8" && {SIMULATE} --plan "dp=8 tp=8" --order dp,tp',
        "`step_s`: tp inside a node is faster than tp across nodes",
        lambda ran: ran.objects[0]["step_s"] < ran.objects[1]["step_s"],
    ),
    reads(
        _G,
        "Communication-pattern / volume prediction",
        f'{SIMULATE} --plan "dp=8 tp=8"',
        "`comm`: bytes and seconds by axis",
        lambda ran: {"dp", "tp"} <= set(ran.objects[0]["comm"]),
    ),
    reads(
        _G,
        "Optimal configuration selection",
        SIMULATE.replace("simulate", "plan") + " --top 3",
        "`plans`: the three best, and why",
        lambda ran: len(ran.objects[0]["plans"]) == 3 and ran.objects[0]["plans"][0]["why"],
    ),
    proven(_G, "Per-layer different strategy", "dp=2 blocks=0:recompute=full"),
    prints(
        _G,
        "Workload balancing over dims (uneven heads and widths)",
        f'{PROOF} --plan "tp=5"',
        "`ok`: 12 heads over 5 ranks",
        r"tp=5.*  ok$",
    ),
    reads(
        _G,
        "Memory estimate before launch",
        f'{SIMULATE} --plan "shard=64 zero=3 recompute=full"',
        "`mem_gib`",
        lambda ran: ran.objects[0]["mem_gib"]["total"] > 0,
    ),
    reads(
        _G,
        "Checkpoint resharding across plans",
        f'{TRAIN} 4 --plan "tp=2" --json &&'
        ' unisono train --resume runs/proof --train.steps 6 --plan "shard=2 pp=2 micros=2" --json',
        "the run continues at step 4 under the other plan",
        lambda ran: ran.objects[1]["steps"] == 6,
    ),
)
_G = "7 Expert parallelism"
MOE = "--train.global_batch 8 --train.micro_batch 2"
EXPERTS = (
    proven(_G, "MoE layers with expert parallelism", "shard=2 ep=2", recipe="examples/moe.toml", more=MOE),
    proven(
        _G,
        "Routing strategies",
        "shard=2 ep=2",
        recipe="examples/moe.toml",
        more=f"{MOE} --model.top_k 1 --model.bias_rate 0 --model.aux_loss 0.01",
    ),
    reads(
        _G,
        "Expert load balancing",
        " && ".join(
            f"unisono train examples/moe.toml --train.steps 60 --no-out.report --model.bias_rate {rate} --json; sleep 1"
            for rate in ("0", "0.01")
        ),
        "`router.busiest`: tokens of the busiest expert over the mean, fall",
        lambda ran: _busiest(ran, 1) < 0.8 * _busiest(ran, 0),
    ),
    proven(
        _G,
        "Capacity-limited / dropless dispatch",
        "shard=2 ep=2",
        recipe="examples/moe.toml",
        more=f"{MOE} --model.capacity_factor 1.25",
    ),
    reads(
        _G,
        "Experts on unreliable peers",
        "python examples/unreliable_experts.py",
        "one of three peers is killed; calls to it have `failed`, and the loss falls on",
        lambda ran: "'failed'" in ran.out and ran.out.count("loss 0.0") == 4,
    ),
)
_G = "8 Synchronous, asynchronous, stale"
TOGETHER = (
    proven(_G, "Lock-step updates, global barrier", "dp=2 sync=every_step"),
    prints(
        _G,
        "Straggler detection",
        f'{TRAIN} 12 --plan dp=2 --chaos "slow:who=1:step=2:seconds=4" --out.report',
        "the verdict names the rank that the others wait for",
        r"Limited by rank 1",
    ),
    reads(
        _G,
        "Straggler mitigation",
        f'{TRAIN} 12 --plan "dp=2 sync=every_step:balance=2" --train.micro_batch 2'
        ' --chaos "slow:who=1:step=1:seconds=60"',
        "`leaves` of the slow rank fall",
        lambda ran: ran.metrics()[-1]["leaves"][1] <= 3 < 6 == ran.metrics()[0]["leaves"][1],
    ),
    reads(
        _G,
        "Communication every k steps",
        f'{TRAIN} 8 --plan dp=2 --json && sleep 1 && {TRAIN} 8 --plan "dp=2 sync=period:4" --json',
        "bytes of eight steps fall to a quarter",
        lambda ran: _total(ran, 1) < 0.3 * _total(ran, 0),
    ),
    reads(
        _G,
        "Backup workers / k-of-n aggregation",
        f'{TRAIN} 12 --plan "dp=2 sync=quorum:k=1" --launch.servers 2'
        ' --chaos "slow:who=1:step=1:times=5:seconds=60"',
        "`effective_batch`: samples of an update, fewer than the global batch",
        lambda ran: any(line.get("effective_batch", 99) <= 12 for line in ran.metrics()),
    ),
    reads(
        _G,
        "Asynchronous independent updates",
        f'{TRAIN} 12 --plan "dp=2 sync=async"',
        "`staleness_counts`: gradients by their staleness",
        lambda ran: sum(_staleness(ran)) >= 12,
    ),
    reads(
        _G,
        "Stale-gradient handling / correction",
        f'{TRAIN} 12 --plan "dp=2 sync=async:rate=aware,dc=0.04"',
        "the run ends, with `staleness_counts`",
        lambda ran: sum(_staleness(ran)) >= 12,
    ),
    reads(
        _G,
        "Bounded staleness (SSP)",
        f'{TRAIN} 12 --plan "dp=2 sync=ssp:s=2"',
        "`staleness_counts` end at the bound",
        lambda ran: 12 <= sum(_staleness(ran)) == sum(_staleness(ran)[:3]),
    ),
    proven(_G, "Delayed gradients", "dp=2 sync=delayed:lag=1"),
    reads(
        _G,
        "Hogwild! / lock-free shared memory",
        'unisono train examples/clicks.toml --no-out.report --train.steps 12 --plan "dp=2 sync=hogwild:meet=4"',
        "nothing is sent but at meetings; `staleness_counts`: updates of others between read and write",
        lambda ran: (
            sum(_staleness(ran)) == 12 and sum(line["bytes_sent"] == 0 for line in ran.metrics()) >= 9
        ),
    ),
    reads(
        _G,
        "Local SGD / periodic averaging",
        f'{TRAIN} 8 --plan dp=2 --json && sleep 1 && {TRAIN} 8 --plan "dp=2 sync=local_sgd:h=4" --json',
        "bytes of eight steps fall to a quarter",
        lambda ran: _total(ran, 1) < 0.3 * _total(ran, 0),
    ),
    reads(
        _G,
        "DiLoCo-style outer optimiser",
        f'{TRAIN} 8 --plan "dp=2 sync=diloco:h=4,outer_lr=0.7,outer_momentum=0.5"',
        "`consensus` every fourth step: how far replicas had drifted from their mean",
        lambda ran: ["consensus" in line for line in ran.metrics()] == [False, False, False, True] * 2,
    ),
    reads(
        _G,
        "Adaptive communication frequency",
        f'{TRAIN} 12 --plan "dp=2 sync=period:1,most=8"',
        "`period`: steps to the next meeting, chosen anew by what the last one showed beside computing",
        lambda ran: len({line["period"] for line in ran.metrics() if "period" in line}) > 1,
    ),
    reads(
        _G,
        "Staleness / convergence instrumentation",
        f'{TRAIN} 12 --plan "dp=2 sync=ssp:s=2"',
        "`staleness`, `staleness_counts`, `effective_batch`, `idle_share` of each step",
        lambda ran: (
            {"staleness", "staleness_counts", "effective_batch", "idle_share"} <= ran.metrics()[5].keys()
        ),
    ),
)
_G = "9 Collectives and topologies"
COLLECTIVE = (
    reads(
        _G,
        "Broadcast, scatter, gather, reduce",
        "unisono bench collectives --ranks 2 --sizes 64KiB --ops broadcast,scatter,gather,reduce --seconds 0.05 --json",
        "`rows`: each operation, beside the backend's",
        lambda ran: {"broadcast", "scatter", "gather", "reduce"} <= _ops(ran),
    ),
    reads(
        _G,
        "All-gather, all-reduce, reduce-scatter, all-to-all",
        "unisono bench collectives --ranks 2 --sizes 64KiB --seconds 0.05 --collectives messages,memory --json"
        " --ops all_reduce,reduce_scatter,all_gather,all_to_all",
        "`rows`",
        lambda ran: {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"} <= _ops(ran),
    ),
    *(
        proven(_G, name, f"dp=4 collective={member}")
        for name, member in (
            ("Ring topology, selectable", "ring"),
            ("Tree topology, selectable", "double_tree"),
            ("Mesh / butterfly direct exchange", "halving_doubling"),
            ("Torus", "torus"),
            ("Hierarchical two-level", "hierarchical"),
        )
    ),
    prints(
        _G,
        "In-process simulation of many ranks",
        """python - <<'END'
import torch
import torch.distributed as dist
from unisono.comm import threads

def one(rank):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()

print(threads.run(4, one))
END""",
        "four ranks in one process: each sums 0 + 1 + 2 + 3",
        r"\[6\.0, 6\.0, 6\.0, 6\.0\]",
    ),
    reads(
        _G,
        "Latency/bandwidth cost model, compute:comm ratio",
        f'{SIMULATE} --plan "dp=64"',
        "`comm` and `exposed_s`",
        lambda ran: ran.objects[0]["comm"]["dp"]["seconds"] > 0,
    ),
)
_G = "10 Backends and networks"
BACKENDS = (
    prints(_G, "Gloo", f"{TRAIN} 2 --plan dp=2", "the start line names the backend", r"backend gloo"),
    prints(
        _G,
        "Backend choice by capability",
        f"{TRAIN} 2 --plan dp=2 --launch.backend nccl",
        "an unavailable backend is refused, with the reason",
        r"U-L08",
        code=2,
    ),
    prints(
        _G,
        "RDMA / InfiniBand / Ethernet transports",
        "unisono doctor",
        "`transport`: the network that leads to other hosts",
        r"transport +\S",
    ),
    reads(
        _G,
        "Backend benchmarking",
        "unisono bench net --ranks 2 --seconds 0.05 --json",
        "`rows`: latency and bandwidth",
        lambda ran: ran.objects[0]["rows"],
    ),
    prints(
        _G,
        "A device that is simulated",
        f"{TRAIN} 2 --plan dp=2 --device sim",
        "no race, and how often the host waited",
        r"simulated device: no race; .* host waits",
    ),
)
_G = "11 Numeric formats and gradient compression"


def smaller(name: str, codec: str, factor: float, more: str = "") -> Row:
    """A codec whose bytes on the wire are at most this share of plain ones."""
    flags = f"--train.clip 0 {more}".strip()
    return reads(
        _G,
        name,
        f"{TRAIN} 2 --plan dp=2 {flags} --json && sleep 1 &&"
        f' {TRAIN} 2 --plan "dp=2 codec={codec}" {flags} --json',
        f"`bytes_sent` falls to {factor} of plain",
        lambda ran: sent(ran, 1) < factor * sent(ran, 0),
    )


COMPRESSION = (
    smaller("Half-precision gradient traffic", "cast:bf16", 0.55),
    smaller("Integer gradient quantisation", "int8", 0.4),
    smaller("Top-k sparsification, error feedback", "topk:ratio=0.01+ef", 0.2),
    smaller("Random sparsification", "randomk:ratio=0.05+ef", 0.3),
    smaller("Structured / low-rank (PowerSGD)", "powersgd:r=2+ef", 0.5),
    smaller("Momentum correction", "topk:ratio=0.01+mc", 0.2, "--train.optimizer sgd --train.momentum 0"),
    reads(
        _G,
        "1-bit style optimisers",
        f"{TRAIN} 6 --plan dp=2 --train.clip 0 --json && sleep 1 &&"
        f' {TRAIN} 6 --plan "dp=2 codec=sign+ef" --train.clip 0'
        " --train.optimizer onebit_adam --train.variance_steps 2 --json",
        "after two steps of Adam one sign per element is sent",
        lambda ran: sent(ran, 1) < 0.2 * sent(ran, 0),
    ),
    prints(
        _G,
        "Mixed-precision training",
        "unisono verify examples/proof.toml --steps 2 --plan 'dp=2 precision=bf16'",
        "as one device computes it in bf16",
        r"precision=bf16.*  ok$",
    ),
    reads(
        _G,
        "Dynamic range / loss scaling",
        f"{TRAIN} 6 --plan 'precision=fp16:scale=1e30' --json; true",
        "steps that overflow are skipped, and the loss scale falls",
        lambda ran: ran.objects,
    ),
    proven(
        _G,
        "Compression composing with ZeRO/TP/PP",
        "dp=2 tp=2 codec=powersgd:r=4+ef",
        "dp=2 shard=2 codec=int8",
    ),
    reads(
        _G,
        "Model compression (prune/quantise)",
        f"{TRAIN} 4 --model.d_model 48 --json && unisono export runs/proof --to hf --out plain --json"
        " && unisono export runs/proof --prune 0.5 --to hf --out pruned --json",
        "half of the pruned folder's weights are zero",
        lambda ran: len(ran.objects) == 3,
    ),
)
_G = "12 Communication scheduling"
SCHEDULING = (
    proven(_G, "Gradient bucketing / fusion", "dp=2 sync=every_step:bucket=1", more="--model.d_model 96"),
    proven(_G, "Parameter prefetch", "shard=2 zero=3:prefetch=2"),
    proven(_G, "Priority-based scheduling", "dp=2 sync=priority", more="--train.clip 0"),
)
_G = "13 Memory"
MEMORY = (
    reads(
        _G,
        "Gradient checkpointing / recomputation, selective",
        " && ".join(
            f'{SIMULATE} --train.micro_batch 8 --plan "dp=64 recompute={how}"' for how in ("none", "full")
        ),
        "`mem_gib.activations` falls",
        lambda ran: _falls(_memory(ran, "activations")),
    ),
    proven(_G, "Recomputed blocks give the same numbers", "recompute=full", "recompute=selective"),
    reads(
        _G,
        "Solver-chosen recomputation",
        f'{SIMULATE} --train.micro_batch 8 --plan "dp=64 recompute=auto"',
        "as many activations as fit are kept, and the page says which are recomputed",
        lambda ran: ran.objects[0]["mem_gib"]["total"] > 0,
    ),
    proven(_G, "Activation offload", "offload=activations", "offload=activations:to=disk"),
    proven(
        _G,
        "Parameter / optimizer offload, to disk",
        "offload=params:to=disk",
        "shard=2 zero=1 offload=optimizer",
    ),
    prints(
        _G,
        "OOM prevention / automatic micro-batch",
        f"{TRAIN} 2 --fit-micro-batch --train.global_batch 96",
        "the largest micro-batch that fits this machine",
        r"micro_batch",
    ),
)
_G = "14 Large batch and optimisers"
OPTIMISERS = (
    reads(
        _G,
        "Learning-rate warm-up",
        f"{TRAIN} 6 --train.warmup_steps 4 --json",
        "`lr` grows for four steps",
        lambda ran: _falls([step["lr"] for step in ran.metrics()][3::-1]),
    ),
    proven(_G, "Gradient clipping across shards", "shard=2 tp=2", "pp=2 dp=2", more="--train.clip 0.1"),
    reads(
        _G,
        "Adasum-style merge",
        f'{TRAIN} 6 --plan "dp=2 sync=adasum"',
        "`adasum_gain`: between the mean of two gradients (1) and their sum (2)",
        lambda ran: all(1.0 < step["adasum_gain"] < 2.1 for step in ran.metrics()),
    ),
    proven(
        _G,
        "LARS, LAMB: trust ratios of whole matrices under any cut",
        "dp=2 shard=2",
        "tp=2 pp=2",
        more="--train.optimizer lamb",
    ),
    proven(_G, "LANS", "shard=2 zero=1", more="--train.optimizer lans"),
    proven(
        _G,
        "Muon: whole matrices made orthogonal under any cut",
        "dp=2 shard=2",
        "pp=2 tp=2",
        more="--train.optimizer muon",
    ),
    proven(
        _G,
        "Second order: Shampoo, whose state lies with one rank of those that hold parts",
        "shard=2 tp=2",
        more="--train.optimizer shampoo",
    ),
    proven(
        _G,
        "Second order: SOAP",
        "dp=2 shard=2",
        "pp=2 tp=2",
        more="--train.optimizer soap",
    ),
    reads(
        _G,
        "Prices of optimisers of whole matrices",
        " && ".join(
            f'{SIMULATE} --plan "shard=64" --train.optimizer {name}' for name in ("muon", "adamw", "soap")
        ),
        "`mem_gib.optim` grows; `comm.owners`: what matrices cost beside gradients",
        lambda ran: (
            _falls(_memory(ran, "optim")[::-1])
            and [one["comm"].get("owners", {}).get("bytes", 0) > 0 for one in ran.objects]
            == [True, False, True]
        ),
    ),
    proven(
        _G,
        "Second order: K-FAC, factors of whole layers under any cut",
        "dp=2 shard=2",
        "tp=2 pp=2",
        more="--train.optimizer kfac",
    ),
    reads(
        _G,
        "1-bit LAMB",
        f"{TRAIN} 6 --plan dp=2 --train.clip 0 --json && sleep 1 &&"
        f' {TRAIN} 6 --plan "dp=2 codec=sign+ef" --train.clip 0'
        " --train.optimizer onebit_lamb --train.variance_steps 2 --json",
        "after two steps of LAMB one sign per element is sent",
        lambda ran: sent(ran, 1) < 0.2 * sent(ran, 0),
    ),
    prints(
        _G,
        "Learning-rate scaling rules",
        f"{TRAIN} 1 --train.lr_scaling linear --train.lr_base_batch 1",
        "the peak rate, and how it came about",
        r"peak lr \S+ = \S+ x \d+ / 1",
    ),
    reads(
        _G,
        "Batch-size schedule / ramp-up",
        f"{TRAIN} 6 --plan dp=2 --train.micro_batch 4 --ramp.first 8 --ramp.growth 8 --ramp.steps 4",
        "`effective_batch` grows from 8 to 24",
        lambda ran: (
            (sizes := [step["effective_batch"] for step in ran.metrics()]) == sorted(sizes)
            and (sizes[0], sizes[-1]) == (8, 24)
        ),
    ),
    reads(
        _G,
        "Gradient noise scale",
        f'{TRAIN} 6 --plan "dp=2 micros=2" --noise_scale.smoothing 0.5',
        "`noise_scale` of the steps, in samples",
        lambda ran: any(step["noise_scale"] for step in ran.metrics()),
    ),
    proven(
        _G,
        "AdaScale: a small batch's schedule by measured gain",
        "dp=2 micros=2",
        "dp=4",
        "shard=2 micros=2",
        "tp=2 micros=4",
        more="--train.optimizer adascale --train.adascale_batch 2",
    ),
    proven(
        _G,
        "Batch-size schedule by steps",
        "dp=2",
        more="--ramp.first 4 --ramp.steps 2 --train.global_batch 8 --train.micro_batch 2",
    ),
    proven(
        _G,
        "Batch-size schedule by the noise scale",
        "dp=2",
        "shard=2",
        "tp=2",
        more="--ramp.by noise_scale --ramp.first 4 --ramp.every 1 --train.global_batch 8 --train.micro_batch 2",
    ),
    reads(
        _G,
        "Generalisation gap",
        f"{TRAIN} 4 --train.eval_every 2",
        "`val_gap` of validations: their loss less that of the training steps before",
        lambda ran: any("val_gap" in step for step in ran.metrics()),
    ),
)
_G = "15 Fault tolerance and elasticity"
FAULTS = (
    prints(
        _G,
        "Failure detection; survivors continue without a restart",
        f'{TRAIN} 10 --plan dp=2 --chaos "kill:who=1:step=4"',
        "a killed rank is replaced, and the run ends",
        r"1 losses, 1 made good",
        r"step 10/10",
    ),
    prints(
        _G,
        "Quorums by step, in the shape of torchft's manager",
        "python examples/doors/torchft_loop.py",
        "the step of the killed worker is made by two, the next by three, and all have the same weights",
        r"step 3: 2 workers",
        r"step 4: 3 workers",
        r"all workers have the same weights",
    ),
    reads(
        _G,
        "The same bits after faults",
        f'{TRAIN} 8 --plan "dp=2 sync=canonical" --json && sleep 1 && {TRAIN} 8 --plan "dp=2 sync=canonical"'
        ' --chaos "kill:who=1:step=4" --json',
        "`loss` is the same to the last digit",
        lambda ran: ran.objects[0]["loss"] == ran.objects[1]["loss"],
    ),
    prints(
        _G,
        "Peer / in-memory recovery",
        f'{TRAIN} 10 --plan "shard=2" --chaos "kill:who=1:step=6"',
        "the state that only the lost rank had comes from its snapshot",
        r"1 losses, 1 made good",
        r"step 10/10",
    ),
    prints(
        _G,
        "Redundancy for critical roles",
        f'{TRAIN} 12 --train.save_every 3 --plan dp=2 --chaos "kill:who=helper:step=4 kill:who=supervisor:step=8"',
        "the fork server and the supervisor are replaced too",
        r"step 12/12",
    ),
    prints(
        _G,
        "Checkpoint and resume",
        f"{TRAIN} 4 && unisono train --resume runs/proof --train.steps 8 --no-out.report",
        "the run goes on",
        r"step 8/8",
    ),
    reads(
        _G,
        "Asynchronous checkpoint",
        f"{TRAIN} 6 --train.save_every 2 --train.async_save --json",
        "checkpoints are written while steps run",
        lambda ran: len(list(ran.folder.glob("runs/*/*/checkpoints/step-*"))) == 3,
    ),
    prints(
        _G,
        "Spot / preemption handling",
        f"({TRAIN} 1000000 --plan dp=2 --json & until ls runs/proof/*/metrics.jsonl; do sleep 0.2; done;"
        " kill -TERM $!; wait $!; echo exit $?); ls runs/proof/*/checkpoints",
        "exit code 75: the run has saved and can be started again",
        r"exit 75",
        r"step-",
    ),
    prints(
        _G,
        "NaN / spike / silent-corruption guard",
        f'{TRAIN} 8 --plan dp=2 --guard 1 --chaos "flip:who=1:step=3"; true',
        "the rank that differs is named",
        r"U-G0",
    ),
    prints(
        _G,
        "Fault-injection harness",
        f'{TRAIN} 12 --plan dp=2 --chaos "random:seed=3:faults=3:kinds=kill,stop,cut"',
        "faults are injected, and the run recovers from the losses",
        r"3 of 3 played",
    ),
)
_G = "16 Data and storage"
SHARDS = (
    'for i in 0 1 2 3; do mkdir $i; for j in 1 2 3 4 5 6 7 8; do echo "text $j of shard $i, some words more"'
    " > $i/$j.txt; done; tar cf $i.tar -C $i 1.txt 2.txt 3.txt 4.txt 5.txt 6.txt 7.txt 8.txt; done"
)
STREAMED = (
    "unisono train --name stream --data.source 'tar:{0..3}.tar,kind=text' --model.n_layer 1 --model.d_model 16"
    " --model.n_head 2 --model.context 16 --train.steps 4 --train.global_batch 8 --train.micro_batch 1"
    " --train.lr_schedule constant --no-out.report"
)
HOSTING = STREAMED.replace("unisono train --name stream", "unisono data").partition(" --train.steps")[0]
UNCACHED = STREAMED.replace("kind=text", "kind=text,cache_gb=1e-9")
DATA = (
    reads(
        _G,
        "Sample order independent of world size; exactly-once resume",
        f'{TRAIN} 4 --plan "dp=2 sync=canonical" --train.micro_batch 3 --train.lr_schedule constant --json'
        ' && unisono train --resume runs/proof --train.steps 8 --plan "dp=4 sync=canonical"'
        " --no-out.report --json && sleep 1 &&"
        f' {TRAIN} 8 --plan "sync=canonical" --train.micro_batch 3 --train.lr_schedule constant --json',
        "two ranks, then four, reach the same final loss as one rank, to the last digit",
        lambda ran: ran.objects[1]["loss"] == ran.objects[2]["loss"],
    ),
    reads(
        _G,
        "Parallel I/O, streaming, caching",
        f"{SHARDS} && {STREAMED} --plan dp=2 --json"
        ' && unisono train --resume runs/stream --train.steps 8 --plan "dp=4" --no-out.report --json && sleep 1 &&'
        f" {STREAMED} --train.steps 8 --json",
        "shards of tar are read by two ranks, then by four, and the loss is that of one rank",
        lambda ran: abs(ran.objects[1]["loss"] - ran.objects[2]["loss"]) < 1e-5,
    ),
    reads(
        _G,
        "Preprocessing in worker processes",
        f"{SHARDS} && {UNCACHED} --json && sleep 1 &&"
        f" {UNCACHED} --data.worker_kind processes --data.workers 2 --json",
        "shards are tokenised by threads, then by processes: the same loss to the last digit",
        lambda ran: ran.objects[0]["loss"] == ran.objects[1]["loss"],
    ),
    prints(
        _G,
        "Preprocessing on data hosts",
        f"{SHARDS}; timeout 100 {HOSTING} 2> said & until grep -q serves said; do sleep 0.2; done;"
        f" {STREAMED} --data.hosts $(grep -o '127.*' said); kill $!; wait; cat said",
        "another process has read the samples of the run, and says how many",
        r"served \d+ samples",
    ),
    reads(
        _G,
        "Distributed file system / object store",
        f"{TRAIN} 4 --train.save_every 2 --train.mirror mirrored --json",
        "each checkpoint is copied to a second place",
        lambda ran: list(ran.folder.glob("mirrored/**/step-*")),
    ),
)
_G = "17 Profiling and tuning"
PROFILING = (
    reads(
        _G,
        "Collective bandwidth and latency log",
        f"{TRAIN} 8 --plan dp=2 && unisono report runs/proof --json",
        "`collectives`: waiting apart from moving, by axis, operation and size; `sent`: bytes by algorithm",
        lambda ran: any(
            row["op"] == "all_reduce" and row["moving_s"] > 0 for row in ran.objects[0]["collectives"]
        ),
    ),
    reads(
        _G,
        "Memory profile",
        f"{TRAIN} 8 --profile steps=5:6 && unisono report runs/proof --json",
        "`profile.memory`: bytes at the peak by kind and by module beside the ledger's",
        lambda ran: (
            ran.objects[-1]["profile"]["memory"][0]["kinds"]["params"]
            == ran.objects[-1]["profile"]["predicted_bytes"]["params"]
        ),
    ),
    reads(
        _G,
        "Profiler: modules, operators, Python lines, all ranks on one clock",
        f"{TRAIN} 8 --plan dp=2 --profile steps=5:6 && unisono report runs/proof --json",
        "`profile.modules`, `operators`, `lines`; `profile/trace.pftrace` for Perfetto, Kineto files for other tools",
        lambda ran: len(ran.objects[-1]["profile"]["modules"]) > 10 and [*ran.folder.glob("**/*.pftrace")],
    ),
    reads(
        _G,
        "Garbage collection between steps",
        f"{TRAIN} 6 --plan dp=2 --train.gc_every 2",
        "`gc_s` in the events of steps 2, 4 and 6 alone",
        lambda ran: all(
            [line["step"] for line in lines if line.get("gc_s")] == [2, 4, 6] for lines in ran.events()
        ),
    ),
    reads(
        _G,
        "Throughput / MFU",
        f'{SIMULATE} --plan "dp=64"',
        "`mfu`",
        lambda ran: 0 < ran.objects[0]["mfu"] < 1,
    ),
    reads(
        _G,
        "Straggler inside backward",
        f'{TRAIN} 60 --plan dp=2 --chaos "lag:who=1:step=10:part=backward:module=blocks.1.mlp"'
        " && unisono report runs/proof --json",
        "`stragglers`: rank, part of the step, module, since when, and what it costs",
        lambda ran: ran.objects[0]["stragglers"][0]["module"] == "blocks.1.mlp",
    ),
    reads(
        _G,
        "One clock for the ranks of all hosts",
        f"{TRAIN} 8 --plan dp=2",
        "`start` of each step, and `clock`: what was taken out of the rank's own",
        lambda ran: all(
            line["start"] > 0 and "offset_us" in line["clock"] for one in ran.events() for line in one[1:]
        ),
    ),
    prints(
        _G,
        "Advice on accumulation and communication frequency",
        f'{SIMULATE.replace(" --json", "")} --plan "dp=64" --batches',
        "which batch and accumulation suit the hardware",
        r"micro_batch|accumulat",
    ),
    reads(
        _G,
        "Resource monitoring",
        "unisono doctor --json; true",
        "cores, memory, disk, load",
        lambda ran: ran.objects,
    ),
    reads(
        _G,
        "Resources of hosts and ranks over a run",
        "unisono train --demo --quiet --train.steps 30 --out.track resources:every=0.2",
        "cores, memory, disk, network; GPUs and joules where the host tells; a row of the report",
        lambda ran: (
            "Means over" in (ran.folder / "runs/demo/latest/report.html").read_text()
            and any(
                '"available_mib"' in text for text in _texts(ran, "runs/demo/latest/resources/host-*.jsonl")
            )
        ),
    ),
    prints(
        _G,
        "Explaining logs of failed runs",
        "printf '%s\\n' '[rank1]: OSError: [Errno 28] No space left' '[rank0]: Broken pipe' > a.log; "
        "unisono doctor explain a.log",
        "`cause`, `evidence`, `try`; exit code 4",
        r"cause +.*the disk.*rank 1",
        r"evidence +a\.log:1",
        code=4,
    ),
    reads(
        _G,
        "Bottleneck verdict in words, with the change and its gain",
        f'{TRAIN} 24 --plan dp=2 --train.save_every 1 && unisono ask runs/proof "since step 10" --json',
        "`checkpoints`, and a larger `--train.save_every`",
        lambda ran: (
            ran.objects[-1]["cause"] == "checkpoints" and "--train.save_every" in ran.objects[-1]["change"]
        ),
    ),
    reads(
        _G,
        "Strong and weak scaling, with advice",
        "unisono scale examples/proof.toml --ranks 1,2 --steps 12 --json",
        "speed-up and efficiency of four runs, and a verdict of each",
        lambda ran: (
            [point["ranks"] for point in ran.objects[-1]["points"]] == [1, 2, 1, 2]
            and all(point["verdict"] and point["efficiency"] for point in ran.objects[-1]["points"])
        ),
    ),
)
_G = "18 Cluster managers"
CLUSTERS = (
    prints(
        _G,
        "Notebook launcher",
        """python - <<'END'
import unisono

def train(factor):
    job = unisono.init()
    return factor * (job.rank + job.world)

print(unisono.notebook_launch(train, 10, ranks=2))
END""",
        "what two processes of a function returned that stands in no file",
        r"\[20, 30\]",
    ),
    prints(
        _G,
        "Multi-node launch, environment variables",
        f"torchrun --standalone --nproc-per-node 2 -m {TRAIN} 3 --plan dp=2",
        "the same command under torchrun",
        r"step 3/3",
    ),
    prints(
        _G,
        "Slurm",
        "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_TASKS_PER_NODE=1"
        f" SLURM_NODEID=0 SLURM_JOB_NODELIST=localhost {TRAIN} 2",
        "srun's variables are read",
        r"step 2/2",
    ),
    prints(
        _G,
        "Slurm batch script with requeue",
        'unisono launch slurm --demo --dry-run --plan "dp=2 tp=2" --job.nodes 2',
        "unisono launch slurm writes the script from recipe and plan",
        r"#SBATCH --nodes=2[\s\S]*scontrol requeue",
    ),
    prints(
        _G,
        "Kubernetes Job, JobSet, TrainJob, PyTorchJob; Kueue, gang",
        "unisono launch k8s --demo --dry-run --kind jobset --k8s.image train:1 --k8s.queue team --k8s.gang plugin",
        "unisono launch k8s writes the manifests",
        r"queue-name: team[\s\S]*maxRestarts|minMember",
    ),
    prints(
        _G,
        "Ray: placement group, one actor a rank",
        "unisono launch ray --demo --dry-run",
        "unisono launch ray writes the driver's script",
        r"launch.on_ray --ranks 4",
    ),
)
_G = "19 Debugging, correctness, reproducibility"
DEBUGGING = (
    prints(
        _G,
        "Hang diagnosis naming rank and operation",
        f'{TRAIN} 8 --plan dp=2 --chaos "hang:who=1:step=4" --launch.timeout 5 --no-launch.recover',
        "rank, line, and what the others wait in",
        r"U-H01.*rank 1",
        r"where +\S+\.py:\d+",
        code=6,
    ),
    proven(_G, "Correctness check against one device", "dp=2 tp=2"),
    prints(
        _G,
        "Silent bugs of other stacks, found and named",
        "python -m unisono_contrib.zoo 6660 24725 4332 --explain",
        "doubled micro-batches, a mean of means, a bias divided by tp; their healthy twins pass",
        r"3 bugs: 3 found in one step, 3 with their cause; 3 of 3 healthy twins pass",
    ),
    prints(
        _G,
        "Check of one device against a second engine",
        "unisono verify --model.n_layer 2 --train.global_batch 8 --plan dp=2 --steps 1 --witness numpy",
        "loss, gradients and updates of NumPy, to 1e-12",
        r"numpy +one device .* ok$",
        r"torch +dp=2 .* ok$",
    ),
    prints(
        _G,
        "Fuzz of plans",
        "unisono verify --fuzz 8 --seed 3",
        "recipes and plans drawn from a seed, each as one device",
        r"drawn plans are as one device, 0 are not$",
    ),
    prints(
        _G,
        "Fuzz of other stacks",
        "unisono verify --fuzz 4 --seed 3 --stack ddp,fsdp2",
        "training steps drawn from a seed, DDP and FSDP2 on each as one device",
        r"^4 drawn steps are as one device, 0 are not$",
    ),
    prints(
        _G,
        "Proof of a training step on another stack",
        "python examples/stack_step.py ddp fsdp2",
        "gradients and updates of DDP and FSDP2; of a wrong step the cause",
        r"^ddp right: ok: 4 gradients.*4 updates",
        r"^fsdp2 right: ok: 4 gradients.*4 updates",
        r"^ddp, hasty: WRONG.*steps_per_micro_batch",
    ),
    prints(
        _G,
        "Static check of the parallel program",
        'unisono verify examples/proof.toml --static --plan "dp=8 pp=3 tp=2 micros=3"',
        "every operation of 48 ranks has its partners",
        r"48 ranks.*ok$",
    ),
    prints(
        _G,
        "Dry run of a large job on small hardware",
        'unisono train examples/proof.toml --dry-run --world 96 --rank 17 --plan "dp=8 pp=3 tp=4 micros=3"',
        "what rank 17 of 96 holds and calls",
        r"parameters",
    ),
    reads(
        _G,
        "Deterministic operations mode; randomness independent of world size",
        f'{TRAIN} 4 --plan "sync=canonical" --train.micro_batch 4 --json && sleep 1 &&'
        f' {TRAIN} 4 --plan "dp=3 sync=canonical"'
        " --train.micro_batch 4 --json",
        "the same `loss` to the last digit, with dropout",
        lambda ran: ran.objects[0]["loss"] == ran.objects[1]["loss"],
    ),
    reads(
        _G,
        "Logging and monitoring across ranks",
        f"{TRAIN} 4 --plan dp=2 --out.track events --json",
        "`events/rank*.jsonl`",
        lambda ran: len(list(ran.folder.glob("runs/*/*/events/rank*.jsonl"))) == 2,
    ),
    reads(
        _G,
        "Environment capture / standardisation",
        f"{TRAIN} 2 --json",
        "`env.json`",
        lambda ran: list(ran.folder.glob("runs/*/*/env.json")),
    ),
    prints(
        _G,
        "Error-pattern guidance",
        f'{TRAIN} 2 --plan "tp=99"',
        "where, likely, try",
        r"^error U-P12",
        r"^  try",
        code=2,
    ),
)
_G = "20 Experiment management"
_PICTURES = "--model.kind mlp --model.hidden 16 --data.source digits --data.val_fraction 0.2 --no-out.report"
_FETCH = (
    "import sys, http.cookiejar, urllib.request as u;"
    " page = u.build_opener(u.HTTPCookieProcessor(http.cookiejar.CookieJar())).open(sys.argv[1]);"
    ' print(page.headers["content-security-policy"], "verdict", b"verdict" in page.read())'
)
EXPERIMENTS = (
    reads(
        _G,
        "Hyper-parameter and metric tracking",
        f"{TRAIN} 4 --out.track csv --json && sleep 1 && {TRAIN} 4 --train.lr 0.01 --json"
        " && unisono config diff $(ls -d runs/proof/2*) --json",
        "`metrics.csv`, and the keys in which two runs differ",
        lambda ran: [row["key"] for row in ran.objects[-1]["differences"] if row["key"] == "train.lr"],
    ),
    reads(
        _G,
        "Trackers people have: TensorBoard, W&B, MLflow, trackio",
        f"{TRAIN} 4 --out.track tensorboard && unisono sync runs/proof --to tensorboard --json",
        "steps that the tracker has, asked of itself",
        lambda ran: ran.objects[-1]["to"]["tensorboard"]["sent"] == 4,
    ),
    reads(
        _G,
        "Early stopping, and the best checkpoint by a metric",
        f"unisono train {_PICTURES} --train.steps 60 --train.eval_every 5 --early_stopping.patience 2"
        " --early_stopping.min_delta 9 && unisono report runs --json",
        "`early`, why the run ended, and `best`, the checkpoint that stays",
        lambda ran: (
            ran.objects[-1]["best"]["step"] == 5 and "in no 2 validations since" in ran.objects[-1]["early"]
        ),
    ),
    reads(
        _G,
        "Average of the weights (EMA)",
        f"unisono train {_PICTURES} --train.steps 20 --ema.decay 0.9 && unisono evaluate runs --json"
        " && unisono evaluate runs --weights ema --json",
        "`val_loss` of the weights, and another of their average",
        lambda ran: ran.objects[-2]["val_loss"] != ran.objects[-1]["val_loss"],
    ),
    reads(
        _G,
        "Callbacks of one's own",
        'printf \'def see(event):\\n    open("seen", "a").write(event.kind + chr(10))\\n\' > mine.py &&'
        f" {TRAIN} 3 --callbacks.call mine.py:see",
        "a line for each step, validation and save",
        lambda ran: (ran.folder / "seen").read_text().split().count("step") == 3,
    ),
    reads(
        _G,
        "Model versioning",
        f"{TRAIN} 2 && {TRAIN} 2 --name tuned --model.weights $(ls -d runs/proof/2*) && unisono runs --json",
        "plan, data and parent of each run",
        lambda ran: (
            {run["data"] for run in ran.objects[0]["runs"]} != {""}
            and ran.objects[0]["runs"][1]["parent"]["run"] == ran.objects[0]["runs"][0]["folder"]
        ),
    ),
    reads(
        _G,
        "Result aggregation",
        f"{SWEEP}/seeds.toml --train.steps 4 && unisono runs --sort val_loss --json"
        " && unisono runs --compare --out all.html --json",
        "one table of all runs, the best first, and one picture",
        lambda ran: (
            len(ran.objects[0]["runs"]) == 2
            and ran.objects[0]["runs"][0]["metrics"]["val_loss"]
            <= ran.objects[0]["runs"][1]["metrics"]["val_loss"]
            and Path(ran.folder, "all.png").stat().st_size > 0
        ),
    ),
    prints(
        _G,
        "Live page",
        f"{TRAIN} 3 --name page && mkfifo at && {{ unisono dash runs/page --port 0 > at & }} && read address < at"
        f" && python -c '{_FETCH}' $address; kill -INT $!; wait",
        "the page and where it may ask: at its own server alone",
        "^default-src 'self';.* verdict True",
    ),
)
FEDERATE = "unisono federate examples/federated.toml --federated.rounds 3 --json"
_G = "21 Federated and privacy"
_DIGITS = "--model.kind mlp --model.hidden 16 --data.source digits --no-out.report"
TWELVE = f"unisono federate {_DIGITS} --federated.clients 12 --federated.rounds 2"
FEDERATED = (
    reads(
        _G,
        "Training across organisations",
        f"{FEDERATE} --federated.strategy scaffold",
        "`clients` and `dropped` of each round, which add up to the five that were asked",
        lambda ran: [line["clients"] + line["dropped"] for line in ran.metrics()] == [5, 5, 5],
    ),
    reads(
        _G,
        "Robust (Byzantine) aggregation",
        f"{FEDERATE} --federated.aggregate median --federated.participation 0.3",
        "`aggregate = median` in place of the mean",
        lambda ran: ran.objects[0]["rounds"] == 3 and "skipped" not in ran.metrics()[0],
    ),
    reads(
        _G,
        "Communication-efficient federated rounds",
        f"{FEDERATE} && sleep 1 && {FEDERATE} --federated.codec int8+ef",
        "`bytes_received` of a round: a quarter",
        lambda ran: 3.0 < ran.metrics(0)[0]["bytes_received"] / ran.metrics(1)[0]["bytes_received"] < 4.1,
    ),
    reads(
        _G,
        "Differential privacy of samples",
        f'unisono train {_DIGITS} --plan "dp=2 micros=2" --train.steps 6 --privacy.target_epsilon 4',
        "`epsilon` of each step stays within the target",
        lambda ran: 0.0 < ran.metrics()[0]["epsilon"] < ran.metrics()[-1]["epsilon"] <= 4.0,
    ),
    proven(
        _G,
        "Noise once an update, whatever the ranks and cuts",
        "dp=2 micros=2",
        "tp=2",
        "shard=2 pp=2",
        more="--privacy.noise 1 --privacy.clip 0.5",
    ),
    reads(
        _G,
        "Differential privacy of clients",
        f"{TWELVE} --privacy.noise 2 --privacy.clip 0.5",
        "`epsilon` of each round",
        lambda ran: 0.0 < ran.metrics()[0]["epsilon"] < ran.metrics()[-1]["epsilon"],
    ),
    reads(
        _G,
        "Secure aggregation",
        f"{TWELVE} --federated.secure true --json",
        "rounds by the masked sum, of which no one was skipped",
        lambda ran: all(not line.get("skipped") and line["delta_norm"] > 0 for line in ran.metrics()),
    ),
    prints(
        _G,
        "Too few clients for their attackers",
        f"{TWELVE} --federated.aggregate krum:attackers=5",
        "13 clients are needed for 5 attackers, and there are 12",
        r"krum with attackers=5 needs 2 . attackers \+ 3 = 13 clients in a round, and there are 12",
        code=2,
    ),
)
_G = "22 Heterogeneous, adaptive, decentralised, scale"
HETEROGENEOUS = (
    prints(
        _G,
        "Mixed-speed hardware split",
        SIMULATE.replace("simulate --json", "plan").replace(
            "dgx-a100:8", "examples/clusters/two_generations.toml"
        ),
        "a plan over both generations of machines, with the share of each",
        r"dgx-a100|a100",
    ),
    reads(
        _G,
        "Gossip / decentralised averaging",
        f'{TRAIN} 9 --plan "dp=3 sync=gossip:ring,report=3"',
        "`consensus` every third step: how far replicas are from their mean",
        lambda ran: [line["step"] for line in ran.metrics() if "consensus" in line] == [3, 6, 9],
    ),
    reads(
        _G,
        "1000+ accelerators",
        f'{SIMULATE.replace("dgx-a100:8", "dgx-h100:512")} --train.global_batch 4096 --plan "dp=512 tp=8"',
        "a plan of 4,096 devices",
        lambda ran: ran.objects[0]["step_s"] > 0,
    ),
)
ROWS: tuple[Row, ...] = (
    *ARCHITECTURES,
    *DATA_PARALLEL,
    *SHARDED,
    *TENSOR,
    *PIPELINE,
    *PLANNING,
    *EXPERTS,
    *TOGETHER,
    *COLLECTIVE,
    *BACKENDS,
    *COMPRESSION,
    *SCHEDULING,
    *MEMORY,
    *OPTIMISERS,
    *FAULTS,
    *DATA,
    *PROFILING,
    *CLUSTERS,
    *DEBUGGING,
    *EXPERIMENTS,
    *FEDERATED,
    *HETEROGENEOUS,
)


def page() -> str:
    """The text of capabilities.md."""
    head = """# Capabilities

This page shows each capability by one command. Run the commands in the folder of this project. `python
docs/capabilities.py` runs all of them and checks their output and their files. With a word, such as `python
docs/capabilities.py pipeline`, it runs only the commands whose name or group contains that word. `make test-all` runs
them too.

Do not use this page to learn the program: a command shows that a capability works, but only the page of a feature says
when to use it. Missing capabilities are listed in [what is not there yet](not-yet.md).
"""
    parts = [head]
    for group in dict.fromkeys(row.group for row in ROWS):
        lines = [f"# {row.name}: {row.look}\n{row.run}\n" for row in ROWS if row.group == group]
        parts.append(f"## {group}\n\n```bash\n{chr(10).join(lines)}```\n")
    return "\n".join(parts)


def main(words: Sequence[str]) -> int:
    """Runs the rows that hold a word, or writes the page; exit code 1 where one did not show what it should."""
    if "--write" in words:
        Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
        return 0
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
