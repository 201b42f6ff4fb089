"""TF_CONFIG: the roles and ranks of its tasks, and a line for each usual mistake."""

import json
from typing import Any

import pytest

from unisono.launch.env import detect
from unisono.launch.run.membership import Role
from unisono.spec.errors import UsageError

CLUSTER = {"chief": ["a:1"], "worker": ["a:2", "b:1"], "ps": ["c:1", "d:1"]}


def place(kind: str, index: Any = 0, cluster: Any = CLUSTER) -> Any:
    return detect({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})})


@pytest.mark.parametrize(
    ("kind", "index", "rank", "local", "role"),
    [
        ("chief", 0, 0, (0, 2), Role.TRAINER),
        ("worker", 0, 1, (1, 2), Role.TRAINER),
        ("worker", "1", 2, (0, 1), Role.TRAINER),
        ("ps", 1, 4, (0, 1), Role.SERVER),
        ("evaluator", 0, 5, (0, 1), Role.EVALUATOR),
    ],
)
def test_tasks_are_ranks_and_roles(kind: str, index: Any, rank: int, local: Any, role: Role) -> None:
    got = place(kind, index)
    assert (got.rank, got.world, got.local_rank, got.local_world) == (rank, 3, *local)
    assert (got.master, got.port, got.role, got.servers) == ("a", 1, role, 2)
    assert got.name == f"{kind}{index}"


def test_without_a_chief_worker_0_is_the_first() -> None:
    got = place("worker", 0, {"worker": {"1": "b:2", "0": "a:1"}})
    assert (got.rank, got.world, got.master, got.port) == (0, 2, "a", 1)


@pytest.mark.parametrize("text", ["", "{}", '{"environment": "cloud"}'])
def test_no_cluster_is_one_process_alone(text: str) -> None:
    assert detect({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{cluster", "it is no JSON"),
        ("[1]", "not a JSON object"),
        ({"cluster": CLUSTER}, 'it has no "task"'),
        ({"task": {"type": "worker", "index": 0}}, 'no "cluster"'),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": 2}}, "the task is worker 2, and the cluster has 2"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": -1}}, "not a number from 0 on"),
        ({"cluster": CLUSTER, "task": {"type": "wroker", "index": 0}}, 'type is "wroker"'),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "chief", "index": 0}}, "the task is a chief"),
        ({"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}, "worker 0, 'a', has no port"),
        ({"cluster": {"worker": ["a:x"]}, "task": {"type": "worker", "index": 0}}, "is no HOST:PORT"),
        ({"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}, "are no list"),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}, "2 chiefs"),
        ({"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}, "address of two tasks"),
        ({"cluster": {"master": ["a:1"]}, "task": {"type": "master", "index": 0}}, "unknown type 'master'"),
        ({"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "nobody trains"),
        ({"cluster": {"worker": {"1": "a:1"}}, "task": {"type": "worker", "index": 0}}, "indices of worker are 1"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_line(text: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect({"TF_CONFIG": text if isinstance(text, str) else json.dumps(text)})
    assert says in caught.value.what and caught.value.code == "L02" and caught.value.fix
    assert "\n" not in caught.value.what
