"""`unisono doctor explain`: thirty-odd logs of well-known failures and ten of healthy runs, all written for this test in the
form that reports of such failures have."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.explained import HEALTHY, LINES, LOGS, ROOT
from unisono.cli import main
from unisono.spec.errors import UsageError
from unisono_contrib.launch.explain import run
from unisono_contrib.launch.explain.cause import Explanation, explain
from unisono_contrib.launch.explain.evidence import look
from unisono_contrib.launch.explain.known import KINDS, filled, known_failures, literal_of
from unisono_contrib.launch.explain.logs import log_of, read_logs


def explained(text: str, name: str = "x.log") -> Explanation:
    return explain([look(log_of(name, text))])


def test_well_known_failures_are_named() -> None:
    """The table of these logs: what was found in each, and where."""
    right = 0
    for log, (pattern, rank, words) in LOGS.items():
        facts, _ = run(str(ROOT / log))
        cause = facts["cause"] or {"pattern": "-", "rank": None, "evidence": {"line": 0, "text": ""}}
        hit = (cause["pattern"], cause["rank"]) == (pattern, rank) and words in cause["evidence"]["text"]
        right += hit
        print(f"{'right' if hit else 'WRONG'}  {log:28} {cause['pattern']:22} {cause['evidence']['line']:4}")
    print(f"{right} of {len(LOGS)}")
    assert len(LOGS) >= 30 and right == len(LOGS)


def test_healthy_runs_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """In spite of warnings, retries, a batch that was too large, skipped steps and a restart."""
    assert len(HEALTHY) == 10
    for log in HEALTHY:
        assert main(["doctor", "explain", str(log)]) == 0
        assert capsys.readouterr().out.startswith("no failure is seen"), log


def other_numbers(text: str) -> str:
    return re.sub(
        r"(?<![\w.:/-])(?!20\d\d\b)\d{4,9}(?![\w.:/-])", lambda number: str(int(number[0]) + 1111), text
    )


VARIATIONS: dict[str, Callable[[str], str]] = {
    "times before each line": lambda text: "".join(
        f"2026-05-01T10:00:00.000Z {line}\n" for line in text.splitlines()
    ),
    "names of pods": lambda text: "".join(
        f"[pod/job-worker-3-x7k/trainer] {line}\n" for line in text.splitlines()
    ),
    "colours and carriage returns": lambda text: text.replace("\n", "\x1b[0m\r\n").replace(
        "Error", "\x1b[31mError\x1b[0m"
    ),
    "other numbers": other_numbers,
    "words of others in between": lambda text: re.sub(r"((?:.*\n){3})", r"\1[rank63]: still here\n", text),
    "a banner of a thousand lines": lambda text: "loading shard ... ok\n" * 1000 + text,
}


@pytest.mark.parametrize("change", VARIATIONS.values(), ids=VARIATIONS)
def test_variations_are_named_as_well(change: Callable[[str], str]) -> None:
    wrong = []
    for log, (pattern, _, _) in LOGS.items():
        logs = read_logs(str(ROOT / log))
        root = explain([look(log_of(each.name, change(each.text + "\n"))) for each in logs]).root
        if root is None or root.name != pattern:
            wrong.append((log, pattern, root and root.name))
    assert wrong == []


@pytest.mark.parametrize("log", HEALTHY, ids=lambda path: path.stem)
def test_a_run_that_is_cut_off_is_explained_by_what_came_last(log: Path) -> None:
    """A healthy run whose warnings lie behind it, and that then fails of something else."""
    root = explained(log.read_text() + "\n[rank3]: OSError: [Errno 28] No space left on device\n").root
    assert root and (root.name, root.rank) == ("disk-full", 3)


def test_each_pattern_is_known_by_a_line() -> None:
    assert set(LINES) == {pattern.name for pattern in known_failures()}
    for name, line in LINES.items():
        pattern = next(pattern for pattern in known_failures() if pattern.name == name)
        evidence = look(log_of("x.log", f"starting\n{line}\n"))
        assert name in [finding.name for finding in evidence.findings], (name, line)
        if pattern.kind != "echo" and not pattern.explains:
            root = explain([evidence]).root
            assert root and root.name == name, (name, root and root.name)


def test_patterns_say_only_what_their_signs_tell() -> None:
    names = [pattern.name for pattern in known_failures()]
    assert len(names) == len(set(names)) > 60
    for pattern in known_failures():
        groups = {group for sign in pattern.signs for group in sign.expression.groupindex}
        fields = set(re.findall(r"\{(\w+)\}", pattern.says))
        assert fields <= groups, pattern.name
        assert pattern.kind in KINDS and pattern.signs and pattern.tries and pattern.likely
        assert set(pattern.explains) <= set(names)


def test_the_step_is_that_of_the_line_or_the_newest_before_it() -> None:
    root = explained("step 7 loss 2.0\nstep 8 loss nan\nstep 9 loss nan\n").root
    assert root and (root.name, root.step, root.line.number) == ("nan", 8, 2)
    root = explained("step 7 loss 2.0\nOSError: [Errno 28] No space left on device\n").root
    assert root and root.step == 7


def test_the_literal_of_a_sign_loses_no_line() -> None:
    """A sign is looked for by a plain text first: it sees the lines that the expression alone does."""
    text = (
        "\n".join(path.read_text() for path in ROOT.rglob("*.*") if path.is_file())
        + "\n"
        + "\n".join(LINES.values())
    )
    for pattern in known_failures():
        for sign in pattern.signs:
            lines = {text.count("\n", 0, match.start()) for match in sign.lines(text)}
            assert lines == {
                text.count("\n", 0, match.start()) for match in sign.expression.finditer(text)
            }, sign


@pytest.mark.parametrize(
    ("expression", "literal"),
    [(r"Errno 28\] No space", "Errno 28] No space"), (r"a|b", ""), (r"(?:a|bcdef) ghijk", " ghijk"), (r"colou?r is red", "r is red"),
     (r"[(]x+ failed", " failed"), (r"\bwas lost\b", "was lost"), (r"(?i)oom", ""), (r"abc", "")],
)  # fmt: skip
def test_the_literal_is_outside_of_what_may_be_absent(expression: str, literal: str) -> None:
    assert literal_of(expression) == literal


def test_what_a_line_does_not_tell_is_left_out() -> None:
    assert (
        filled("no room[: {want} more][, {free} free]", {"want": "2 GiB", "free": None})
        == "no room: 2 GiB more"
    )


def test_an_unknown_failure_is_no_known_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "odd.log"
    log.write_text("step 1\nstep 2\nfrobnicator: fatal: the gauge is stuck\nbye\n")
    assert main(["doctor", "explain", str(log), "--json"]) == 4
    facts = json.loads(capsys.readouterr().out)
    assert facts["cause"] is None and facts["last_error"]["line"] == 3 and not facts["ok"]
    main(["doctor", "explain", str(log)])
    said = capsys.readouterr().out
    assert "no known pattern" in said and "odd.log:3  frobnicator" in said


def test_what_a_run_went_on_after_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps may stand below an error because they waited in a buffer; the log alone does not tell."""
    log = tmp_path / "run.log"
    log.write_text(
        "ERROR: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        + "".join(f"step {step}\n" for step in range(9))
    )
    assert main(["doctor", "explain", str(log)]) == 0
    said = capsys.readouterr().out
    assert "no failure is seen" in said and "went on   after: the GPU ran out of memory" in said


