"""Tasks of EleutherAI's lm-evaluation-harness on a run's model (Gao et al. 2024, zenodo.org/records/12608602).

model = HarnessModel(text_scorer(run_dir))         # an lm_eval.api.model.LM, for a program of one's own
evaluate_tasks(run_dir, ["arc_easy"])              # what `unisono evaluate RUN --lm-eval arc_easy` does
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.train.export import checkpoint_of
from unisono.train.sample import load_text_model
from unisono.train.state.checkpoint.find import step_of
from unisono_contrib.train.text_scores import TextScorer, stops_of

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise UsageError(
        f"lm-evaluation-harness cannot be imported ({missing})",
        where="--lm-eval",
        fix="pip install 'unisono[lm-eval]'",
        code="J20",
    ) from missing

_MOST = 256  # tokens of an answer where a task names no number, as in the harness
_GENERATES = {"until", "max_gen_toks", "do_sample", "temperature"}


class HarnessModel(LM):
    """A run's model as the harness sees it: text in, log-likelihoods in nats or text out."""

    def __init__(self, scorer: TextScorer) -> None:
        super().__init__()
        self.scorer = scorer

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Score each request's (context, continuation)."""
        return self.scorer.continuations([request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Score each request's whole text."""
        return self.scorer.whole([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continue each request's context. Raises UsageError C04 for an option that the model does not have."""
        return [self._go_on(*request.args) for request in requests]

    def _go_on(self, context: str, options: dict[str, Any]) -> str:
        if unknown := sorted(options.keys() - _GENERATES):
            raise UsageError(
                f"the task generates with {', '.join(unknown)}, which runs do not have", where="generation_kwargs",
                fix=f"a task with {', '.join(sorted(_GENERATES))} alone", code="C04",
            )  # fmt: skip
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        return self.scorer.go_on(context, stops_of(options), options.get("max_gen_toks", _MOST), temperature)


def text_scorer(run_dir: Path, checkpoint: Path | None = None) -> TextScorer:
    """The model of a run's checkpoint, the newest if None. Raises UsageError F03, F05, K01."""
    recipe, corpus, model = load_text_model(run_dir, checkpoint or checkpoint_of(run_dir))
    if corpus.encode is None or corpus.decode is None:  # the loader has refused it
        raise TypeError("no text")
    for mark in (recipe.data.separator, "\n", " "):  # what stands before a text in the data
        try:
            start = list(corpus.encode(mark))[-1:]
        except (KeyError, ValueError, UsageError):
            continue
        if start:
            return TextScorer(model, recipe.model.window, corpus.encode, corpus.decode, start, recipe.seed)
    raise UsageError(
        "the run's tokenizer has neither a line's end nor a space to begin a text with", where=str(run_dir),
        fix="a run on text", code="F05",
    )  # fmt: skip


def evaluate_tasks(
    run_dir: Path,
    tasks: Sequence[str],
    which: str = "latest",
    folder: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """{"checkpoint", "step", "tasks": {task: {metric: number}}}. which: latest or best.

    folder: with tasks of your own (YAML), beside the harness's. shots: examples before each question; the task's own
    number if None. limit: samples of each task. Raises UsageError: C04 for an unknown task, F03, F05.
    """
    checkpoint = checkpoint_of(run_dir, which)
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UsageError(
            f"no task {', '.join(unknown)}", where="--lm-eval", code="C04",
            fix="lm_eval ls tasks lists those of the harness; --lm-eval-tasks DIR has yours",
        )  # fmt: skip
    said: Any = simple_evaluate(
        model=HarnessModel(text_scorer(run_dir, checkpoint)), tasks=list(tasks), num_fewshot=shots, limit=limit,
        task_manager=manager, log_samples=False, bootstrap_iters=0,
    )  # fmt: skip
    numbers = {
        task: {
            metric.removesuffix(",none"): float(value)
            for metric, value in values.items()
            if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
        }
        for task, values in said["results"].items()
    }
    return {"checkpoint": str(checkpoint), "step": step_of(checkpoint), "tasks": numbers}
