"""`unisono prove SCRIPT`: an unchanged script, played by one process and by several."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from unisono.cli import main
from unisono.library import proven
from unisono.plan import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
HEAD = """\
import sys
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
import unisono

x = torch.rand(24, 6)
y = (x[:, 0] > 0.5).long()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job = unisono.init()
rows = torch.utils.data.TensorDataset(x, y)
data = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
model, optimizer, data = job.prepare(model, optimizer, data)


def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


"""
LOOP = """\
for _ in range(3):
    for a, b in data:
        {line}
        step(F.cross_entropy(model(a), b))
"""

pytestmark = pytest.mark.timeout(150)
Proves = Callable[..., tuple[int, str, str]]


@pytest.fixture
def proves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Proves:
    """`proves(text, *flags)`: the command's exit code, stdout and stderr; text is the script, `train.py`."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *flags: str) -> tuple[int, str, str]:
        Path("train.py").write_text(text)
        code = main(["prove", "train.py", *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def looped(line: str = "") -> str:
    return HEAD + LOOP.format(line=line or "pass")


def test_a_script_that_computes_the_same_on_any_number_of_ranks(proves: Proves, tmp_path: Path) -> None:
    plans = ("--plan", "dp=2", "--plan", "shard=2", "--dtype", "float64")
    code, out, err = proves(EXAMPLE.read_text(), *plans)
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == "plan ranks steps grad loss param optim bound".split()
    assert [row[0] for row in rows[1:3]] == ["dp=2", "shard=2"] and rows[1][-1] == rows[2][-1] == "ok"
    errors = [0.0 if word == "=" else float(word) for row in rows[1:3] for word in row[3:7]]
    assert max(errors) < 1e-12
    script = tmp_path / "train.py"
    assert proven.look_up(script, Plan(dp=8)).word == "proven", "a plan of the same family"
    assert proven.look_up(script, Plan(dp=2, shard=2)).word == "never"
    script.write_text(script.read_text() + "\n# changed\n")
    assert proven.look_up(script, Plan(dp=2)).word == "never"


def test_a_batch_that_is_normalised_by_itself_fails(proves: Proves, tmp_path: Path) -> None:
    code, out, _ = proves(
        looped("a = (a - a.mean(0)) / a.std(0)"), "--json", "--dtype", "float64", "--plan", "dp=2"
    )
    told = json.loads(out)
    (result,) = told["results"]
    assert code == 3 and told["schema_version"] == 1 and told["pass"] is result["pass"] is False
    assert result["plan"] == "dp=2" and result["ranks"] == 2 and result["cause"] in ("forward", "told")
    assert result["max_rel_err"].keys() == {"grad", "loss", "param", "optim"}
    assert result["max_rel_err"]["grad"] > 1e-3 and result["bound"] == 1e-9
    assert result["first_divergence"].startswith("step 1, the gradient of 0.")
    assert proven.look_up(tmp_path / "train.py", Plan(dp=2)).word == "failed"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("optimizer.param_groups[0]['lr'] = F.cross_entropy(model(a), b).item()",
         "refused"),
        ("job.rank == 0 and job.step == 2 and sys.exit(0)", "parted"),
        ("torch.manual_seed(job.rank); a = a + torch.randn_like(a)", "told"),
    ],
)  # fmt: skip
def test_what_a_rank_alone_sees(proves: Proves, line: str, cause: str) -> None:
    wait = "4" if cause == "parted" else "10"  # the other rank waits as long
    code, out, err = proves(looped(line), "--json", "--steps", "8", "--dtype", "float64", "--timeout", wait)
    (result,) = json.loads(out)["results"]
    assert (code, result["cause"]) == (3, cause), (result, err)


def test_ranks_that_part_end_and_are_named_and_leave_nothing(proves: Proves, tmp_path: Path) -> None:
    (tmp_path / (mark := f"mark-{uuid4().hex}")).touch()  # each rank plays in a copy of this folder
    code, out, _ = proves(looped("job.rank == 0 and job.mean(1.0)"), "--timeout", "3")
    assert code == 3 and "FAILS" in out and "(parted)" in out, out
    assert not list(Path(tempfile.gettempdir()).glob(f"unisono-*/**/{mark}"))


