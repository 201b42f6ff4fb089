"""A run that is alive is asked from outside: who is to blame is named, nothing changes in the run, and strangers and what
ended runs leave behind are left alone. See `hangs` for the cases (`python -m tests.launch.hangs --doctor`)."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.hangs import CASES, Case, ask, began, doctor
from unisono.launch import doctor_hang, hang_report, inspect, inspect_folder
from unisono.launch.inspect import InspectedRank
from unisono.launch.inspect_folder import RankProcess
from unisono.launch.inspect_schema import GroupCall, GroupCalls, RankReport
from unisono.launch.rank.presence import Presence
from unisono.launch.rank_status import ASK, LINES, RankStatus, catches, process_state
from unisono.spec.errors import UsageError

pytestmark = pytest.mark.timeout(60)
QUICK = (
    "recipe-own-dp2-stop:model:0:8",
    "recipe-own-dp2-shapes:model:1:8",
    "loop-torchrun-dp2-held:loop:1:3",
    "loop-plain-dp2-break:loop:1:3",
)
SLOW = Case("recipe", "own", "dp=2 sync=canonical", "slow:data:0:1", "", "")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in CASES],
)
def test_the_culprit_of_a_hang_is_named_from_outside(case: Case, tmp_path: Path) -> None:
    played = ask(case, tmp_path, *(("--patience", "3") if case.name in QUICK else ()))
    assert not played.wrong, played.output[-6000:]


def weights(folder: Path) -> str:
    """The digest of a run's last checkpoint."""
    found = hashlib.sha256()
    last = max(folder.glob("runs/run/*/checkpoints/step-*"), key=lambda path: int(path.name[5:]))
    files = sorted(last.glob("*.safetensors"))
    assert files
    for path in files:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("asks", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_healthy_run_that_is_asked_ends_with_the_same_bits(asks: int, tmp_path: Path) -> None:
    flags = ("--train.steps", str(60 + 20 * asks))
    digests = []
    for name, fault in (("asked", SLOW.fault), ("alone", "nothing:nowhere:0:0")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "hold").write_text("")
        with began(replace(SLOW, fault=fault), folder, 600.0, *flags) as (processes, _):
            for _ in range(asks if name == "asked" else 0):
                until = time.monotonic() + 30
                while not list(folder.glob("runs/run/*/metrics.jsonl")) and time.monotonic() < until:
                    time.sleep(0.05)
                code, told, _ = doctor(folder, "runs")
                assert code == 0 and told["pass"] and told["culprit"] is None, told
                assert [one["answered"] for one in told["stands"]] == [True, True]
                for one in inspect_folder.living(next(folder.glob("runs/run/*/alive"))):
                    assert inspect_folder.seen(one).frames, "by the signal too"
            (folder / "hold").unlink()
            assert processes[0].wait(100) == 0, (folder / "output").read_text()
        assert not list(folder.glob("runs/run/*/alive")), "nothing is left of a run that has ended"
        digests.append(weights(folder))
    assert digests[0] == digests[1]
    code, _, printed = doctor(tmp_path / "asked", "runs")
    assert code == 2 and "U-O03" in printed and "all well" in printed


def test_ranks_of_another_host_answer_through_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("loop", "plain", "dp=2", "stop:loop:0:3", "")
    with began(case, tmp_path, 600.0, HANG_PATIENT="seen"):
        until = time.monotonic() + 50
        while not (tmp_path / "began").exists() and time.monotonic() < until:
            time.sleep(0.05)
        monkeypatch.setattr(inspect_folder, "home", lambda: ["elsewhere"])
        found, lines = doctor_hang.run(tmp_path / "seen" / "alive", 10.0)
    assert found["culprit"] == 0 and not found["pass"], found
    assert "rank 0 is stopped by a signal" in found["cause"] and found["remedy"].startswith("kill -CONT")
    assert [one["answered"] for one in found["stands"]] == [False, True], "its neighbour spoke for it"
    assert "hanging.py" in found["error"]["where"] and any("waits in" in line for line in lines)


@pytest.mark.slow
def test_it_can_be_asked_from_a_name_space_that_sees_no_process_of_the_run(tmp_path: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no name space")
    case = Case("recipe", "own", "dp=2", "stop:model:1:8", "")
    with began(case, tmp_path, 600.0, HANG_PATIENT="seen"):
        until = time.monotonic() + 50
        while not (tmp_path / "began").exists() and time.monotonic() < until:
            time.sleep(0.05)
        command = [*apart, sys.executable, "-m", "unisono", "doctor", "hang", "runs", "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 4 and found["culprit"] == 1 and "hanging.py" in found["error"]["where"], found


@contextmanager
def sleeper(*command: str) -> Iterator[int]:
    with subprocess.Popen(command or ("sleep", "100")) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def me(rank: int = 0, world: int = 1, **other: Any) -> RankProcess:
    pid = other.pop("pid", os.getpid())
    plain = RankProcess(
        rank, world, pid, inspect_folder.started(pid), "here", inspect_folder.home(), 0, 0, "one", time.time()
    )
    return replace(plain, **other)


def test_a_rank_answers_until_it_leaves(tmp_path: Path) -> None:
    folder, asked = tmp_path / "alive", []

    def report() -> RankReport:
        asked.append(1)
        return RankReport(RankStatus(0, "runs", "here", idle=0.1, step=7), calls={}, since=0.2)

    presence = Presence(folder, me(), report)
    assert folder.stat().st_mode & 0o077 == 0
    for _ in range(2):
        (found,) = inspect.look(folder, inspect_folder.living(folder))
        assert (found.spoke, found.status.step, found.since) == (True, 7, 0.2)
    assert len(asked) == 2
    presence.close()
    assert not folder.exists() and inspect_folder.living(folder) == []


def test_an_answer_that_fails_is_no_answer_and_harms_nobody(tmp_path: Path) -> None:
    def report() -> RankReport:
        raise RuntimeError("no")

    presence = Presence(tmp_path / "alive", me(), report)
    (found,) = inspect.look(tmp_path / "alive", inspect_folder.living(tmp_path / "alive"))
    presence.close()
    assert not found.spoke and found.status.state == "silent"


def test_what_ended_processes_have_left_is_known_by_their_start(tmp_path: Path) -> None:
    with sleeper() as pid:
        here = me(pid=pid)
        assert not here.has_gone() and replace(here, start=here.start - 1).has_gone()
        assert not replace(here, home=["elsewhere"], start=1).has_gone(), "of others nothing is known"
        inspect_folder.appear(tmp_path / "alive", here)
        inspect_folder.sweep(tmp_path / "alive")
        assert inspect_folder.living(tmp_path / "alive") == [here]
    assert here.has_gone()
    inspect_folder.sweep(tmp_path / "alive")
    assert not (tmp_path / "alive").exists()


def test_ranks_of_the_last_start_count(tmp_path: Path) -> None:
    for rank, run, when in ((0, "new", 5.0), (1, "new", 6.0), (2, "old", 4.0)):
        inspect_folder.appear(tmp_path, me(rank, 2, run=run, began=when))
    (tmp_path / "rank3.json").write_text("{ half")
    (tmp_path / "rank4.json").write_text('{"rank": 4}')
    (tmp_path / "rank5.json").write_text(json.dumps(asdict(me(5)) | {"pid": "1"}))
    assert [one.rank for one in inspect_folder.living(tmp_path)] == [0, 1]


def test_a_stranger_is_sent_no_signal(tmp_path: Path) -> None:
    with sleeper() as pid:
        assert not catches(pid, ASK), "it would end it"
        assert inspect_folder.seen(me(pid=pid)).status.state == "silent"
        assert process_state(pid) in "SR"
        os.kill(pid, signal.SIGSTOP)
        while process_state(pid) != "T":
            pass
        assert inspect_folder.seen(me(pid=pid)).status.state == "stopped"
        assert process_state(pid) == "T" and inspect_folder.kernel(pid)["state"] == "stopped"


HELD = """
import faulthandler, os, sys
from unisono.launch.rank_status import ASK
faulthandler.register(ASK, file=os.memfd_create(sys.argv[1]), all_threads=True)
sum(range(10**12))
"""


def held(pid: int, name: str) -> int:
    """The descriptor of a process's file in memory, once the process acts on the signal."""
    until = time.monotonic() + 30
    while not catches(pid, ASK) and time.monotonic() < until:
        time.sleep(0.01)
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    return next(int(fd.name) for fd in descriptors if os.readlink(fd).startswith(f"/memfd:{name}"))


def test_lines_are_those_of_now_while_c_code_holds_python() -> None:
    with sleeper(sys.executable, "-c", HELD, LINES) as pid:
        lines, until = held(pid, LINES), time.monotonic() + 30
        at = 0
        while at != 5 and time.monotonic() < until:
            at = inspect_folder.seen(me(pid=pid, lines=lines)).frames[0][1]
        for _ in range(3):
            found = inspect_folder.seen(me(pid=pid, lines=lines))
            assert (found.status.state, found.frames) == ("runs", [("<string>", 5, "<module>")])


def test_a_process_that_only_a_file_calls_a_rank_gets_no_signal() -> None:
    with sleeper(sys.executable, "-c", HELD, "anything") as pid:
        lines = held(pid, "anything")
        assert inspect_folder.seen(me(pid=pid, lines=lines)).frames == []
        assert Path(f"/proc/{pid}/fd/{lines}").stat().st_size == 0


def test_a_folder_that_somebody_else_has_made_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_folder, "TMP", tmp_path)
    own = inspect_folder.private_folder()
    assert (
        inspect_folder.private("secret").parent == own
        and "secret" not in inspect_folder.private("secret").name
    )
    own.chmod(0o777)
    with pytest.raises(PermissionError):
        inspect_folder.private_folder()


def test_the_one_run_without_a_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_folder, "TMP", tmp_path)
    with pytest.raises(UsageError, match="no loop of your own"):
        doctor_hang.only_one()
    with sleeper() as pid:
        inspect_folder.appear(inspect_folder.private("a"), me(pid=pid, private=True))
        assert doctor_hang.only_one() == doctor_hang.find(str(pid)) == inspect_folder.private("a")
        with sleeper() as other:
            inspect_folder.appear(inspect_folder.private("b"), me(pid=other, private=True))
            with pytest.raises(UsageError, match="which of 2 runs"):
                doctor_hang.only_one()
    with pytest.raises(UsageError, match="no rank of a run without"):
        doctor_hang.find(str(pid))
    assert inspect_folder.private_runs() == []


def seen(rank: int, state: str, idle: float = 0.0, spoke: bool = True, **more: Any) -> InspectedRank:
    status = RankStatus(
        rank, state, "here", "the exchange of gradients" if state == "waits" else "", "", "a.py:1 in f"
    )
    return InspectedRank(
        **{"calls": {} if spoke else None, **more}, status=replace(status, idle=idle, step=9), who=me(rank, 2)
    )


def test_a_rank_may_keep_others_waiting_for_a_time_that_its_pace_explains() -> None:
    def of(idle: float, **pace: Any) -> doctor_hang.Diagnosis:
        return doctor_hang.judge([seen(0, "waits", idle, **pace), seen(1, "runs", idle, **pace)], None, 10.0)

    assert of(0.1, usual=0.1, since=0.1) == doctor_hang.Diagnosis(None, 0.1, 5.0)
    assert of(3.0, usual=0.1, since=3.1).again, "not yet"
    error = of(6.0, usual=0.1, since=6.1).error
    assert error is not None and (error.code, error.rank) == ("H01", 1)
    slow = of(60.0, usual=20.0, since=60.0)
    assert slow.error is None and not slow.again and slow.limit == 400.0
    assert of(8.0, since=8.0).again and of(11.0, since=11.0).error is not None
    begins = doctor_hang.judge([seen(0, "waits", 11.0), seen(1, "runs", 0.0)], None, 10.0)
    assert begins.error is None and begins.limit == 100.0, "no step is made yet, and it works"
    assert doctor_hang.judge([seen(0, "waits", 2.0), seen(1, "runs", 2.0)], 1.5, 0.0).error is not None


def test_one_that_validates_alone_and_computes_has_more_patience() -> None:
    frames = [["/x/src/unisono/train/step/evaluate.py", 3, "evaluate"]]
    waits = seen(0, "waits", 30.0, usual=0.1, since=30.0)
    busy, asleep = seen(1, "runs", 0.0, frames=frames), seen(1, "runs", 30.0, frames=frames)
    assert doctor_hang.judge([waits, busy], None, 10.0).error is None
    assert doctor_hang.judge([waits, asleep], None, 10.0).error is not None
    begun = [replace(one, status=replace(one.status, idle=0.0), since=0.5) for one in (waits, busy)]
    assert doctor_hang.judge([replace(one, usual=None) for one in begun], None, 0.0).again, "not known yet"


def test_ranks_that_save_together_may_wait_for_one_that_writes() -> None:
    frames = [["/x/src/unisono/train/state/checkpoint/vote.py", 9, "polls"]]
    polls, waits = seen(0, "waits", 0.0, frames=frames), seen(1, "waits", 30.0, frames=frames)
    assert doctor_hang.judge([polls, waits], None, 10.0).error is None
    alone = doctor_hang.judge([polls, seen(1, "waits", 30.0)], None, 10.0).error
    assert alone is not None and alone.code == "H02", "the other does not save"


def test_a_run_in_which_nobody_waits_and_nobody_moves_hangs() -> None:
    assert doctor_hang.judge([seen(0, "runs", 11.0)], None, 0.0).error is not None
    assert doctor_hang.judge([seen(0, "runs", 0.0, since=30.0, usual=0.1)], None, 0.0).error is None
    assert doctor_hang.judge([seen(0, "runs", 0.0, since=90.0, usual=0.1)], None, 0.0).error is not None
    assert doctor_hang.judge([seen(0, "silent", spoke=False)], None, 12.0).error is not None


def test_a_rank_that_is_gone_and_calls_that_differ_are_looked_at_twice() -> None:
    for gone in (InspectedRank(RankStatus(1, "gone")), seen(1, "gone", spoke=False)):
        judged = doctor_hang.judge([seen(0, "waits", 1.0), gone], None, 0.0)
        assert judged.error is not None and judged.again and judged.mark == "gone [1]"
    calls = [
        {"g-1": GroupCalls([0, 1], "dp", 7, {"4": GroupCall(says, False, "", op, place, 0)})}
        for says, op, place in (
            ("sum 3", "all_reduce of float32 [3]", "a.py:1 in f"),
            ("sum 4", "all_reduce of float32 [4]", "b.py:2 in g"),
        )
    ]
    ranks = [seen(0, "waits", 1.0, calls=calls[0]), seen(1, "waits", 1.0, calls=calls[1])]
    judged = doctor_hang.judge(ranks, None, 0.0)
    assert judged.error is not None and judged.mark == "called g-1 4" and judged.error.where == "b.py:2 in g"
    assert "a.py:1 in f" in judged.error.likely
    facts, lines = hang_report.report(Path("run/alive"), ranks, judged.error, 1.0, 5.0)
    assert facts["calls"][0]["latest"][1]["op"] == "all_reduce of float32 [4]" and facts["run"] == "run"
    assert any("#4 all_reduce of float32 [3], under way, a.py:1 in f" in line for line in lines)
    assert any(line.startswith("ranks 0, 1") and "waits in the exchange" in line for line in lines), lines


def test_a_folder_without_a_live_run_says_how_it_ended(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    inspect_folder.appear(tmp_path / "alive", me(start=1))
    for name, content, words in (
        ("", None, "gone without a word"),
        ("summary.json", {"steps": 40}, "all well, 40 steps"),
        ("error.json", {"code": "U-H01", "what": "no word", "rank": 1, "host": "a", "where": "b"}, "U-H01  no word, rank 1"),
        ("error.json", [], "cannot be read"),
    ):  # fmt: skip
        if name:
            (tmp_path / name).write_text(json.dumps(content))
            when = time.time() + 5 * (name == "error.json")
            os.utime(tmp_path / name, (when, when))
        with pytest.raises(UsageError) as raised:
            doctor_hang.run(doctor_hang.find(str(tmp_path)))
        assert (raised.value.code, raised.value.exit) == ("O03", 2) and words in raised.value.likely
