"""Words of other programs lead to ours, wherever they are written; none of ours is among them."""

import pytest

from unisono.cli import main
from unisono.config.fields import keys
from unisono.plan.grammar import KEYS
from unisono.spec.elsewhere import _ANSWERS, _REMEDIES, remedy_for
from unisono.verbs import VERBS


def test_a_word_has_one_answer_whatever_it_is_written_with() -> None:
    words = [word for row in _ANSWERS.values() for word in row.split()]
    assert sorted(words) == sorted(set(words))
    assert remedy_for("--nproc-per-node=4") == remedy_for("launch.NPROC_PER_NODE") != ""
    assert remedy_for("nonsense") == ""


def test_no_key_of_ours_is_taken_for_another_programs() -> None:
    assert not {key for key in keys() if key in _REMEDIES}
    assert not {key for key in KEYS if key in _REMEDIES} - {"precision", "zero"}


def test_remedies_name_keys_and_plans_that_there_are() -> None:
    import re

    from unisono.plan import Plan

    for remedy in _ANSWERS:
        for key in re.findall(r"\b(?:model|data|train|launch|out)\.\w+", remedy):
            assert key in keys(), remedy
        for plan in re.findall(r'--plan "([^"]*)"', remedy):
            Plan.parse(plan)


# Words behind `unisono train --dry-run`, and what the error block must hold.
FLAGS = {
    "--lr 0.1": "did you mean --train.lr?",
    "--gpus 2": '--plan "dp=4"',
    "--nproc-per-node 2": '--plan "dp=4"',
    "--verbose": "--quiet",
    "-c r.toml": "unisono train FILE.toml",
    "--output x": "--out.dir",
    "--dp 2": '--plan "dp=2"',
    "--tp=4": '--plan "tp=4"',
    "--stpes 3": "did you mean --train.steps?",
    "--dry-rn": "did you mean --dry-run?",
    "--train.epochs 3": "train.global_batch",
    "--train.gradient_accumulation_steps 4": "micros=4",
    "--out.track neptune": "FILE.py:NAME",
    "--plan ddp": '--plan "dp=4"',
    "--plan precision=fp8": "bf16:fp8",
    "--plan world=2": '--plan "dp=4"',
    "--hosts localhost:0": "a,b:4",
    "--hosts localhost,-oProxyCommand=x": "is no host",
    "--chaos explode:who=1": "no fault is called explode",
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_slip_on_the_command_line_is_answered_with_its_remedy(
    words: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["train", "--demo", "--dry-run", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error U-") and FLAGS[words] in said


# The text of a recipe, and what must be said of it.
RECIPES = {
    '{"name": "x"}': "this is JSON",
    "name: x": "this is YAML: TOML writes name = x",
    "train:\n  steps: 3": "this is YAML",
    "[train]\ntrain.steps = 3": "inside [train] keys stand without its name",
    "[plan]\ndp = 2\ntp = 2": 'plan = "dp=2 tp=2"',
    "[optimizer]\nlr = 1": "unknown section [optimizer]",
}


@pytest.mark.parametrize("text", RECIPES)
def test_a_file_in_another_programs_shape_is_told_so(
    text: str, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "r.toml").write_text(text)
    assert main(["config", "check", str(tmp_path / "r.toml")]) == 2
    assert RECIPES[text] in capsys.readouterr().err


def test_the_mark_that_editors_put_before_a_text_is_no_part_of_it(
    tmp_path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "r.toml").write_text('name = "x"\n', encoding="utf-8-sig")
    assert main(["config", "check", str(tmp_path / "r.toml")]) == 0


def test_words_without_effect_are_told(capsys: pytest.CaptureFixture) -> None:
    words = "dp=2 schedule=zbv zero=2 cp_kind=ulysses"
    assert main(["config", "check", "--plan", words]) == 0
    said = capsys.readouterr().err
    for word, axis in (("schedule=zbv", "pp"), ("zero=2", "shard"), ("cp_kind=ulysses", "cp")):
        assert f"note  {word} says nothing with {axis}=1" in said


def test_help_and_version_in_the_places_where_others_have_them(capsys: pytest.CaptureFixture) -> None:
    assert main(["-V"]) == main(["version"]) == 0
    assert capsys.readouterr().out.count("unisono ") == 2
    assert main(["help"]) == 0 and "usage: unisono VERB" in capsys.readouterr().out
    for name in VERBS.names():
        assert main(["help", name]) == 0
        assert f"usage: unisono {name}" in capsys.readouterr().out


def test_a_recipe_where_a_run_is_wanted_is_told_apart(tmp_path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "r.toml").write_text('name = "x"\n')
    for words in (["sample"], ["report"], ["export", "--to", "hf"], ["train", "--resume"]):
        assert main([*words, str(tmp_path / "r.toml")]) == 2
        assert "is a file, not the folder of a run" in capsys.readouterr().err


def test_plans_of_a_list_that_cannot_be_played_are_rows_of_their_own(capsys: pytest.CaptureFixture) -> None:
    plans = [word for plan in ("tp=2", "dp=2 sync=ssp codec=int8", "tp=99") for word in ("--plan", plan)]
    assert main(["verify", "--demo", "--dry-run", *plans]) == 0
    said = capsys.readouterr().out
    assert "would verify  tp=2" in said or "would verify  micros" in said
    assert said.count("refused: U-P16") == said.count("refused: U-P12") == 1
    assert main(["verify", "--demo", "--dry-run", "--plan", "tp=99"]) == 2
