"""`unisono launch k8s`: manifests of many plans before judges that are not ours."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.submit.jobs import RECIPE, commands, job
from tests.submit.oracles import VERSIONS, Refused, judge
from unisono.cli import main
from unisono.config import load
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.verbs.train.room import PROCESS, ledger
from unisono_contrib.submit import JobState
from unisono_contrib.submit.job import JobRequest
from unisono_contrib.submit.kinds import KINDS
from unisono_contrib.submit.schedulers.k8s import K8sSubmitter, manifests
from unisono_contrib.submit.yaml import as_yaml

pytestmark = pytest.mark.timeout(120)
PLANS = (
    "dp=1", "dp=2", "dp=4", "dp=8", "tp=2", "pp=2", "pp=2 schedule=gpipe", "dp=2 tp=2", "dp=2 pp=2", "shard=2",
    "shard=4 zero=2", "dp=2 shard=2", "dp=2 shard=2 zero=1", "cp=2", "dp=2 cp=2", "pp=2 tp=2", "dp=2 pp=2 tp=2",
    "dp=4 sync=canonical", "dp=2 recompute=full", "dp=2 codec=int8",
)  # fmt: skip
IMAGE = '[k8s]\nimage = "registry.example.com/team/train:1"\n'


def k8s_job(folder: Path, plan: str, kind: str, more: str = "") -> JobRequest:
    return job(folder, plan, f'{IMAGE}kind = "{kind}"\n{more}')


def read(made: JobRequest) -> list[dict[str, Any]]:
    """The manifests as kubectl reads them."""
    return list(yaml.safe_load_all(K8sSubmitter().files(made)[0].text))


def spread(plan: str, number: int) -> str:
    """Sections that spread a plan over nodes, in turn one or two, on CPUs or GPUs, with what else a job may say."""
    two = plan != "dp=1" and number % 2
    gpus = '[launch]\nbackend = "nccl"\n' if number % 3 == 0 else "[launch]\nthreads_per_rank = 2\n"
    more = (
        'queue = "team-a"\nvolumes = ["runs:/runs"]\nservice_account = "train"\nnode_selector = ["zone=a"]\n'
    )
    network = '[network]\ninterface = "ib0"\ninfiniband = true\nhca = "mlx5_0:1"\n'
    return f'{more if number % 2 else ""}[job]\nnodes = {2 if two else 1}\ntime = "01:00:00"\n{gpus}{network}'


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_plans_pass_the_strict_schemas_of_seven_versions(kind: str, every: int, tmp_path: Path) -> None:
    """All twenty plans under all seven versions; in haste each nineteenth pair."""
    assert len(PLANS) == 20
    pairs = [(number, plan, version) for number, plan in enumerate(PLANS) for version in VERSIONS]
    for number, plan, version in pairs[::every]:
        made = k8s_job(tmp_path, plan, kind, spread(plan, number))
        judge(read(made), made, version)


@pytest.mark.parametrize("plan", PLANS)
def test_requests_are_the_ledger_rounded_up(plan: str, tmp_path: Path) -> None:
    made = k8s_job(tmp_path, plan, "job")
    loaded = load(_written(tmp_path, made.recipes[0]))
    counted = ledger(loaded.recipe, loaded.plan)
    assert counted is not None
    nbytes = made.ranks_per_node * (counted[1].total + PROCESS)
    assert 0 <= made.need.mib * 2**20 - nbytes < 2**20
    assert made.need.cores == made.ranks_per_node == loaded.plan.world


def _written(folder: Path, text: str) -> Path:
    (folder / "resolved.toml").write_text(text)
    return folder / "resolved.toml"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from places(inner, (*path, number))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_letter_wrong_in_any_key_is_refused(kind: str, every: int, tmp_path: Path) -> None:
    made = k8s_job(tmp_path, "dp=2 tp=2", kind, spread("dp=2 tp=2", 3))
    whole = read(made)
    count = 0
    for number, manifest in enumerate(whole):
        for *path, key in list(places(manifest))[number % every :: every]:
            if "nodeSelector" in path:
                continue  # labels that a site gives its nodes: nobody else knows them
            wrong = copy.deepcopy(whole)
            place: Any = wrong[number]
            for step in path:
                place = place[step]
            renamed = key[:-1] + ("x" if key[-1] != "x" else "y")
            place[renamed] = place.pop(key)
            with pytest.raises((Refused, KeyError)):
                judge(wrong, made, "1.34")
                pytest.fail(f"{manifest['kind']} {path} {renamed} passes")
            count += 1
    assert count * every > 40


@pytest.mark.parametrize(
    ("gang", "kind"), [("scheduling", "job"), ("podgroup", "job"), ("podgroup", "jobset")]
)
def test_gangs_of_the_core_are_of_1_37(gang: str, kind: str, tmp_path: Path) -> None:
    made = k8s_job(tmp_path, "dp=4", kind, f'gang = "{gang}"\n[job]\nnodes = 4')
    judge(read(made), made, "1.37")
    with pytest.raises(Refused):
        judge(read(made), made, "1.31")


def test_the_plugins_gang_is_a_pod_group_with_as_many_members_as_nodes(tmp_path: Path) -> None:
    for kind in ("job", "jobset"):
        made = k8s_job(
            tmp_path, "dp=4", kind, 'gang = "plugin"\nscheduler = "coscheduling"\n[job]\nnodes = 4'
        )
        for version in VERSIONS:
            judge(read(made), made, version)
    with pytest.raises(ConfigProblems, match="said by its runtime"):
        k8s_job(tmp_path, "dp=4", "trainjob", 'gang = "plugin"')


def test_an_array_is_a_job_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(RECIPE.format(plan="dp=2", more=IMAGE))
    assert main(["launch", "k8s", "small.toml", "--dry-run", "--each", "seed=0,1", "--kind", "jobset"]) == 0
    made = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [one["metadata"]["name"] for one in made if one["kind"] == "JobSet"] == ["small-0", "small-1"]


def test_what_a_job_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has an image"):
        K8sSubmitter().files(job(tmp_path))
    with pytest.raises(UsageError, match="no name of a job"):
        K8sSubmitter().files(job(tmp_path, more=IMAGE, name="My_Run"))
    with pytest.raises(ConfigProblems, match="no CLAIM:/PATH"):
        k8s_job(tmp_path, "dp=2", "job", 'volumes = ["runs"]')


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"conditions": [{"type": "Complete", "status": "True"}]}, "done"),
        ({"conditions": [{"type": "Failed", "status": "True"}]}, "failed"),
        ({"active": 2}, "running"), ({}, "pending"), ({"replicaStatuses": {"Worker": {"active": 1}}}, "running"),
    ],
)  # fmt: skip
def test_state_and_submission_go_through_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], state: str
) -> None:
    (tmp_path / "status").write_text(json.dumps({"status": status}))
    body = f'[ "$1" = get ] && cat {tmp_path}/status || printf "configmap/small-recipe\\njob.batch/small\\n"'
    monkeypatch.setenv("PATH", f"{commands(tmp_path, kubectl=body)}:/usr/bin:/bin")
    made = k8s_job(tmp_path, "dp=2", "job", 'namespace = "team"')
    number = K8sSubmitter().submit(made, tmp_path)
    assert number == "job.batch/small -n team" and K8sSubmitter().state(number, tmp_path) is JobState(state)
    assert all(one["metadata"].get("namespace") == "team" for one in manifests(made))


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.text(max_size=20), st.sampled_from(["yes", "1", "a: b", "x\n", "\n", " a\n", "#x", "a #b", "null", "1e3", "-", "0x1f", "12:30", "a\n\n\nb\n"])),
    lambda inner: st.one_of(
        st.lists(inner.filter(lambda value: not isinstance(value, list)), max_size=3),
        st.dictionaries(st.text(max_size=8), inner, max_size=3),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=8), VALUES, min_size=1, max_size=3), min_size=1, max_size=2))
def test_yaml_is_read_as_what_was_written(documents: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(as_yaml(documents))) == documents
