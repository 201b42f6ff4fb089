"""The list of collectives that a host's price is made of is what ranks send, byte by byte."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verbs.jobs import unisono
from unisono.plan import Plan
from unisono.planner.host import calls_of_pass
from unisono.planner.work.transformer import Transformer

GATED = Transformer(4, 4, 96, 128, 256, 4, 256, bias=False, learned=False, gated=True, rms=True)
MICROS = 2


def listed(plan: Plan, micro_batch: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for backward in (False, True):
        again = backward and plan.recompute == "full"
        made = calls_of_pass(GATED, plan, micro_batch, MICROS, 4, (True, True), backward, again)
        for axis, op, nbytes, times in made:
            n = getattr(plan, axis)
            sent = MICROS * times * nbytes * (n - 1) / n * (2 if op == "all_reduce" else 1)
            found[f"{axis}.{op}"] = found.get(f"{axis}.{op}", 0.0) + sent
    return found


def steps(folder: Path) -> Iterator[dict[str, int]]:
    """What rank 0 sent in each step."""
    for path in folder.rglob("events/*"):
        events = map(json.loads, path.read_text().splitlines())
        yield from (event["bytes"] for event in events if event["kind"] == "step" and event["rank"] == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["tp=2", "tp=2 recompute=full", "shard=2 zero=3", "shard=2 zero=2", "shard=2 zero=1"],
)
def test_what_is_priced_is_what_is_sent(text: str, tmp_path: Path) -> None:
    plan = Plan.parse(f"{text} micros={MICROS}")
    size = 32 // plan.replicas // MICROS
    words = ["--train.steps", "1", "--train.eval_every", "0", "--train.micro_batch", str(size)]
    words += ["--out.dir", "runs", "--out.report", "false"]
    unisono(tmp_path, "train", "--demo", "--plan", str(plan), *words)
    (sent,) = steps(tmp_path)
    own = {key: size for key, size in sent.items() if key.partition(".")[0] in ("tp", "shard")}
    assert own == pytest.approx(listed(plan, size))
