"""Federated digits: 50 clients with few classes each, beside one device that has all data, and beside Flower.

    python benchmarks/federated.py                                  3 seeds, 300 rounds: about 10 minutes
    python benchmarks/federated.py --rounds 40 --seeds 1            reduced
    python benchmarks/federated.py --flower VENV/bin/python         with flwr in an environment of its own
    python benchmarks/federated.py --engine VENV/bin/python --rounds 20 Flower's simulation engine, rounds a second

Of 50 clients (dirichlet:alpha=0.3) a tenth is asked in a round, and a fifth of these drop out. Each row says the
accuracy on digits that no client has: the median over seeds of the mean of the last fifth of evaluations, which says
where a run is rather than where its last round has left it; and rounds a second, the median over seeds.

one device: all training samples, as many passes as rounds times the share of clients that answer. Flower: its own
FedAvg aggregates what the same clients send. poisoned: a tenth of the clients send their delta times -10. stragglers:
half of the clients that are asked have done only a part of their local steps in time; FedAvg drops them, as Li et al.
(2020) have it, and FedProx takes what they have done.
"""

import argparse
import io
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.config import load as load_recipe
from unisono.config import resolve
from unisono.spec.errors import UserCodeError
from unisono.train.data.load import load
from unisono_contrib.federated.clients import Answer, ClientHost, SimulatedClients
from unisono_contrib.federated.combine import Combiner
from unisono_contrib.federated.server import Federation, RunParts, client_host, federation_of
from unisono_contrib.federated.workers import WorkerClients
from unisono_contrib.spec.federated import AGGREGATES, Aggregate

BASE = {
    "model.kind": "mlp", "model.hidden": "64", "data.source": "digits", "data.val_fraction": "0.2",
    "train.optimizer": "sgd", "train.momentum": "0", "train.lr": "0.1", "train.lr_schedule": "constant",
    "train.weight_decay": "0", "train.clip": "0", "train.global_batch": "10", "train.metrics": "accuracy",
    "train.eval_batches": "35", "train.eval_every": "4",
    "federated.clients": "50", "federated.participation": "0.1", "federated.dropout": "0.2",
    "federated.local_epochs": "5", "federated.split": "dirichlet:alpha=0.3",
}  # fmt: skip
MORE = {"federated.participation": "0.4"}  # of ever so many clients, of whom some attack
LATE = {"federated.stragglers": "0.5"}
PARTIAL = {**LATE, "federated.late": "partial"}
POISONED = range(0, 50, 10)
ROBUST = ("median", "trimmed_mean:0.3", "multi_krum:5", "bulyan:3")


class FlowerAverage(Aggregate):
    """Flower's FedAvg, in a process of its own. It averages weights, as Flower has it."""

    name = "flower"

    python: str
    start: Any = None

    def combine(self, deltas: Tensor, weights: Tensor) -> Tensor:
        process, now = _flower(self.python), self.start()
        rows = (deltas + now.double()).to(torch.float32).contiguous().numpy()
        process.stdin.write(struct.pack("<QQ", *rows.shape) + weights.numpy().tobytes() + rows.tobytes())
        process.stdin.flush()
        mean = np.frombuffer(process.stdout.read(4 * rows.shape[1]), dtype=np.float32)
        return torch.from_numpy(mean.copy()).double() - now.double()


