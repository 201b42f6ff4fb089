"""Faults as data: what a script may say, what is told of it, and the count of leaves that must fail on planted mistakes."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.spec.errors import ConfigProblems, UsageError
from unisono_contrib.programs.chaos import counted, sequel
from unisono_contrib.programs.chaos.fault import FAULTS, IN_STEP, Fault
from unisono_contrib.programs.chaos.script import Script, read

TOML = """# what a bad night brings
[[fault]]
what = "kill"
who = 2
step = 10
phase = "update"

[[fault]]
what = "pause"
after = 3.5
seconds = 0.1
"""


@given(st.integers(0, 999), st.integers(1, 6), st.sets(st.sampled_from(sorted(FAULTS)), min_size=1))
def test_a_random_script_is_its_seeds_and_legal(seed: int, ranks: int, kinds: set[str]) -> None:
    text = f"random:seed={seed}:faults=9:kinds={','.join(sorted(kinds))}"
    script = read(text, ranks, 30)
    assert script == read(text, ranks, 30) == Script.of_text(script.as_text())
    assert (
        len({fault.step for fault in script.faults}) == 9
    )  # each is followed by a step, or recovery gives up
    for fault in script.faults:
        assert fault.what in kinds and 0 <= fault.player() < ranks and 1 < (fault.step or 0) < 30
        assert isinstance(fault.who, int) or fault.kind.processes
    assert script.digest != read(text.replace(f"seed={seed}", f"seed={seed + 1}"), ranks, 30).digest


def test_a_file_of_tables_one_of_lines_and_words_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    said = [
        {"what": "kill", "who": 2, "step": 10, "phase": "update"},
        {"what": "pause", "after": 3.5, "seconds": 0.1},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, said)))
    words = "kill:who=2:step=10:phase=update pause:after=3.5:seconds=0.1"
    scripts = [read(str(tmp_path / name), 4, 50) for name in ("a.toml", "a.jsonl")] + [read(words, 4, 50)]
    assert scripts[0] == scripts[1] == scripts[2]
    assert scripts[0].faults[0] == Fault("kill", 2, 10, phase="update")
    assert isinstance(scripts[0].faults[1].who, int)  # drawn, as it may befall any


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('"kill"', '"kil"', 3, "did you mean kill"),
        ("who = 2", "who = 4", 4, "there is no rank 4"),
        ("who = 2", 'who = "helpr"', 4, "did you mean helper"),
        ("step = 10", "step = 51", 5, "never comes"),
        ("step = 10", "step = 0", 5, "a whole number from 1"),
        ('"update"', '"updat"', 6, "did you mean update"),
        ("seconds = 0.1", "secnds = 0.1", 11, "did you mean seconds"),
        ("seconds = 0.1", "seconds = -1", 11, "only a clock jumps back"),
        ("seconds = 0.1", "times = 3", 11, "pause takes no times"),
        ("after = 3.5", 'after = 3.5\nphase = "load"', 10, "a moment by itself"),
        ("after = 3.5", "", 9, "no moment"),
        ('phase = "update"', 'phase = "recovery"', 6, "belongs to no step"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(
    old: str, new: str, line: int, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(TOML.replace(old, new, 1))
    with pytest.raises(ConfigProblems) as caught:
        read(str(path), 4, 50)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:{line}" and says in problem.what and problem.code == "C30"


@pytest.mark.parametrize(
    "text",
    ["", "nothing.toml", "kill:who=2", "random:sed=1", "random:kinds=kil", "random:faults=49", "random:seed=x",
     "cut:who=supervisor:step=3", "flip:bit=99:step=2"],
)  # fmt: skip
def test_what_means_nothing_is_one_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text, 4, 50)
    assert caught.value.code == "C30" and caught.value.render().count("error") == 1


def test_a_file_that_is_no_toml_or_no_json_names_its_line(tmp_path: Path) -> None:
    for name, text, line in (
        ("a", "[[fault]]\nwhat = kill\n", 2),
        ("b", '{"what": "kill", "step": 2}\n{"wha', 2),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError) as caught:
            read(str(tmp_path / name), 4, 50)
        assert caught.value.where == f"{tmp_path / name}:{line}"


def test_a_fault_comes_at_its_moment_or_at_the_next_of_its_rank() -> None:
    fault = Fault("kill", 0, 10, phase="update")
    assert [fault.due(phase, 10) for phase in IN_STEP] == [False, False, False, False, True]
    assert not fault.due("update", 9) and not fault.due("update", None)
    assert fault.due("load", 11)  # the rank was new in step 11
    assert not Fault("kill", 0, 10, phase="save").due("load", 11)
    assert Fault("kill", 0, phase="recovery").due("recovery", None)
    assert not Fault("kill", 0, after=3.0).due("load", 1)


# What followed.


def line(event: str, t: float, **fields: object) -> dict[str, object]:
    return {"event": event, "t": t, **fields}


def test_what_followed_is_read_off_the_meeting_that_led_to_a_step() -> None:
    kill = {"what": "kill", "who": 1, "step": 5, "phase": "load"}
    lines = [
        line("planned", 0, fault=0, says=kill), line("planned", 0, fault=1, says={**kill, "who": 2}),
        line("planned", 0, fault=2, says={"what": "clock", "who": 0, "step": 1}), line("planned", 0, fault=3, says=kill),
        line("injected", 1.0, fault=2, rank=0, step=1, phase="load"),
        line("injected", 10.0, fault=0, rank=1, step=5, phase="load"),
        line("detected", 10.1, epoch=1, lost={"1": ""}, born=[1]),
        line("injected", 10.2, fault=1, rank=2, step=5, phase="recovery"),  # before they have met
        line("detected", 10.4, epoch=2, lost={"2": ""}, born=[2]),
        line("meets", 10.5, epoch=2, rank=0), line("meets", 10.6, epoch=2, rank=1),
        line("met", 11.0, epoch=2, rank=0, step=5), line("step", 12.0, epoch=2, rank=0, step=6),
    ]  # fmt: skip
    rows = sequel.what_followed(lines)
    assert [round(rows[0][key], 3) for key in sequel.TIMES] == [0.1, 0.6, 1.0, 2.0]
    assert [round(rows[1][key], 3) for key in sequel.TIMES] == [0.2, 0.4, 0.8, 1.8]
    assert rows[2]["injected"] == 1.0 and "next" not in rows[2] and rows[3]["injected"] is None
    told = sequel.summed_up(rows)
    assert (told["planned"], told["injected"], told["losses"], told["recovered"]) == (4, 3, 2, 2)
    assert told["next_s"] == {"median": 1.9, "max": 2.0}
    assert sequel.in_words(told).startswith("3 of 4 played; 2 losses, 2 made good; 1.90 s")


def test_writers_of_one_file_do_not_see_that_of_another_script(tmp_path: Path) -> None:
    one, other = (read(f"kill:who={who}:step=3", 2, 9) for who in (0, 1))
    past = sequel.began(tmp_path, one.as_text())
    sequel.began(tmp_path, other.as_text()).add("injected", fault=0, rank=1, step=3, phase="load")
    with (tmp_path / sequel.FILE).open("a") as file:
        file.write('{"event": "inj')  # a disk that was full
    assert [line["event"] for line in past.lines()] == ["script", "planned"]
    assert [line["event"] for line in sequel.began(tmp_path, one.as_text()).lines()] == [
        "script",
        "planned",
        "script",
    ]


def test_a_cut_is_over_with_the_next_meeting_not_with_its_ranks_death() -> None:
    says = [
        {"what": what, "who": 1, "step": step, "phase": "load"} for what, step in (("cut", 2), ("kill", 5))
    ]
    lines = [
        *(line("planned", 0, fault=i, says=said) for i, said in enumerate(says)),
        line("injected", 10.0, fault=0, rank=1, step=2, phase="load"), line("detected", 10.5, epoch=1, lost={}, born=[]),
        line("step", 11.0, epoch=1, rank=0, step=2), line("injected", 20.0, fault=1, rank=1, step=5, phase="load"),
        line("detected", 20.1, epoch=2, lost={"1": ""}, born=[1]), line("step", 21.0, epoch=2, rank=0, step=5),
    ]  # fmt: skip
    assert [round(row["detected"], 3) for row in sequel.what_followed(lines)] == [0.5, 0.1]


# The count of leaves: four ranks, dp=2 pp=2, four leaves of two samples; ranks are lost in step 2.

LEAVES, MICRO, STEPS = 4, 2, 5


def dealt(rank: int, epoch: int, step: int) -> dict[str, object]:
    replica = rank % 2
    leaves = [
        [leaf, [step * LEAVES * MICRO + leaf * MICRO + i for i in range(MICRO)]]
        for leaf in (2 * replica, 2 * replica + 1)
    ]
    return {"epoch": [1, epoch], "rank": rank, "step": step, "at": [replica, 0], "leaves": leaves}


def begins(rank: int, epoch: int, step: int) -> dict[str, object]:
    return {"epoch": [1, epoch], "rank": rank, "begins": step}


def good() -> list[dict]:
    lines = [begins(rank, 0, 0) for rank in range(4)] + [begins(rank, 1, 2) for rank in range(4)]
    lines += [dealt(rank, 0, step) for step in range(2) for rank in range(4)]
    lines += [dealt(rank, 0, 2) for rank in (0, 1)]  # broken off: two ranks never came to it
    lines += [dealt(rank, 1, step) for step in range(2, STEPS) for rank in range(4)]
    return lines


def audit(lines: list[dict]) -> str:
    return "\n".join(counted.audit(lines, LEAVES, MICRO, STEPS))


def test_a_right_count_has_no_problem_in_any_order() -> None:
    assert audit(good()) == audit(good()[::-1]) == ""
    assert counted.made_again(good()) == (0, 1)
    assert audit([*good(), dealt(1, 1, 4)]) == ""  # an overflow plays a step again: the same leaves


def plant(change: str) -> list[dict]:
    lines = copy.deepcopy(good())
    at = {(one["rank"], one["epoch"][1], one.get("step", -1)): one for one in lines}
    if change == "double leaf":
        for rank in (1, 3):
            at[rank, 1, 3]["leaves"][0] = copy.deepcopy(at[0, 1, 3]["leaves"][0])
    elif change == "missing leaf":
        for rank in (0, 2):
            del at[rank, 1, 3]["leaves"][1]
    elif change == "odd stage":
        at[2, 1, 3]["leaves"] = at[3, 1, 3]["leaves"]
    elif change == "missing rank":
        lines.remove(at[3, 1, 4])
    elif change == "missing step":
        lines = [one for one in lines if one.get("step") != 3]
    elif change == "lost step":  # all go back to step 1, and go on from step 2
        for rank in range(4):
            at[rank, 1, -1]["begins"] = 1
    elif change == "odd beginning":
        at[2, 1, -1]["begins"] = 3
    elif change == "cursor off by one":
        for one in lines:
            if one["epoch"][1] and "step" in one:
                one["leaves"] = [[leaf, [p + LEAVES * MICRO for p in own]] for leaf, own in one["leaves"]]
    elif change == "other leaves the second time":
        lines.append({**at[0, 1, 3], "leaves": at[1, 1, 3]["leaves"]})
    elif change == "a leaf that is none":
        for rank in (0, 2):
            at[rank, 1, 3]["leaves"].append([7, [100]])
    return lines


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("double leaf", "step 3: leaf 0 was counted 2 times"),
        ("missing leaf", "step 3: leaf 1 was counted 0 times"),
        ("odd stage", "step 3: rank 2 was assigned other leaves"),
        ("missing rank", "step 4: rank 3 was assigned nothing"),
        ("missing step", "step 3: nobody was assigned it"),
        ("lost step", "step 1: epoch (1, 1) began before it"),
        ("odd beginning", "epoch (1, 1): ranks began after different steps"),
        ("cursor off by one", "sample at position 16 was counted 0 times"),
        ("other leaves the second time", "step 3: rank 0 was assigned other leaves the second time"),
        ("a leaf that is none", "step 3: there is no leaf 7"),
    ],
)
def test_a_planted_mistake_is_found(change: str, says: str) -> None:
    assert says in audit(plant(change))


def test_steps_that_were_lost_and_made_again_are_told() -> None:
    lines = [begins(0, 0, 0), *(dealt(0, 0, step) for step in range(5)), begins(0, 1, 2), dealt(0, 1, 2)]
    assert counted.made_again(lines) == (2, 1)  # back to a checkpoint after step 2


def test_a_runs_lines_are_read_but_for_one_that_broke_off(tmp_path: Path) -> None:
    (tmp_path / counted.FOLDER).mkdir()
    for rank in (0, 1):
        text = "".join(json.dumps(dealt(rank, 0, step)) + "\n" for step in range(2))
        (tmp_path / counted.FOLDER / f"rank-{rank:05d}.jsonl").write_text(text + '{"epoch": [1, 0], "ra')
    assert len(counted.read(tmp_path)) == 4
