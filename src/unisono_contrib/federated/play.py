"""A federated run from its folder to its last round: metrics, evaluations, checkpoints, going on from one."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono.config import Resolved
from unisono.observe.metrics import JsonLines, forget_after
from unisono.train.data.load import load
from unisono.train.state import history
from unisono.train.state.checkpoint.find import latest, step_of
from unisono.train.state.resume import choose
from unisono.train.state.writing import locked, writing
from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.federated.clients import Clients
from unisono_contrib.federated.server import Federation, RunParts, federation_of

METRICS = "metrics.jsonl"


def play(
    resolved: Resolved,
    run_dir: Path,
    resume: bool = False,
    checkpoint: str = "",
    note: Callable[[str], None] = lambda text: None,
    clients_of: Callable[[RunParts, str, Path], Clients] | None = None,
) -> dict[str, Any]:
    """All rounds of a run; the object of `--json`. resume: go on from a checkpoint, the newest or the one named.
    clients_of(parts, fingerprint of the data, run folder): where the clients are; in this process if None. Raises
    UsageError as the start of a run does, UserCodeError where numbers go bad."""
    recipe = resolved.recipe
    with locked(run_dir):
        corpus = load(recipe.data, recipe.model)
        remote = None if clients_of is None else lambda parts: clients_of(parts, corpus.fingerprint, run_dir)
        federation = federation_of(resolved, corpus, clients_of=remote)
        try:
            if resume:
                folder, notes = choose(run_dir, recipe, corpus.fingerprint, named=checkpoint)
                for text in notes:
                    note(text)
                federation.restore(folder)
            return _played(federation, run_dir, note)
        finally:
            federation.clients.close()


def _played(federation: Federation, run_dir: Path, note: Callable[[str], None]) -> dict[str, Any]:
    recipe, begun, last = federation.resolved.recipe, federation.number, dict[str, Any]()
    every, path, clock = recipe.train.save_every, run_dir / METRICS, time.perf_counter()
    with writing(run_dir):
        forget_after(path, begun)
        history.begin(run_dir, begun, ranks=1, plan=str(federation.resolved.plan))
        with JsonLines(path) as lines:
            for last in federation.rounds():
                lines.write(last)
                note(in_words(last))
                if isinstance(every, int) and every and federation.number % every == 0:
                    federation.save(run_dir)
        seconds = time.perf_counter() - clock
        folder = latest(run_dir)
        if folder is None or step_of(folder) != federation.number:
            federation.save(run_dir)
        history.note(run_dir, "end", step=federation.number)
    rounds = federation.number - begun
    return {
        "run_dir": str(run_dir),
        "rounds": federation.number,
        "clients": FederatedConfig.of(recipe).clients,
        "strategy": FederatedConfig.of(recipe).strategy,
        "rounds_per_s": rounds / seconds if rounds and seconds else 0.0,
        "checkpoint": str(latest(run_dir)),
        **{key: value for key, value in last.items() if key == "loss" or key.startswith("val_")},
    }


def in_words(record: Mapping[str, Any]) -> str:
    """`round 12  loss 0.4211  val_loss 0.3900  val_accuracy 0.8876  clients 5`; epsilon where rounds are private."""
    number = record.get("step", record.get("rounds"))
    values = [f"{name} {value:.4f}" for name, value in record.items()
              if isinstance(value, float) and (name in ("loss", "epsilon") or name.startswith("val_"))]  # fmt: skip
    skipped = [f"skipped: {why}"] if (why := record.get("skipped")) else []
    return "  ".join([f"round {number}", *values, f"clients {record['clients']}", *skipped])
