"""A cluster as TF_CONFIG describes it: the same command in every task."""

import json
import os
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.ports import kept_port

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


def started(tmp_path: Path, port: int, tasks: list[str], words: list[str]) -> list[tuple[str, str, int]]:
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    environ = [
        {**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}})}
        for task in tasks
    ]
    processes = [Forked(words, tmp_path, each) for each in environ]
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
