"""What runs on a source count."""

import pytest

from unisono.config import DataConfig, ModelConfig, Recipe, resolve
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.spec.source import SOURCES, counted_in


@pytest.mark.parametrize(
    ("source", "unit"),
    [
        ("stdlib", "tokens"),
        ("text:books/*.txt", "tokens"),
        ("mixture:0.7*text:a + 0.3*jsonl:b", "tokens"),
        ("digits", "samples"),
        ("images:photos", "samples"),
        ("mine.py:Own", "tokens"),
    ],
)
def test_text_is_counted_in_tokens_and_all_else_in_samples(source: str, unit: str) -> None:
    assert counted_in(source) == unit


@pytest.mark.parametrize(
    ("source", "option", "meant"),
    [
        ("tar:/none/{0..3}.tar,kid=text", "kid", "kind"),
        ("tar:/none/{0..3}.tar,kind=text,patence=3", "patence", "patience"),
        ("s3://bucket/0.tar,kimd=text", "kimd", "kind"),
        ("mds:s3://bucket/folder,lable=y,kind=pictures", "lable", "label"),
        ("jsonl:/none/chats.jsonl:messags=turns", "messags", "messages"),
        ("jsonl:/none/chats.jsonl,straem=true", "straem", "stream"),
    ],
)
def test_a_misspelt_option_behind_a_path_is_no_part_of_it(source: str, option: str, meant: str) -> None:
    with pytest.raises(UsageError) as refused:
        SOURCES.read(source)
    assert refused.value.code == "C06"
    assert f"takes no option {option}; did you mean {meant}?" in refused.value.what


@pytest.mark.parametrize(
    "path", ["s3://bucket/lr=3,date=2024/{0..3}.tar", "/none/a,step=1/0.tar", "/none/a:b/0.tar"]
)
def test_what_looks_like_no_option_stays_in_the_path(path: str) -> None:
    source = SOURCES.read(path if path.startswith("s3:") else f"tar:{path}")
    assert source.model_dump()["path"] == path.removeprefix("s3:")


@pytest.mark.parametrize("source", ["tar:/none/{0..3}.tar", "mds:/none", "s3://bucket/{0..3}.tar"])
def test_a_model_of_tokens_is_offered_the_option_that_makes_shards_text(source: str) -> None:
    recipe = Recipe(data=DataConfig(source=source), model=ModelConfig())
    with pytest.raises(ConfigProblems) as refused:
        resolve(recipe, "dp=1", 1)
    (problem,) = refused.value.problems
    assert problem.code == "C06" and "kind=text behind data.source" in problem.fix
