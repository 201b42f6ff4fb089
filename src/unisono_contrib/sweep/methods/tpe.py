"""Optuna's tree-structured Parzen estimator (Bergstra et al., Algorithms for hyper-parameter optimization, 2011)."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from unisono.spec.errors import UsageError
from unisono_contrib.sweep.methods import SearchMethod
from unisono_contrib.sweep.progress import State, SweepProgress, Trial
from unisono_contrib.sweep.space import Dimension, OneOf, Params

STUDY = "optuna.journal"
"""Optuna's own storage in the sweep's folder, which its dashboard reads."""


class ParzenEstimator(SearchMethod):
    """Values where good trials are dense and bad ones are rare; needs optuna."""

    name: ClassVar[str] = "tpe"

    startup: int = Field(default=10, ge=1, description="trials drawn at random before the estimate is used")

    def misfit(self, progress: SweepProgress) -> str:
        _optuna()
        return ""

    def propose(self, progress: SweepProgress, folder: Path) -> Params:
        optuna, number = _optuna(), len(progress.trials)
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=self.startup, constant_liar=True, seed=progress.seed * 100_003 + number
        )
        study = _study(folder, progress, sampler)
        said = {key: _distribution(optuna, dimension) for key, dimension in progress.space.items()}
        known = study.get_trials(deepcopy=False)
        if len(known) > number:  # asked for, and the sweep was killed before it began
            return _plain(progress, known[number].params)
        return _plain(progress, study.ask(said).params)


def _optuna() -> Any:
    """The library, imported late. Raises UsageError E01 without it."""
    try:
        import optuna  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            "method tpe needs optuna, which is not installed", where="sweep.method", code="E01",
            fix='pip install "unisono[sweep]"; method = "random" and "asha" do without',
        ) from error  # fmt: skip
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(folder: Path, progress: SweepProgress, sampler: Any) -> Any:
    """Optuna's study in the sweep's folder, which hears how trials have ended since it was asked last. Its trials have
    our numbers: they are asked for in this order, by the one process that holds the sweep."""
    from optuna.storages import JournalStorage  # pyright: ignore[reportMissingImports]
    from optuna.storages.journal import JournalFileBackend  # pyright: ignore[reportMissingImports]

    file = folder / STUDY
    file.with_name(f"{STUDY}.lock").unlink(
        missing_ok=True
    )  # of a sweep that was killed: ours is the only one
    direction = "maximize" if progress.goal == "max" else "minimize"
    study = _optuna().create_study(
        study_name="sweep", storage=JournalStorage(JournalFileBackend(str(file))), sampler=sampler,
        direction=direction, load_if_exists=True,
    )  # fmt: skip
    for known in study.get_trials(deepcopy=False):
        if known.number >= len(progress.trials):
            break
        if not known.state.is_finished():
            _tell(study, known, progress.trials[known.number])
    return study


def _tell(study: Any, known: Any, trial: Trial) -> None:
    """Tell Optuna of a trial that has a value: of one that is not over the first, which all of its rung have."""
    from optuna.trial import Trial as OptunaTrial  # pyright: ignore[reportMissingImports]
    from optuna.trial import TrialState  # pyright: ignore[reportMissingImports]

    if trial.state is State.OPEN and not trial.values:
        return
    step, value = trial.values[0] if trial.values else (0, None)
    if trial.state is State.FAILED or value is None:
        study.tell(trial.number, state=TrialState.FAIL)
    elif trial.state is State.DONE:
        study.tell(trial.number, trial.value)
    else:
        OptunaTrial(study, known._trial_id).report(value, step)
        study.tell(trial.number, state=TrialState.PRUNED)


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if isinstance(dimension, OneOf):  # by place: a list of a recipe is no value for Optuna
        return kinds.CategoricalDistribution(tuple(range(len(dimension.values))))
    if dimension.whole:
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _plain(progress: SweepProgress, params: Any) -> Params:
    """Optuna's values as the recipe's, in the space's order."""
    return {
        key: dimension.values[params[key]] if isinstance(dimension, OneOf) else params[key]
        for key, dimension in progress.space.items()
    }
