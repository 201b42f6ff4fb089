"""Whoever is killed -9 above the ranks, supervisor or helper, is replaced, and the run goes on; not so the guardian."""

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch import soak
from tests.verbs import jobs
from tests.verbs.jobs import Done, Job, losses, started, unisono
from unisono.launch.run.membership import LIMIT
from unisono.observe.metrics import read_lines
from unisono.train.state.checkpoint import read_full
from unisono_contrib.programs.chaos import counted, sequel

pytestmark = pytest.mark.timeout(120)

TRAIN = ("train", "recipe.toml", "--json", "--plan", "dp=2 sync=canonical")
LONG = ("--train.steps", "100000", "--train.save_every", "0")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    place = jobs.folder_with(tmp_path_factory.mktemp("whole"))
    done = unisono(place, *TRAIN)
    assert done.code == 0 and done.object["restarts"] == 0, done.err
    return place / done.object["run_dir"]


def same_bits(run: Path, other: Path) -> bool:
    one, two = (read_full(where / "checkpoints" / jobs.checkpoints(where)[-1]) for where in (run, other))
    return one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)


def supervisor(job: Job) -> int:
    """The guardian's only child; it dies and comes back."""
    return _until(lambda: next((child.pid for child in _children(job.process.pid)), None))


def helper(job: Job) -> int:
    """The first child of that one which is a session of its own."""

    def found() -> int | None:
        return next((two.pid for one in _children(job.process.pid) for two in _children(one.pid)), None)

    return _until(found)


def _children(pid: int) -> list[jobs.psutil.Process]:
    with suppress(jobs.psutil.Error):
        return [one for one in jobs.psutil.Process(pid).children() if one.status() != "zombie"]
    return []


def _until(found: Callable[[], int | None], seconds: float = 60.0) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (got := found()) is not None:
            return got
        os.sched_yield()
    raise AssertionError(f"nobody there in {seconds} s")


def killed(find: Callable[[Job], int], job: Job, before: Collection[int] = ()) -> int:
    """SIGKILL to that process, once it is there. before: those that are dying of one already. Returns its number."""
    while True:
        with suppress(ProcessLookupError):
            if (pid := find(job)) not in before:
                os.kill(pid, signal.SIGKILL)
                return pid


def life(run: Path) -> list[str]:
    """The events of a run, of losses with who was lost."""
    lines = read_lines(run / "history.jsonl")[0]
    return [" ".join([line["event"], *line.get("lost", ())]) for line in lines]


def moments(job: Job) -> Iterator[None]:
    """Before the run's first checkpoint, while one is being saved, and in a step after."""
    run = job.steps(1)
    yield
    left = _half_made(run)  # by who was killed, if that was during a save
    _until(lambda: 1 if _half_made(run) - left or len(losses(run)) > 20 else None)
    yield


def _half_made(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("step-*.tmp-*")}


@pytest.mark.parametrize(("who", "find"), [("supervisor", supervisor), ("helper", helper)])
def test_who_is_killed_is_replaced_and_no_bit_is_another(
    tmp_path: Path, reference: Path, who: str, find: Callable[[Job], int]
) -> None:
    place = jobs.folder_with(tmp_path)
    with started(place, *TRAIN) as job:
        dying = set[int]()
        for _ in moments(job):
            dying.add(killed(find, job, dying))
        done = job.done()
    assert done.code == 0 and done.left == (), done.err
    (run,) = jobs.runs_of(place)
    named = who.replace("helper", "fork server")
    assert done.err.count(f"the {named} was ") == 2 and done.object["restarts"] == 2
    assert losses(run) == losses(reference) and same_bits(run, reference)
    again = "start" if who == "supervisor" else "met"
    told = life(run)  # the second may come before all have met after the first
    assert (told[0], told[-2:], told.count(f"lost {who}")) == ("start", [again, "end"], 2)
    assert not list((run / "checkpoints").glob("*.tmp-*")) and not list((run / "alive").glob("*"))