@cache
def _flower(python: str) -> Any:
    """One process for all rounds; it ends when this one does."""
    script = str(Path(__file__).with_name("federated_flower.py"))
    return subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def federation(
    seed: int,
    rounds: int,
    keys: Mapping[str, str],
    flower: str = "",
    poisoned: bool = False,
    workers: int = 1,
) -> Federation:
    flags = {**BASE, **keys, "seed": str(seed), "federated.rounds": str(rounds)}
    loaded = load_recipe(None, list(flags.items()))
    sums = {"steps": rounds, "micro_batch": loaded.recipe.train.global_batch}
    recipe = loaded.recipe.model_copy(update={"train": loaded.recipe.train.model_copy(update=sums)})
    resolved = resolve(recipe, loaded.plan, 1)
    corpus = load(recipe.data, recipe.model)
    combiner = Combiner(AGGREGATES.read(recipe.federated.aggregate))
    clients_of = (lambda parts: _with_attackers(parts)) if poisoned else None
    if workers > 1:
        clients_of = lambda parts: WorkerClients(client_host(resolved, parts), workers)
    run = federation_of(resolved, corpus, combiner, clients_of)
    if flower:
        average = FlowerAverage.model_construct(python=flower, start=lambda: run.weights)
        run.combiner = replace(combiner, aggregate=average)
    return run


def _with_attackers(parts: RunParts) -> SimulatedClients:
    def tamper(answer: Answer) -> Answer:
        attacks = answer.client in POISONED
        return replace(answer, parts=[-10.0 * part for part in answer.parts]) if attacks else answer

    return SimulatedClients(ClientHost(parts.trainer, parts.samples, parts.codec), tamper)


