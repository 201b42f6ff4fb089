"""Scores of text by a tiny model, beside direct computation, and the harness's adapter on a fake and on the real one."""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from unisono import DataConfig, ModelConfig, Recipe
from unisono.spec.errors import UsageError
from unisono.train.build.build import model_of
from unisono.train.data.load import load
from unisono_contrib.train.text_scores import TextScorer, stops_of

WINDOW = 8


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> TextScorer:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the cat sat on the mat.\n" * 40)
    data = DataConfig(source=f"text:{file}", tokenizer="char")
    recipe = Recipe(model=ModelConfig(context=WINDOW, d_model=16, n_head=2, n_layer=2), data=data)
    corpus = load(recipe.data, recipe.model)
    model = model_of(recipe, corpus).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.7, generator=generator)  # far from uniform
    return TextScorer(model, WINDOW, corpus.encode, corpus.decode, corpus.encode("\n"))


def by_hand(scorer: TextScorer, row: list[int], scored: int) -> tuple[float, bool]:
    """One token after the other, each with the context of a sliding window; only for rows that fit."""
    total, likeliest = 0.0, True
    for at in range(len(row) - scored, len(row)):
        with torch.no_grad():
            chances = scorer.model(torch.tensor([row[:at]]))[0, -1].double().log_softmax(-1)
        total += chances[row[at]].item()
        likeliest &= int(chances.argmax()) == row[at]
    return total, likeliest


def test_continuations_are_scored_as_by_hand(scorer: TextScorer) -> None:
    pairs = [("the", " cat"), ("a", "t"), ("", "mat."), ("the ", "cat"), ("on", " the m"), ("c", "at")]
    for (context, text), (score, likeliest) in zip(pairs, scorer.continuations(pairs), strict=True):
        head = len(context.rstrip(" "))
        row = [*([] if head else scorer.start), *scorer.encode(context + text)]
        want, top = by_hand(scorer, row, len(context + text) - head)
        assert score == pytest.approx(want, rel=1e-5) and likeliest == top
    assert len({round(score, 6) for score, _ in scorer.continuations(pairs)}) > 3


def test_the_likeliest_continuation_is_known_as_such(scorer: TextScorer) -> None:
    text = scorer.go_on("the", [], 4)
    ((_, likeliest),) = scorer.continuations([("the", text)])
    assert likeliest and len(text) == 4
    other = "".join("t" if letter != "t" else "a" for letter in text)
    assert scorer.continuations([("the", other)])[0][1] is False


def test_a_long_context_loses_its_beginning(scorer: TextScorer) -> None:
    long, short = "on the mat. the cat sa", "the cat sa"[-WINDOW:]
    (a, b) = scorer.continuations([(long, "t"), (short, "t")])
    assert a[0] == pytest.approx(b[0], rel=1e-6)


def test_a_text_of_many_windows_counts_each_token_once(scorer: TextScorer) -> None:
    text = "the cat sat on the mat"  # 22 tokens: windows of 8, 8 and 6
    row = [*scorer.start, *scorer.encode(text)]
    parts = [by_hand(scorer, row[:9], 8), by_hand(scorer, row[8:17], 8), by_hand(scorer, row[14:23], 6)]
    (whole,) = scorer.whole([text])
    assert whole == pytest.approx(sum(score for score, _ in parts), rel=1e-5)
    assert scorer.whole(["the", text])[1] == pytest.approx(whole, rel=1e-6)


def test_generation_ends_before_a_stop_and_at_the_most(scorer: TextScorer) -> None:
    free = scorer.go_on("the c", [], 6)
    assert len(free) == 6
    assert scorer.go_on("the c", [free[2:4]], 6) == free[: free.find(free[2:4])]
    drawn = {TextScorer(**{k: getattr(scorer, k) for k in ("model", "window", "encode", "decode", "start")}, seed=s)
             .go_on("the", [], 8, 5.0) for s in range(4)}  # fmt: skip
    assert len(drawn) > 1 and scorer.go_on("the", [], 8, 5.0) == scorer.go_on("the", [], 8, 5.0)
    assert (stops_of({"until": "a"}), stops_of({"until": ["a", "b"]}), stops_of({})) == (
        ["a"],
        ["a", "b"],
        [],
    )


def test_text_without_tokens_is_refused(scorer: TextScorer) -> None:
    with pytest.raises(UsageError, match="'Ж' does not occur in the training text"):
        scorer.whole(["Ж"])


def test_the_adapter_answers_what_the_harness_asks(
    scorer: TextScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the harness only the base class, so that it runs without."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.evaluator", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = type("LM", (), {})  # type: ignore[attr-defined]
    sys.modules["lm_eval.tasks"].TaskManager = object  # type: ignore[attr-defined]
    sys.modules["lm_eval.evaluator"].simple_evaluate = None  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "unisono_contrib.train.harness", raising=False)
    harness = importlib.import_module("unisono_contrib.train.harness")
    monkeypatch.delitem(sys.modules, "unisono_contrib.train.harness")
    model = harness.HarnessModel(scorer)
    ask = lambda *args: [SimpleNamespace(args=args)]
    assert model.loglikelihood(ask("the", " cat")) == scorer.continuations([("the", " cat")])
    assert model.loglikelihood_rolling(ask("the cat")) == scorer.whole(["the cat"])
    options = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0}
    assert model.generate_until(ask("the", options)) == [scorer.go_on("the", ["\n"], 5)]
    with pytest.raises(UsageError, match="num_beams"):
        model.generate_until(ask("the", {"num_beams": 4}))


TASK = """
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "the "
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="needs lm_eval: no task was evaluated")
def test_a_run_on_a_task_of_ones_own(tmp_path: Path) -> None:
    from tests.forked import Forked

    (tmp_path / "text.txt").write_text("the cat sat on the mat.\n" * 200)
    rows = [{"choices": ["cat", "tac"], "label": 0}, {"choices": ["tam", "mat"], "label": 1},
            {"choices": ["mat", "s.o"], "label": 1}]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "animals.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))
    (tmp_path / "r.toml").write_text(
        'name = "cat"\n[model]\ncontext = 16\nd_model = 32\nn_head = 2\nn_layer = 2\n[data]\n'
        'source = "text:text.txt"\n[train]\nsteps = 60\nglobal_batch = 8\nlr = 0.01\n'
    )
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    train = Forked(["-m", "unisono", "train", "r.toml", "--json"], tmp_path, environ)
    error_lines = train.stderr.read()
    assert train.wait(120) == 0, error_lines
    run = json.loads(train.stdout.read())["run_dir"]
    words = ["-m", "unisono", "evaluate", run, "--lm-eval", "animals", "--lm-eval-tasks", ".", "--json"]
    evaluate = Forked(words, tmp_path, environ)
    out, error_lines = evaluate.stdout.read(), evaluate.stderr.read()
    assert evaluate.wait(200) == 0, error_lines
    said = json.loads(out)
    assert said["step"] == 60 and said["tasks"]["animals"]["acc"] == pytest.approx(2 / 3)
    unknown = Forked([*words[:4], "--lm-eval", "plants", *words[6:]], tmp_path, environ)
    assert unknown.wait(200) == 2 and "no task plants" in unknown.stderr.read()