@pytest.mark.parametrize(
    ("who", "find"), [("supervisor", supervisor), pytest.param("helper", helper, marks=pytest.mark.slow)]
)
def test_killed_before_the_ranks_are_there_it_begins_in_one_folder(
    tmp_path: Path, reference: Path, who: str, find: Callable[[Job], int]
) -> None:
    place = jobs.folder_with(tmp_path)
    with started(place, *TRAIN) as job:
        job.made()
        killed(find, job)
        done = job.done()
    assert done.code == 0 and done.left == (), done.err
    (run,) = jobs.runs_of(place)
    assert done.object["restarts"] >= 1 and same_bits(run, reference)


def test_faults_of_all_processes_are_played_once_and_every_leaf_is_counted(tmp_path: Path) -> None:
    faults = (
        "kill:who=supervisor:step=5:phase=update kill:who=1:step=9 kill:who=helper:step=12:phase=collective"
    )

    def start(words: list[str]) -> tuple[int, str, str]:
        done = unisono(tmp_path, *words)
        return done.code, done.out, done.err

    recipe = soak.write_recipe(tmp_path, 16, save_every=4)
    plain = soak.run(recipe, "dp=2 sync=canonical", start=start)
    got = soak.run(recipe, "dp=2 sync=canonical", 1, faults, start=start)
    soak.compare(got, plain, 16)
    assert (plain.problems, got.problems) == ([], [])
    assert got.digest() == plain.digest() and got.said["restarts"] == 3
    told = got.said["faults"]
    assert (told["injected"], told["losses"], told["recovered"]) == (3, 3, 3)
    assert sum(line["event"] == "injected" for line in sequel.read(got.run_dir)) == 3
    assert {line["epoch"][0] for line in counted.read(got.run_dir)} == {1, 2}


def asked(place: Path, number: int, whole_group: bool = False) -> Done:
    """A run whose guardian gets a signal, or its group, as from a terminal."""
    with started(place, *TRAIN, *LONG) as job:
        job.steps(2)
        (os.killpg if whole_group else os.kill)(job.process.pid, number)
        return job.done()


@pytest.mark.parametrize(
    ("number", "code", "whole_group"),
    [(signal.SIGTERM, 75, False), (signal.SIGINT, 130, False), (signal.SIGINT, 130, True)],
)
def test_what_asks_for_the_end_reaches_the_supervisor_once(
    tmp_path: Path, number: int, code: int, whole_group: bool
) -> None:
    done = asked(jobs.folder_with(tmp_path), number, whole_group)
    assert done.code == done.object["exit"] == code and done.left == ()
    assert "the run is saved" in done.block and "stopped at once" not in done.err


def test_nobody_outlives_a_killed_guardian(tmp_path: Path) -> None:
    with started(jobs.folder_with(tmp_path), *TRAIN, *LONG) as job:
        job.steps(1)
        assert len(job.family()) == 4
        job.process.kill()
        assert jobs.left_behind(job.mark) == ()


def test_who_is_killed_again_and_again_without_a_step_is_given_up(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path)
    with started(place, *TRAIN) as job:
        pid = 0
        for _ in range(LIMIT + 1):
            old = pid
            while (pid := supervisor(job)) == old:
                pass
            os.kill(pid, signal.SIGKILL)
        done = job.done()
    assert done.code == done.object["exit"] == 128 + signal.SIGKILL and done.left == ()
    assert done.block.startswith("error U-R02  the supervisor was killed by SIGKILL")


def test_without_recovery_there_is_no_guardian(tmp_path: Path) -> None:
    with started(jobs.folder_with(tmp_path), *TRAIN, *LONG, "--launch.recover", "false") as job:
        job.steps(1)
        assert len(job.family()) == 3
        os.kill(job.family()[0].pid, signal.SIGKILL)  # the helper
        done = job.done()
    assert done.code == 1 and json.loads(done.out)["code"] == "U-R02"
    assert done.left == ()