def played(make: Callable[[], Federation]) -> tuple[float, float]:
    """(accuracy, rounds a second). Where attackers make a model grow without bound, its accuracy is 0."""
    run, accuracies, seconds = make(), list[float](), 0.0
    while run.number < run.resolved.recipe.federated.rounds:
        begun = time.perf_counter()
        try:
            line = run.play_round()
        except UserCodeError as error:
            print(f"round {run.number}: {error.what}", file=sys.stderr)
            return 0.0, 0.0
        if "val_accuracy" in line:
            accuracies.append(line["val_accuracy"])
        else:
            seconds += time.perf_counter() - begun
    last = accuracies[-max(1, len(accuracies) // 5) :]
    return statistics.mean(last), 0.75 * run.number / seconds if seconds else 0.0


def rows(seeds: int, rounds: int, flower: str) -> list[dict[str, Any]]:
    """Rows in turns, so that a busy machine is busy for all of them."""
    alone = {"federated.clients": "1", "federated.participation": "1", "federated.dropout": "0",
             "federated.split": "iid", "federated.local_epochs": "1"}  # fmt: skip
    passes = max(1, round(5 * rounds * 0.1 * 0.8))
    ways: dict[str, Callable[[int], Federation]] = {
        "one device": lambda seed: federation(seed, passes, alone),
        "fedavg": lambda seed: federation(seed, rounds, {}),
        **({"flower fedavg": lambda seed: federation(seed, rounds, {}, flower)} if flower else {}),
        "fedavg, stragglers dropped": lambda seed: federation(seed, rounds, LATE),
        "fedavg, stragglers partial": lambda seed: federation(seed, rounds, PARTIAL),
    }
    for strategy in (
        "fedprox:0.1",
        "fedavgm:beta=0.5",
        "fedadam:lr=0.03",
        "fedyogi:lr=0.03",
        "scaffold",
        "fedbuff:4",
    ):
        chosen = {"federated.strategy": strategy}
        ways[strategy] = lambda seed, chosen=chosen: federation(seed, rounds, chosen)
    late = {**PARTIAL, "federated.strategy": "fedprox:0.1"}
    ways["fedprox:0.1, stragglers partial"] = lambda seed: federation(seed, rounds, late)
    for aggregate in ("mean", *ROBUST):
        chosen = {**MORE, "federated.aggregate": aggregate}
        ways[f"{aggregate}, 20 asked"] = lambda seed, chosen=chosen: federation(seed, rounds, chosen)
        ways[f"{aggregate}, 20 asked, poisoned"] = lambda seed, chosen=chosen: federation(
            seed, rounds, chosen, poisoned=True
        )
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for seed in range(seeds):
        for name, make in ways.items():
            results[name].append(played(lambda make=make, seed=seed: make(seed)))
            print(f"seed {seed}  {name}  {results[name][-1][0]:.4f}", file=sys.stderr, flush=True)
    return [
        {
            "way": name,
            "accuracy": statistics.median(accuracy for accuracy, _ in each),
            "each": [round(accuracy, 4) for accuracy, _ in each],
            "rounds_per_s": statistics.median(rate for _, rate in each),
        }
        for name, each in results.items()
    ]


def beside_engine(python: str, rounds: int) -> dict[str, Any]:
    """Rounds a second of Flower's own simulation engine (ray), which uses all cores, and of ours right after it, by one
    process and by one for each core: the same split, first weights and clients a round, no drop-outs."""
    run = federation(0, rounds, {"federated.dropout": "0"})
    train, val = run.corpus.train, run.corpus.val
    recipe, arrays = run.resolved.recipe, io.BytesIO()
    weights = [part.numpy() for part in run.trainer._parts(run.weights)]
    said = {
        "lr": recipe.train.lr, "epochs": recipe.federated.local_epochs, "batch": recipe.train.global_batch,
        "participation": recipe.federated.participation, "clients": 50, "rounds": rounds, "weights": len(weights),
    }  # fmt: skip
    sets = (("", train), ("val_", val))
    data = {
        f"{name}{key}": x for name, of in sets for key, x in zip(("inputs", "targets"), _all(of), strict=True)
    }
    data |= {f"weight{i}": x for i, x in enumerate(weights)} | {
        f"client{i}": x for i, x in enumerate(run.parts)
    }
    np.savez(arrays, allow_pickle=False, settings=np.array(json.dumps(said)), **data)
    script = str(Path(__file__).with_name("federated_flower_engine.py"))
    done = subprocess.run(
        [python, script], input=arrays.getvalue(), capture_output=True, check=False, timeout=540
    )
    if done.returncode or b"Error" in done.stderr:
        raise SystemExit(done.stderr.decode()[-2000:])
    theirs = json.loads(done.stdout.decode().splitlines()[-1])
    rate = lambda each: 1.0 / statistics.median(each[1:])  # the first one warms up
    flower, alone = rate(theirs["seconds"]), rate(_seconds(run, rounds))
    cores = len(os.sched_getaffinity(0))
    several = federation(0, rounds, {"federated.dropout": "0"}, workers=cores)
    ours = rate(_seconds(several, rounds))
    several.clients.close()
    if not torch.equal(several.weights, run.weights):
        raise SystemExit("several processes do not compute what one does")
    return {"ours, one process": alone, f"ours, {cores} processes": ours, "flower engine": flower,
            "ratio": ours / flower, "flower accuracy": theirs["accuracies"][-1],
            "accuracy": run.evaluate()["accuracy"]}  # fmt: skip


def _seconds(run: Federation, rounds: int) -> list[float]:
    """Of each round."""
    marks = [time.perf_counter()]
    for _ in range(rounds):
        run.play_round()
        marks.append(time.perf_counter())
    return np.diff(marks).tolist()


def _all(data: Any) -> list[np.ndarray]:
    return [x.numpy() for x in data.fetch(np.arange(len(data), dtype=np.int64))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--flower", default="", metavar="PYTHON", help="a Python that has flwr")
    parser.add_argument(
        "--engine", default="", metavar="PYTHON", help="one that has flwr[simulation] and torch"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for _ in range(args.seeds if args.engine else 0):
        print(json.dumps({"rounds a second": beside_engine(args.engine, args.rounds)}), flush=True)
    if args.engine:
        return
    table = rows(args.seeds, args.rounds, args.flower)
    if args.json:
        print(json.dumps({"rounds": args.rounds, "rows": table}))
        return
    print("| way | accuracy, % | seeds | rounds/s |\n| --- | ---: | --- | ---: |")
    for row in table:
        each = " ".join(f"{100 * x:.1f}" for x in row["each"])
        print(f"| {row['way']} | {100 * row['accuracy']:.1f} | {each} | {row['rounds_per_s']:.1f} |")


if __name__ == "__main__":
    main()
