"""`unisono sweep FILE`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import Interrupted, Stopped, UserCodeError
from unisono.spec.settings import Settings
from unisono.verbs import CommandCall, Parser, Result, Verb

if TYPE_CHECKING:
    from unisono_contrib.sweep.spec import SweepSpec


class SweepVerb(Verb):
    """Search over values of a recipe: many runs side by side, the best recipe written out.

    FILE has a section [sweep] that names the recipe, the method and the space. The same command again goes on with a
    sweep that was stopped or killed, and repeats no trial that has ended.
    """

    name = "sweep"
    epilog = (
        "unisono sweep lr.toml --train.steps 200         keys of the recipe are set in all trials\n"
        "unisono sweep lr.toml --method asha --trials 32 --workers 4\n"
        "unisono sweep lr.toml --on ray"
    )

    def flags(self, parser: Parser) -> None:
        parser.add_argument("file", metavar="FILE", help="the sweep's file, FILE.toml")
        parser.add_argument("--method", metavar="M", help="grid, random, tpe, asha, pbt, lr_range or batch")
        parser.add_argument("--trials", type=int, metavar="N", help="how many runs")
        parser.add_argument("--workers", type=int, metavar="N", help="trials at a time")
        parser.add_argument("--on", metavar="PLACE", default="local", help="local or ray (local)")
        parser.add_argument("--out", metavar="FOLDER", help="the sweep's folder (runs/NAME, by FILE's name)")

    def read(self, words: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> CommandCall:
        from unisono.config import split_flags
        from unisono.config.fields import keys as all_keys
        from unisono.plan.grammar import KEYS

        keys, rest = split_flags(words, top=("seed", "plan"))
        parser = self.parser()
        parser.recipe_keys, parser.plan_words = all_keys(), KEYS
        return CommandCall(settings, parser.read(rest), environ, keys)

    def run(self, call: CommandCall) -> Result:
        from unisono.launch.signals import StartupSignals
        from unisono_contrib.sweep import spec as sweep_spec

        args = call.args
        changed = {"method": args.method, "trials": args.trials, "workers": args.workers}
        spec = sweep_spec.read(Path(args.file), call.keys, call.environ, **changed)
        folder = Path(args.out) if args.out else Path(spec.base.recipe.out.dir, Path(args.file).stem)
        with StartupSignals():
            return _searched(call, spec, folder)


def _searched(call: CommandCall, spec: "SweepSpec", folder: Path) -> Result:
    from unisono.train.state.writing import writing
    from unisono_contrib.sweep import journal, page, result, schedule
    from unisono_contrib.sweep.places import PLACES
    from unisono_contrib.sweep.room import machine, need_of
    from unisono_contrib.sweep.space import drawn

    place, room = PLACES.find(call.args.on)(), machine(call.environ)
    need = need_of(spec.loaded(drawn(spec.space, spec.config.seed, 0)), room)
    workers = spec.config.workers or max(
        1, (len(room.gpus) // need.gpus) if need.gpus else room.cores // need.cores
    )
    if call.settings.dry_run:
        trials = spec.method.count(spec.progress)
        facts = {"sweep": str(folder), "method": spec.method.name, "trials": trials, "workers": workers}
        space = [f"{key}  {dimension}" for key, dimension in spec.space.items()]
        return call.would(facts, f"would search {folder}, {trials} trials, {workers} at a time", *space)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with journal.locked(folder):
            journal.held_to(folder, spec.identity())
            log = journal.SweepJournal(folder)
            sweep = schedule.Sweep(
                spec, folder, room, workers, call.settings.note, schedule.begun(spec, folder), log
            )
            _goes_on(call, sweep)
            try:
                progress = sweep.run(place)
            except (KeyboardInterrupt, Stopped) as error:
                raise _stopped(error, call, folder) from None
            finally:
                log.close()
            lines = journal.lines(folder)
            conclusion = spec.method.conclude(progress)
            facts = result.facts(spec, folder, progress, lines, conclusion)
            best = result.write_best(spec, folder, conclusion)
            files = [
                *page.write(progress, lines, facts, folder, spec.method.charts(progress)),
                *([best] if best is not None else []),
            ]
    return _said(call, facts, [*result.said(progress, spec.config.metric), *conclusion.said[:-1]], files)


def _goes_on(call: CommandCall, sweep: Any) -> None:
    ended = sum(trial.state != "open" for trial in sweep.progress.trials)
    if sweep.progress.trials:
        call.settings.note(f"note  going on with {sweep.folder}: {ended} trials have ended")


def _stopped(error: BaseException, call: CommandCall, folder: Path) -> BaseException:
    kind = Interrupted if isinstance(error, KeyboardInterrupt) else Stopped
    return kind(f"the sweep {folder} was stopped as asked; its trials are saved", fix=call.settings.command)


def _said(call: CommandCall, facts: dict[str, Any], lines: Sequence[str], files: Sequence[Path]) -> Result:
    from unisono_contrib.sweep.page import headlines

    for line in (*headlines(facts), *lines, *(str(file) for file in files)):
        call.settings.say(line)
    if facts["best"] is None:
        why = next((row["why"] for row in facts["trials"] if row["why"]), "")
        raise UserCodeError(
            f"no trial of the sweep {facts['sweep']} came to a value", likely=why, code="R04",
            fix=f"read {facts['sweep']}/trial-000/log.txt; or sweep.metric with another name",
        )  # fmt: skip
    return {**facts, "files": [str(file) for file in files]}