def test_a_log_of_consequences_sends_one_to_the_others() -> None:
    explanation = explained(
        "[rank1]: RuntimeError: Connection reset by peer\nsrun: error: n2: task 1: Exited with exit code 1\n"
    )
    assert explanation.root is None and explanation.others and explanation.last


def test_the_error_of_a_run_of_ours_is_read(tmp_path: Path) -> None:
    error = {"code": "U-H01", "what": "no word from rank 1 for 30 s", "where": "model.py:41 in forward", "likely": "a lock",
             "try": "a longer launch.timeout", "rank": 1, "host": "gpu08", "traceback": ""}  # fmt: skip
    (tmp_path / "error.json").write_text(json.dumps(error, indent=1))
    facts, lines = run(str(tmp_path))
    cause = facts["cause"]
    assert (cause["pattern"], cause["rank"], cause["host"]) == ("U-H01", 1, "gpu08")
    assert cause["try"] == ["a longer launch.timeout"] and "model.py:41" in lines[0]


def test_what_ranks_of_ours_printed_is_read_with_their_ranks(tmp_path: Path) -> None:
    rows = [
        {"at": 1.0, "rank": -1, "kind": "note", "text": "2 ranks"},
        {"at": 2.0, "rank": 1, "kind": "output", "text": "loss: nan"},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cause = run(str(tmp_path))[0]["cause"]
    assert (cause["pattern"], cause["rank"], cause["evidence"]["line"]) == ("nan", 1, 2)


def test_an_own_error_that_echoes_another_is_no_cause() -> None:
    text = (
        "error U-R03  another rank has ended, rank 0, host a\n  try     the error of that rank\n"
        "[rank2]: ValueError: x\nerror U-M01  out of memory, rank 2, host b\n  where   net.py:3 in f\n"
    )
    root = explained(text).root
    assert root and (root.name, root.rank, root.host) == ("U-M01", 2, "b")


def test_the_exception_of_a_chain_is_its_cause() -> None:
    chain = """Traceback (most recent call last):
  File "/a/cache.py", line 3, in get
    return table[key]
{first}

{link}

Traceback (most recent call last):
  File "/a/load.py", line 9, in load
    raise ValueError(key) from error
ValueError: bad key
"""
    cause = "The above exception was the direct cause of the following exception:"
    during = "During handling of the above exception, another exception occurred:"
    root = explained(chain.format(first="KeyError: 'a'", link=cause)).root
    assert root and root.says.endswith("KeyError: 'a'") and "cache.py:3" in root.likely
    root = explained(chain.format(first="KeyError: 'a'", link=during)).root
    assert root and root.says.endswith("ValueError: bad key") and "load.py:9" in root.likely
    root = explained(chain.format(first="OSError: [Errno 24] Too many open files", link=during)).root
    assert root and root.name == "too-many-files"


def test_a_timeout_long_before_is_the_cause_of_what_it_tears_down() -> None:
    text = (
        "[rank0]:[E412 18:22:41.200 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout:"
        " WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=6000) ran for 6001 milliseconds\n"
        "[rank0]:[E412 18:24:41.200 x.cpp:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB\n"
    )
    root = explained(text).root
    assert root and root.name == "collective-timeout"
    root = explained(text.replace("18:24:41", "18:22:44")).root
    assert root and root.name == "gpu-out-of-memory"


def test_logs_of_several_files_are_ordered_by_their_times(tmp_path: Path) -> None:
    for rank, (clock, words) in enumerate(
        [("10:05:00", "No space left on device"), ("10:01:00", "Too many open files")]
    ):
        (tmp_path / f"rank{rank}.log").write_text(f"2026-03-01 {clock},000 ERROR {words}\n")
    cause = run(str(tmp_path))[0]["cause"]
    assert (cause["pattern"], cause["rank"]) == ("too-many-files", 1)


@pytest.mark.timeout(60)
def test_stdin_is_read_without_torch() -> None:
    code = "import sys; from unisono.cli import main; main(['doctor', 'explain', '-', '--json']); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], input=LINES["port-in-use"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["cause"]["pattern"] == "port-in-use"


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nowhere.log"):
        with pytest.raises(UsageError) as refused:
            run(str(where))
        assert refused.value.code == "E02" and refused.value.fix
    for words in ([], ["a", "b"]):
        assert main(["doctor", "explain", *words]) == 2


def test_anything_may_be_in_a_log(tmp_path: Path) -> None:
    """No byte ends the reader, and none steers the terminal."""
    log = tmp_path / "odd.log"
    log.write_bytes(bytes(range(256)) * 40 + b"\n\x1b]0;x\x07\x1b[2Jerror: \x9b31m odd\n" + b"x" * 100_000)
    facts, lines = run(str(log))
    assert facts["lines"] > 1 and "\x1b" not in "".join(lines) and "\x9b" not in "".join(lines)
    assert run("-", io.BytesIO(b""))[0]["ok"]
