"""Errors as users meet them: one exit code a kind, one block, nothing lost on the way to JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.spec import errors
from unisono.spec.errors import ConfigProblems, Problem, UnisonoError, UsageError

EXITS = {
    "UserCodeError": 1, "PeerGone": 1, "UsageError": 2, "VerifyMismatch": 3, "DoctorFault": 4, "Infeasible": 5, "HangError": 6,
    "Stopped": 75, "Skipped": 77, "Interrupted": 130, "ConfigProblems": 2,
}  # fmt: skip
WORDS = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=9)


def test_exit_codes_are_those_of_the_contract():
    kinds = {
        name: kind.exit
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, UnisonoError) and kind is not UnisonoError
    }
    assert kinds == EXITS


@given(what=WORDS, where=WORDS | st.just(""), fix=WORDS | st.just(""), rank=st.none() | st.integers(0, 99))
def test_a_block_says_what_there_is_and_nothing_else(what, where, fix, rank):
    error = UsageError(what, where=where, fix=fix, rank=rank, code="C01")
    head, *rows = error.render().splitlines()
    assert head == f"error U-C01  {what}" + (f", rank {rank}" if rank is not None else "")
    assert rows == [f"  {name:<7} {text}" for name, text in (("where", where), ("try", fix)) if text]
    told = error.as_dict()
    assert (told["code"], told["what"], told["where"], told["try"]) == ("U-C01", what, where, fix)
    assert (told["rank"], told["exit"]) == (rank, 2)


@given(st.lists(st.builds(Problem, code=WORDS, what=WORDS, where=WORDS, fix=WORDS), min_size=1, max_size=5))
def test_several_problems_are_drawn_in_their_order(problems):
    error = ConfigProblems(problems)
    heads = [line for line in error.render().splitlines() if line.startswith("error ")]
    assert heads == [f"error U-{p.code}  {p.what}" for p in problems]
    assert [told["what"] for told in error.as_dict()["problems"]] == [p.what for p in problems]
    assert error.code == problems[0].code


def test_problems_of_a_file_are_drawn_in_the_order_of_its_lines():
    at = ["a.toml:10", "flag --plan", "plan.tp (a.toml:9), model.n_head (a.toml:2)", "a.toml:10", "a.toml:3"]
    drawn = ConfigProblems([Problem("C01", str(i), where) for i, where in enumerate(at)]).render()
    assert [line[-1] for line in drawn.splitlines() if line.startswith("error ")] == ["4", "2", "0", "3", "1"]


def test_an_error_can_be_raised_and_caught_by_its_kind():
    with pytest.raises(UnisonoError, match="no such plan"):
        raise UsageError("no such plan")
