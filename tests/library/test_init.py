"""How a script becomes a rank, and what it is told when it cannot."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.library.enter import _filled, not_here
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, UsageError


def test_one_process_is_a_world_of_one() -> None:
    import torch

    job = unisono.init()
    model, data = torch.nn.Linear(2, 2), [torch.ones(3, 2)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared = job.prepare(model, optimizer, data)
    assert prepared[:2] == (model, optimizer) and [
        x is y for x, y in zip(prepared[2], data, strict=True)
    ] == [True]
    with job.accumulate():
        model(data[0]).sum().backward()
    optimizer.step()
    assert (job.rank, job.world, job.step, job.is_main, str(job.plan)) == (0, 1, 1, True, "dp=1")
    assert job.mean(2.5) == 2.5
    job.close()


def test_a_process_alone_in_a_job_of_slurm_says_so_once(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert unisono.init().world == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not under srun" in said and "srun before the command" in said
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1")
    assert unisono.init().world == 1 and capsys.readouterr().err == ""


def in_pages() -> set[str]:
    """The plans of all calls of `unisono.init` in the pages and the examples."""
    root = Path(__file__).parents[2]
    pages = (root / "README.md", *root.glob("docs/*.md"), *root.glob("examples/*.py"))
    call = re.compile(r"unisono\.init\((?:plan=)?\"([^\"]*)\"")
    return {plan for page in pages for plan in call.findall(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("plan", sorted(in_pages()))
def test_every_plan_of_the_pages_can_be_played_by_a_loop(plan: str) -> None:
    parsed = Plan.parse(plan)
    ranks = parsed.inner * (2 if parsed.dp == -1 else parsed.dp)
    assert [*parsed.check(), *not_here(parsed)] == [] and _filled(parsed, ranks, False).world == ranks


def test_too_few_processes_are_told_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["my train.py", "--lr", "1"])
    with pytest.raises(UsageError) as raised:
        unisono.init("dp=2 shard=2")
    line = "torchrun --standalone --nproc-per-node 4 'my train.py' --lr 1"
    assert raised.value.fix == line
    assert line in raised.value.__notes__[0]  # a traceback ends with it


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2",
        "dp=2 tp=2",
        "precision=bf16",
        "dp=2 codec=sign",
        "dp=2 sync=gossip",
        "dp=2 micros=2",
        "dp=2 sync=canonical",
        "dp=2 offload=optimizer",
        "blocks=0:recompute=full",
    ],
)
def test_what_the_library_way_cannot_play_is_refused_with_a_remedy(plan: str) -> None:
    with pytest.raises(ConfigProblems) as raised:
        unisono.init(plan)
    assert all(problem.fix and problem.where.startswith("plan.") for problem in raised.value.problems)


TRAGEDY = """
import os, torch, unisono
model = torch.nn.Linear(2, 1)
job = unisono.init()
model, optimizer, data = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1), [torch.ones(4, 2)] * 9)
for step, x in enumerate(data):
    if job.rank == 1 and step == 3:
        raise ValueError("the cause")
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_raises_ends_all_without_an_abort(tmp_path: Path) -> None:
    script = tmp_path / "tragedy.py"
    script.write_text(TRAGEDY)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: the cause" in done.stderr
    assert "terminate called" not in done.stderr and "exitcode  : 1 " in done.stderr
