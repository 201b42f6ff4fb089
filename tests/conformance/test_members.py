"""Every member of every family, held to its suite; and each suite finds members that are wrong."""

import json
from pathlib import Path

import pytest

from unisono.cli import main
from unisono.spec.errors import UsageError
from unisono_contrib.verify.conformance import families, family_of, held, word_of

OWN = Path(__file__).with_name("own.py")
STARTERS = OWN.with_name("starters.py")
MINE = ("policy", "codec", "collective", "starter")
NEEDS = {"quorum": "quorum:k=2"}  # with the options that it does not begin without
MEMBERS = [
    (f, f"{word_of(f)}={NEEDS.get(name, name)}")
    for f in families()
    if f.noun in MINE
    for name in f.names()
    if (f.noun, name) != ("collective", "mpi")  # needs mpirun: below
]

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(("family", "name"), MEMBERS, ids=lambda x: x if isinstance(x, str) else x.noun)
def test_every_member_passes_its_suite(family, name: str, tmp_path: Path) -> None:
    judged = held(name, tmp_path)
    assert judged.faults == ()
    assert judged.suites == ("member", family.noun)


@pytest.mark.slow
def test_mpi_passes_its_suite_under_a_real_mpirun(tmp_path: Path) -> None:
    try:
        judged = held("collective=mpi", tmp_path)
    except UsageError as lacking:
        pytest.skip(f"{lacking.what}: {lacking.fix}")
    assert judged.faults == ()


@pytest.mark.parametrize("name", [n for f in families() if f.noun == "schedule" for n in f.names()])
def test_every_schedule_passes_its_suite(name: str, tmp_path: Path) -> None:
    assert held(name, tmp_path).faults == ()


@pytest.mark.parametrize(
    "name",
    [f"{OWN}:Largest:ratio=0.5", f"{OWN}:Rounded", f"{STARTERS}:Toy", f"{OWN}:BothWays", "torus:rows=3"],
)
def test_users_own_that_are_right_pass(name: str, tmp_path: Path) -> None:
    assert held(name, tmp_path).faults == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Short", "happens 0 times"),
        ("Silent", "refused without saying what is served"),
        ("Backwards", "are summed in the order"),
        ("WrongRank", "rank 1 gets another sum than rank 0"),
        ("TooFine", "EXACT allows"),
        ("TooFew", "bytes a step and declares"),
        ("Forgetful", "it gives other sums"),
        ("WrongSum", "another result than it means"),
        ("WrongBytes", "bytes and declares"),
        ("Unfinished", "at the end rank 0 has of chunk"),
        ("Doubled", "twice"),
        ("Apart", "rank 1 has other weights than rank 0"),
        ("TooMuch", "from one device's, and it says ROUNDING"),
        ("Unsaid", "bytes of gradients a step and declares"),
        ("Lost", "a run goes on otherwise"),
    ],
)
def test_a_planted_fault_is_found(name: str, words: str, tmp_path: Path) -> None:
    assert any(words in fault for fault in held(f"{OWN}:{name}", tmp_path).faults)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Off", "local world are (1, 3, 1, 2), and it says (2, 3, 1, 2)"),
        ("Twice", "two ranks have the same number"),
        ("Claiming", "a run of slurm is claimed by claiming"),
        ("Late", "a run of late is claimed by environment"),
        ("Guessing", "without TOY_RANKS it takes the environment, and says something else"),
        ("Wordless", "says another thing than that this is missing"),
        ("Silent", "without one of TOY_RANK, TOY_RANKS it knows nothing"),
        ("Apart", "cannot meet at host0:29500 and host1:29500"),
        ("SameTurn", "its turn 30 is that of slurm"),
    ],
)
def test_a_fault_planted_in_a_starter_is_found(name: str, words: str, tmp_path: Path) -> None:
    assert any(words in fault for fault in held(f"{STARTERS}:{name}", tmp_path).faults)


def test_a_name_of_several_members_is_told_apart_by_its_key() -> None:
    names = [name for family in families() for name in family.names()]
    several = sorted({name for name in names if names.count(name) > 1})
    assert several == ["auto", "hf", "mpi", "ring"], "a name has one meaning, but for those of the contract"
    for name in several:
        with pytest.raises(UsageError, match=f"{name} is a member of several families") as error:
            family_of(name)
        words = error.value.fix.replace("--conformance ", "").split(" or ")
        assert len({family_of(word).noun for word in words}) == names.count(name)


def test_the_command_says_which_and_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--conformance", "gpipe", "--conformance", f"{OWN}:Short", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    good, bad = told["results"]
    assert (good["family"], good["faults"]) == ("schedule", [])
    assert bad["faults"] and not told["pass"]
    assert main(["verify", "--conformance", "1f1b"]) == 0
    assert "schedule 1f1b  ok" in capsys.readouterr().out


def test_a_family_is_known_by_name_and_by_base_class() -> None:
    assert family_of("canonical").noun == "policy"
    assert family_of(f"{OWN}:WrongBytes").noun == "collective"
    for text in ("nobody", f"{OWN}:nobody"):
        with pytest.raises(UsageError, match="no member of any family"):
            family_of(text)