def test_a_script_that_raises(proves: Proves) -> None:
    code, _, err = proves(looped("raise ValueError('mine')"))
    assert code == 1 and "error U-R01  ValueError: mine" in err and "train.py:" in err
    code, out, _ = proves(looped("assert job.world == 1"))
    assert code == 1 and "FAILS" in out and "(raised)" in out and "AssertionError" in out
    code, _, err = proves(HEAD + "sys.exit('no data')\n")
    assert code == 1 and "the script left with 'no data'" in err


@pytest.mark.parametrize(
    ("text", "flags", "code", "says"),
    [
        ("print('nothing')\n", [], "V05", "never calls unisono.init"),
        ("import unisono\nunisono.init()\n", [], "V05", "never calls job.prepare"),
        (HEAD, ["--plan", "dp=2 tp=2"], "J01", "tp=2"),
        (HEAD, ["--plan", "dp=1"], "C04", "nothing to be compared"),
        (HEAD, ["--plan", "dp=-1"], "C04", "nothing to be compared"),
        (HEAD, ["--steps", "0"], "C04", "at least one"),
    ],
)
def test_what_cannot_be_proven(proves: Proves, text: str, flags: list[str], code: str, says: str) -> None:
    got, _, err = proves(text, *flags)
    assert got == 2 and f"error U-{code}" in err and says in err, err


def test_a_script_that_is_not_there() -> None:
    assert main(["prove", "other.py"]) == 2


def test_a_script_is_run_as_python_runs_it_and_leaves_nothing(proves: Proves, tmp_path: Path) -> None:
    """Its arguments, its guard, modules and files of its folder; what it writes there goes."""
    (tmp_path / "mine.py").write_text("def line(text):\n    return text.upper()\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("one\n")
    (tmp_path / "log.txt").write_text("before\n")
    own = """\
import mine
assert sys.argv[1:] == ["--lr", "3"] and __name__ == "__main__"
assert mine.line(Path("data/words.txt").read_text()) == "ONE\\n"
Path("log.txt").write_text("after")
Path("data/new.txt").write_text("new")
Path("model.pt").write_text("weights")
"""
    code, _, err = proves(
        HEAD.replace("job =", own + "job =") + LOOP.format(line="pass") + "sys.exit(0)\n", "--", "--lr", "3"
    )
    assert code == 0, err
    assert (tmp_path / "log.txt").read_text() == "before\n"
    left = sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "pycache" not in str(path)
    )
    assert left == [
        ".unisono",
        ".unisono/proven.json",
        "data",
        "data/words.txt",
        "log.txt",
        "mine.py",
        "train.py",
    ]
    script = tmp_path / "train.py"
    assert proven.look_up(script, Plan(dp=2)).word == "proven"
    (tmp_path / "mine.py").write_text("line = str.upper\n")
    assert proven.look_up(script, Plan(dp=2)).word == "never", "a module of its folder is another"


def test_a_verdict_that_cannot_be_kept_harms_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    (tmp_path / ".unisono").write_text("a file")
    assert proven.keep(script, [], {Plan(dp=2): (True, 3)}) is None
    assert proven.look_up(script, Plan(dp=2)).word == "never"
    (tmp_path / ".unisono").unlink()
    for damaged in ("{", "[]", '{"scripts": 3}'):
        place = tmp_path / proven.PLACE
        place.parent.mkdir(exist_ok=True)
        place.write_text(damaged)
        assert proven.look_up(script, Plan(dp=2)).word == "never"


def test_dry_run_plays_nothing(proves: Proves) -> None:
    told: Any = json.loads(proves("raise", "--dry-run", "--json", "--plan", "dp=2")[1])
    assert told["dry_run"] and told["plans"] == ["dp=2"]
