"""A cluster as TF_CONFIG describes it: the same command in every task."""

import json
import os
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.ports import kept_port
from tests.verbs import jobs

SIZES = (
    "--name cluster --data.source stdlib --model.kind gpt --model.n_layer 1 --model.n_head 1 --model.d_model 16"
    " --model.context 16 --train.steps 6 --train.save_every 3 --train.keep 9 --train.global_batch 4"
    " --train.micro_batch 2 --train.eval_every 6 --train.eval_batches 2 --out.report false --plan dp=2 --json"
)
CALLS = """
import unisono.rpc as rpc
@rpc.exported
def add(x, y): return x + y
info = rpc.init().info
if info.name == "chief0":
    print([rpc.rpc_sync(name, add, args=(2, 3)) for name in ("worker0", "ps0")], flush=True)
rpc.shutdown()
"""


def environ_of(port: int, task: str) -> dict[str, str]:
    """The environment of a task of the cluster."""
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}})}


def started(tmp_path: Path, port: int, tasks: list[str], words: list[str]) -> list[tuple[str, str, int]]:
    processes = [Forked(words, tmp_path, {**os.environ, **environ_of(port, task)}) for task in tasks]
    return [(process.stdout.read(), process.stderr.read(), process.wait()) for process in processes]


@pytest.mark.timeout(100)
def test_a_cluster_trains_and_its_evaluator_sees_the_checkpoints(tmp_path: Path) -> None:
    words = ["-m", "unisono", "train", *SIZES.split()]
    with kept_port() as port:
        chief, worker, ps, evaluator = started(tmp_path, port, ["chief", "worker", "ps", "evaluator"], words)
    assert [code for _, _, code in (chief, worker, ps, evaluator)] == [0, 0, 0, 0], (
        chief,
        worker,
        ps,
        evaluator,
    )
    trained, seen = json.loads(chief[0]), json.loads(evaluator[0])
    assert trained["ranks"] == 2 and trained["steps"] == 6
    assert json.loads(ps[0])["role"] == "server"
    last = seen["evaluations"][-1]
    assert last["step"] == 6 and last["val_loss"] == pytest.approx(trained["val_loss"], rel=1e-5)
    lines = (tmp_path / seen["run_dir"] / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == seen["evaluations"]
    again = Forked(["-m", "unisono", "evaluate", trained["run_dir"], "--json"], tmp_path, dict(os.environ))
    told = json.loads(again.stdout.read())
    assert again.wait() == 0 and told["val_loss"] == last["val_loss"], again.stderr.read()


@pytest.mark.timeout(60)
def test_its_tasks_call_each_other_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    with kept_port() as port:
        chief, *others = started(tmp_path, port, ["chief", "worker", "ps"], ["calls.py"])
    assert chief == ("[5, 5]\n", "", 0), (chief, others)
    assert [code for _, _, code in others] == [0, 0]


RECIPE = """
name = "cluster"
plan = "dp=2 collective={collective}"
[model]
kind = "gpt"
n_layer = 1
n_head = 1
d_model = 16
context = 16
[data]
source = "text:{text}"
[train]
steps = 300
save_every = 10
global_batch = 4
[out]
report = false
"""


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step of the runs in a folder."""
    lines = [json.loads(line) for run in jobs.runs_of(folder) for line in (run / "metrics.jsonl").open()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.timeout(100)
@pytest.mark.parametrize("collective", ["tree", pytest.param("ring", marks=pytest.mark.slow)])
def test_a_cluster_whose_worker_was_killed_goes_on_from_its_checkpoint(
    tmp_path: Path, collective: str
) -> None:
    """All tasks are started again by the same words. The loss of every step is that of a run in which none was killed."""
    (tmp_path / "words.txt").write_text(jobs.words())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(collective=collective, text=tmp_path / "words.txt"))
    words, tasks = ["train", str(recipe), "--resume", "auto", "--json"], ["chief", "worker"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    with kept_port() as port:
        assert [code for *_, code in started(whole, port, tasks, ["-m", "unisono", *words])] == [0, 0]
        with (
            jobs.started(cut, *words, environ=environ_of(port, "chief")) as chief,
            jobs.started(cut, *words, environ=environ_of(port, "worker")) as worker,
        ):
            chief.kept("step-000020")
            worker.process.kill()
            ended = chief.done()
        assert ended.code != 0 and "rank 1" in ended.block, ended.err
        assert max(losses(cut)) < 299
        assert [code for *_, code in started(cut, port, tasks, ["-m", "unisono", *words])] == [0, 0]
    assert losses(cut) == losses(whole) and len(losses(whole)) == 300
