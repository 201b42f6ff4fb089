"""Each tracker, each fault, at the start of a run and during it: the run's bits are those without a tracker, a step costs
at most 1 ms, one line says that the tracker is behind, and after `unisono sync` the tracker's own reader finds each
step once."""

import importlib.util
import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import kept_port
from tests.threads import context
from tests.trackers.targets import FileTarget, ServerTarget, disk
from tests.train.small import recipe
from unisono.config import Recipe, resolve, resolved_toml
from unisono.train.data.load import load
from unisono.train.watch import journal
from unisono.verbs.train import rank as train_rank
from unisono.verbs.train.order import TrainOrder
from unisono_contrib.comm import threads
from unisono_contrib.trackers import follower

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
STEPS, AT = 60, 15  # steps of a run, and after which one its tracker fails
NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
CELLS = [
    (name, fault, when)
    for name in (*NEEDS, "mlflow-server")
    for fault in ("killed", "hung", "full", "scarce", *(["500"] if name == "mlflow-server" else []))
    for when in ("start", "during")
]
Target = FileTarget | ServerTarget


def played(told: Recipe, run_dir: Path, hear: Any = lambda rank, event: None) -> tuple[list[Any], bytes]:
    """Loss and norm of each step of a run, and its weights at the end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    resolved = resolve(told, "dp=1", 1)
    (run_dir / "config.resolved.toml").write_text(resolved_toml(resolved))
    corpus = load(told.data, told.model)
    argument = TrainOrder(resolved.recipe, resolved.plan, "", run_dir, False).as_json()
    threads.run(1, lambda rank: train_rank.main(context(rank, 1, hear), argument, corpus), join=False)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    weights = run_dir / "checkpoints" / f"step-{STEPS:06d}" / "rank-00000.safetensors"
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines], weights.read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], bytes]:
    """The run without a tracker."""
    folder = tmp_path_factory.mktemp("plain")
    return played(recipe(folder, steps=STEPS).model_copy(update={"name": "demo"}), folder / "demo" / "run")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerTarget]:
    folder = tmp_path_factory.mktemp("server")
    with disk(folder) as made, kept_port() as port:
        target = ServerTarget(port, made, folder / "log")
        yield target
        target.stop()


@pytest.fixture
def target(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Target]:
    name = request.param
    module = NEEDS.get(name, "mlflow")
    if importlib.util.find_spec(module) is None or (name == "mlflow-server" and not _serves()):
        pytest.skip(f'{name} is not installed: pip install "unisono[trackers]"')
    if name == "mlflow-server":
        target: Target = request.getfixturevalue("server")
        for key, value in target.environ.items():
            monkeypatch.setenv(key, value)
        yield target
        return
    with disk(tmp_path) as made:
        target = FileTarget(name, made)
        for key, value in target.environ.items():
            monkeypatch.setenv(key, value)
        yield target


def _serves() -> bool:
    return importlib.util.find_spec("flask") is not None


class Watched:
    """A run whose tracker fails. notes: what the user read. seconds: in the tracker's part of the run's steps."""

    def __init__(self, target: Target, fault: str, run_dir: Path, patch: pytest.MonkeyPatch) -> None:
        self.target, self.fault, self.run_dir = target, fault, run_dir
        self.notes, self.begun, self.seconds = list[str](), list[follower.FollowerProcess](), 0.0
        self.failed = False
        start, observe = follower.start, follower._Following.observe

        def started(*given: Any, **options: Any) -> follower.FollowerProcess:
            self.begun.append(start(*given, **{**options, "patience": 2.0, "grace": 3.0}))
            if self.failed and fault == "killed":
                target.fail(fault, self.begun[-1])
            return self.begun[-1]

        def timed(following: Any, steps: Any) -> None:
            begun = time.perf_counter()
            observe(following, steps)
            self.seconds += time.perf_counter() - begun

        patch.setattr(follower, "start", started)
        patch.setattr(follower, "GRACE", 3.0)
        patch.setattr(follower._Following, "observe", timed)
        patch.setattr(journal, "EVERY", 0.0)  # each step is told by itself

    def fail(self) -> None:
        self.target.fail(self.fault, self.begun[-1] if self.begun else None)
        self.failed = True

    def hear(self, rank: int, event: dict[str, Any]) -> None:
        """What the run says. It goes slower until its tracker has begun, and then until it is said to be behind."""
        if event["kind"] == "note":
            self.notes.append(event["text"])
        if event["kind"] != "step":
            return
        if event["step"] == AT and not self.failed:
            assert self._until(lambda: self._safe() > 0), "the tracker has got nothing"
            self.fail()
        if self.failed and event["step"] > AT:
            self._until(lambda: bool(self.behind()), 0.1)

    def _safe(self) -> int:
        cursor = self.run_dir / "trackers" / f"{self.target.text.partition(':')[0]}.json"
        return json.loads(cursor.read_text())["safe"] if cursor.exists() else 0

    def behind(self) -> list[str]:
        return [note for note in self.notes if " is behind: " in note]

    def _until(self, done: Any, seconds: float = 40.0) -> bool:
        until = time.monotonic() + seconds
        while not (is_done := done()) and time.monotonic() < until:
            time.sleep(0.01)
        return is_done


@pytest.mark.parametrize(("target", "fault", "when"), CELLS, indirect=["target"])
def test_a_tracker_that_fails_costs_the_run_nothing_and_has_all_of_it_later(
    target: Target, fault: str, when: str, tmp_path: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "demo" / f"{fault}-{when}"
    told = recipe(tmp_path, steps=STEPS).model_copy(update={"name": "demo"})
    told = told.model_copy(update={"out": told.out.model_copy(update={"track": (target.text,)})})
    watched = Watched(target, fault, run_dir, monkeypatch)
    target.begin(run_dir)
    try:
        if when == "start":
            watched.fail()
        got = played(told, run_dir, watched.hear)
    finally:
        target.mend()
    assert got == plain
    assert watched.failed and len(watched.behind()) == 1, watched.notes
    assert watched.seconds / STEPS < 1e-3
    command = [sys.executable, "-m", "unisono", "sync", str(run_dir), "--to", target.text, "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert said.returncode == 0, said.stderr
    (end,) = json.loads(said.stdout.splitlines()[-1])["to"].values()
    assert end == {"sent": STEPS, "steps": STEPS, "error": ""}
    narrow = (lambda x: struct.unpack("f", struct.pack("f", x))[0]) if target.name == "tensorboard" else float
    assert target.read(f"demo-{run_dir.name}") == [(step, narrow(loss)) for step, loss, _ in plain[0]]
