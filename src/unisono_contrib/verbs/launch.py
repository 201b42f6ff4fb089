"""`unisono launch slurm|k8s|ray|ssh FILE`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import UsageError
from unisono.spec.finder import names_in
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, loaded

if TYPE_CHECKING:
    from unisono_contrib.submit import Submitter
    from unisono_contrib.submit.job import JobFile, JobRequest

RECORD = "job.json"
"""In a job's folder: what was submitted, by which its state is asked."""


class LaunchVerb(RecipeVerb):
    """Start a run by a scheduler: write its job's files, and submit them.

    The sections [job], [slurm], [k8s] and [network] of the recipe say what is particular to the site. Cores, memory and
    GPUs follow from the plan. --dry-run prints the files on stdout and submits nothing. A job that has saved (exit 75)
    is started again and goes on with its run.
    """

    name = "launch"
    epilog = (
        "unisono launch slurm my.toml --dry-run                      the batch script\n"
        "unisono launch slurm my.toml --each train.lr=1e-3,3e-4      an array of two runs\n"
        "unisono launch k8s my.toml --kind jobset --dry-run | kubectl apply -f -\n"
        "unisono launch ssh my.toml --hosts 'node[01-04]'\n"
        "unisono launch slurm my.toml --state                        where the submitted job is"
    )

    def flags(self, parser: Parser) -> None:
        names = " | ".join(names_in("unisono_contrib.submit.schedulers"))
        parser.add_argument("scheduler", metavar="SCHEDULER", help=names)
        super().flags(parser)
        parser.add_argument("--kind", metavar="K", help="k8s: job, jobset, trainjob or pytorchjob (k8s.kind)")
        parser.add_argument("--hosts", metavar="LIST", help="ssh: the hosts, the first one leads (job.hosts)")
        parser.add_argument(
            "--each", metavar="KEY=A,B", action="append", default=[],
            help="one run for each value of a key, as an array; repeated: for each combination",
        )  # fmt: skip
        parser.add_argument("--to", metavar="FOLDER", help="folder of the job's files (jobs/NAME-SCHEDULER)")
        parser.add_argument("--state", action="store_true", help="say where the job is that was submitted")

    def run(self, call: CommandCall) -> Result:
        from unisono_contrib.submit import SUBMITTERS
        from unisono_contrib.submit.job import job_of

        args = call.args
        scheduler = SUBMITTERS.find(args.scheduler)()
        if args.file is None and not args.demo:
            raise UsageError("nothing says what to train", where="unisono launch",
                             fix=f"unisono launch {args.scheduler} FILE", code="C04")  # fmt: skip
        keys = [(key, value) for key, value in (("k8s.kind", args.kind), ("job.hosts", args.hosts)) if value]
        runs = list(_values(args.each))
        if len(runs) > 1 and not scheduler.arrays:
            raise UsageError(f"{scheduler.name} has no arrays of runs", where="--each", code="C04",
                             fix="unisono launch slurm or k8s; unisono sweep FILE")  # fmt: skip
        base = loaded(call, args.file, keys=keys, demo=args.demo)
        name = base.recipe.name
        names = [[("name", f"{name}-{number}")] if len(runs) > 1 else [] for number in range(len(runs))]
        recipes = [
            loaded(call, args.file, keys=[*keys, *values, *named], demo=args.demo)
            for values, named in zip(runs, names, strict=True)
        ]
        folder = Path(args.to or Path("jobs", f"{name}-{scheduler.name}"))
        if args.state:
            return _state(call, scheduler, folder)
        job = job_of(recipes, name)
        files = scheduler.files(job)
        facts = _facts(job, scheduler, folder, files)
        if call.settings.dry_run:
            return call.would(facts, "\n".join(_printed(files)).rstrip("\n"))
        return _submitted(call, scheduler, job, folder, files, facts)


def _values(each: Sequence[str]) -> Iterator[Sequence[tuple[str, str]]]:
    """The keys of each run of an array. Raises UsageError C04."""
    ways: list[list[tuple[str, str]]] = []
    for text in each:
        key, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise UsageError(
                f"--each {text} is no KEY=A,B", where="--each", fix="--each seed=0,1,2", code="C04"
            )
        ways.append([(key, value) for value in values.split(",")])
    return iter(product(*ways))


def _facts(
    job: "JobRequest", scheduler: "Submitter", folder: Path, files: Sequence["JobFile"]
) -> dict[str, Any]:
    need = job.need
    return {
        "scheduler": scheduler.name, "name": job.name, "runs": len(job.recipes), "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "node": {"cores": need.cores, "memory_mib": need.mib, "gpus": need.gpus},
        "folder": str(folder), "files": {file.name: file.text for file in files},
    }  # fmt: skip


def _printed(files: Sequence["JobFile"]) -> Iterator[str]:
    """One file as it is, so that it can be piped on; of several each with its name before it."""
    for file in files:
        if len(files) > 1:
            yield f"==> {file.name} <=="
        yield file.text


def _submitted(
    call: CommandCall, scheduler: "Submitter", job: "JobRequest", folder: Path, files: Sequence["JobFile"],
    facts: Mapping[str, Any],
) -> Result:  # fmt: skip
    from unisono.observe.files import write_whole
    from unisono.train.state.writing import writing

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            write_whole(folder / file.name, file.text)
        number = scheduler.submit(job, folder)
        write_whole(folder / RECORD, json.dumps({"scheduler": scheduler.name, "id": number}) + "\n")
    call.settings.say(f"submitted    {scheduler.name} {number}")
    call.settings.say(f"files        {folder}")
    return {**facts, "id": number}


def _state(call: CommandCall, scheduler: "Submitter", folder: Path) -> Result:
    try:
        record = json.loads((folder / RECORD).read_text())
        number, of = str(record["id"]), record["scheduler"]
    except (OSError, ValueError, KeyError, TypeError):
        number, of = "", ""
    if of != scheduler.name:
        raise UsageError(f"{folder} has no job that was submitted to {scheduler.name}", where="--state",
                         fix="--to FOLDER: where its files are", code="C03")  # fmt: skip
    state = scheduler.state(number, folder)
    call.settings.say(f"{scheduler.name} {number}  {state}")
    return {"scheduler": scheduler.name, "id": number, "state": str(state)}
