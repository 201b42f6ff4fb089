"""Proving plans: play each beside one device, on ranks forked from one import of torch. No torch on this side."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.config import Recipe, Resolved, resolve
from unisono.launch.fork_server import ForkServer, print_output
from unisono.plan import Plan
from unisono.plan.fidelity import beside_like, fidelity_of, needs_like_threads, with_sections
from unisono.plan.grammar import member
from unisono.spec.errors import UnisonoError, UsageError
from unisono.spec.fidelity import Fidelity
from unisono.verify.bounds import lag_of, rhythm_of

ENTRY = "unisono.verify.prover_rank:main"
KINDS = ("loss", "grad", "param", "optim")


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of proving one plan.

    max_rel_err: per kind of tensor, the largest error over its tensor's largest entry, over all steps. bound: that of
    gradients. cause: a name in `docs/proof.md`, explanation: one sentence; None where all is right. verdict: proven,
    wrong, or unproven, where nothing wrong was found and the bound is so wide that this shows nothing. notes: what the
    user should know besides.
    """

    plan: str
    ranks: int
    fidelity: str
    bound: float
    bit_identical: bool
    max_rel_err: dict[str, float]
    passed: bool
    first_divergence: str | None
    cause: str | None = None
    explanation: str | None = None
    verdict: str = "proven"
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        """The contract's object."""
        return {"pass" if key == "passed" else key: value for key, value in asdict(self).items()}


@dataclass(slots=True)
class _Work:
    """One plan on its way. mark: passed on to the ranks."""

    number: int
    resolved: Resolved
    folder: Path
    reference: Path
    mark: str
    result: dict[str, Any] = field(default_factory=dict)
    error: UnisonoError | None = None


def prove(
    recipe: Recipe,
    plans: Sequence[Plan],
    steps: int,
    each: Callable[[Proof], None] = lambda proof: None,
    backend: str = "auto",
    keep_going: bool = False,
    shelf: Path | None = None,
) -> list[Proof]:
    """Prove plans; results in their order, in which `each` hears of them too, as soon as those before are there.

    All processes compute with one thread: sums depend on the number of threads. Plans with equally many ranks follow
    each other on the same processes. keep_going: a plan that raises is a proof that failed, and the others still run;
    else what a rank raised is raised. shelf: folder that gets the compared steps as whole tensors, for other engines:
    `one-N` for each one device, `plan-N` for each plan.
    """
    with ForkServer(ENTRY) as server:
        return prove_on(server, recipe, plans, steps, each, backend, keep_going, shelf=shelf)


def prove_on(
    server: ForkServer,
    recipe: Recipe,
    plans: Sequence[Plan],
    steps: int,
    each: Callable[[Proof], None] = lambda proof: None,
    backend: str = "auto",
    keep_going: bool = False,
    marks: Sequence[str] = (),
    shelf: Path | None = None,
) -> list[Proof]:
    """Do as `prove` with a fork server, which serves several recipes, one after the other. marks: one for each plan,
    which its ranks are given."""
    for plan in plans:
        if reason := _beyond_steps(plan):
            raise UsageError(reason, where=f"{plan}", fix=_beyond_steps_fix(plan), code="V04")
    root = Path(tempfile.mkdtemp(prefix="unisono-verify-"))
    try:
        return _Prover(server, backend, keep_going, steps, root, each, shelf).prove(recipe, plans, marks)
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Prover:
    def __init__(
        self,
        server: ForkServer,
        backend: str,
        keep_going: bool,
        steps: int,
        root: Path,
        each: Callable[[Proof], None],
        shelf: Path | None,
    ) -> None:
        self._shelf = shelf
        self._server, self._backend, self._keep_going = server, backend, keep_going
        self._steps, self._root, self._each = steps, root, each
        self._references: dict[tuple[str, str], Path] = {}
        self._proofs: dict[int, Proof] = {}
        self._reported = 0  # how many of them `each` has heard of
        self._judged: dict[Path, dict[str, Any]] = {}  # what came of each reference itself
        self._most = 1  # ranks of the largest plan

    def prove(self, recipe: Recipe, plans: Sequence[Plan], marks: Sequence[str]) -> list[Proof]:
        """Prove all plans; return the proofs in the order of the plans."""
        works = [
            self._work(i, resolve(recipe, plan), marks[i] if marks else "", f"plan-{i}")
            for i, plan in enumerate(plans)
        ]
        self._most = max([1, *(work.resolved.plan.world for work in works)])
        self._make_references(works)
        for world in sorted({work.resolved.plan.world for work in works}):
            todo = [work for work in works if work.resolved.plan.world == world]
            self._play(todo)
            for work in [work for work in todo if work.number not in self._proofs]:
                faulty = self._judged[work.reference]["first"] is not None and not work.error
                self._conclude(work, {} if faulty else self._explain(work))
        return [self._proofs[i] for i in range(len(plans))]

    def _work(self, number: int, resolved: Resolved, mark: str, name: str) -> _Work:
        alone = one_device(resolved.plan)
        key = (resolved.recipe.model_copy(update={"plan": ""}).model_dump_json(), str(alone))
        reference = self._references.setdefault(key, self._root / f"one-{len(self._references)}")
        return _Work(number, resolved, self._root / name, reference, mark)

    def _job(self, work: _Work, plan: Plan, folder: Path, **more: Any) -> dict[str, Any]:
        return {
            "id": work.number,
            "recipe": work.resolved.recipe.model_dump_json(exclude_unset=True),
            "plan": str(plan),
            "steps": self._steps,
            "folder": str(folder),
            "reference": str(work.reference),
            "one": str(one_device(work.resolved.plan)),
            "mark": work.mark,
            "shelf": "" if self._shelf is None else str(self._shelf / folder.name),
            **more,
        }

    def _make_references(self, works: Sequence[_Work]) -> None:
        new = {work.reference: work for work in works if not work.reference.exists()}
        jobs = [self._job(work, one_device(work.resolved.plan), folder) for folder, work in new.items()]
        folders = {work.number: folder for folder, work in new.items()}

        def done(job: int, result: dict[str, Any]) -> None:
            self._judged[folders[job]] = result

        if jobs:
            _, error = self._run("reference", jobs, 1, done)
            if error is not None:
                raise error

    def _play(self, todo: Sequence[_Work]) -> None:
        """Prove plans of one size on one set of ranks. Where a plan raises, these ranks are lost, and new ones go on
        with the next plan."""
        left = {work.number: work for work in todo}
        while left:
            jobs = [self._job(work, work.resolved.plan, work.folder) for work in left.values()]

            def done(job: int, result: dict[str, Any]) -> None:
                work = left.pop(job)
                work.result = result
                if result["first"] is None:
                    self._conclude(work, {})

            world = next(iter(left.values())).resolved.plan.world
            begun, error = self._run("prove", jobs, world, done)
            if error is None:
                continue
            if not self._keep_going or begun not in left:
                raise error
            left.pop(begun).error = error

    def _run(
        self, what: str, jobs: list[dict[str, Any]], ranks: int, done: Callable[[int, dict[str, Any]], None]
    ) -> tuple[int, UnisonoError | None]:
        """(number of the last job that began, the error that ended it)."""
        last = -1

        def hear(rank: int, event: dict[str, Any]) -> None:
            nonlocal last
            if event["kind"] == "begun":
                last = event["job"]
            elif event["kind"] == "done":
                done(event["job"], event["result"])
            else:
                print_output(rank, event)

        launch = Recipe.model_validate_json(jobs[0]["recipe"]).launch
        backend = launch.backend if self._backend == "auto" else self._backend
        outcome = self._server.run(
            {"do": what, "jobs": jobs}, ranks, 1, hear, launch.timeout, backend, serves=self._most
        )
        if outcome.stopped:
            raise KeyboardInterrupt
        return last, outcome.error

    def _explain(self, work: _Work) -> dict[str, Any]:
        """The likely cause of a plan's failure, found by one process that plays the reference once more; for what was
        met behind the compared steps it is known already."""
        if "cause" in work.result:
            return work.result
        if work.error is not None or not work.result:
            return {
                "cause": "refused" if isinstance(work.error, UsageError) else "raised",
                "explanation": f"a rank raised: {work.error.what if work.error else 'nothing'}",
            }
        calm = self._without_dropout(work) if work.result["kind"] in ("loss", "raw") else None
        more = {"proved": str(work.resolved.plan), "step": work.result["step"], "calm": calm}
        heard: list[dict[str, Any]] = []
        jobs = [self._job(work, one_device(work.resolved.plan), work.folder, **more)]
        _, error = self._run("explain", jobs, 1, lambda job, result: heard.append(result))
        if error is not None or not heard:
            return {
                "cause": None,
                "explanation": f"the search for a cause failed: {error.what if error else 'no answer'}",
            }
        return heard[0]

    def _without_dropout(self, work: _Work) -> bool | None:
        """Whether the plan is right when nothing is dropped; None if nothing is."""
        recipe = work.resolved.recipe
        if not getattr(recipe.model, "dropout", 0.0):
            return None
        quiet = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dropout": 0.0})})
        other = self._work(
            work.number, replace(work.resolved, recipe=quiet), work.mark, f"quiet-{work.number}"
        )
        self._make_references([other])
        heard: list[dict[str, Any]] = []
        jobs = [self._job(other, other.resolved.plan, other.folder)]
        self._run("prove", jobs, other.resolved.plan.world, lambda job, result: heard.append(result))
        return bool(heard) and heard[0]["first"] is None

    def _conclude(self, work: _Work, why: dict[str, Any]) -> None:
        plan, result = work.resolved.plan, work.result
        raised = f"raised: {work.error.what}" if work.error is not None else None
        first, judged = result.get("first") or raised, self._judged[work.reference]
        if judged["first"] is not None and not work.error:
            first, why = judged["first"], judged
        same = result.get("bit_identical", False)
        verdict = "wrong" if first else "unproven" if result["wide"] and not same else "proven"
        if verdict == "unproven":
            why = _unproven(result["bound"], work.resolved)
        proof = Proof(
            plan=str(plan),
            ranks=plan.world,
            fidelity=with_sections(fidelity_of(plan), plan, work.resolved.recipe.sections()).name,
            bound=result.get("bound", 0.0),
            bit_identical=same,
            max_rel_err=result.get("errors", dict.fromkeys(KINDS, 1e308)),
            passed=verdict == "proven",
            first_divergence=first,
            cause=why.get("cause"),
            explanation=why.get("explanation"),
            verdict=verdict,
            notes=(*result.get("notes", ()), *_notes(plan, work.resolved.recipe, judged)),
        )
        shutil.rmtree(work.folder, ignore_errors=True)
        self._proofs[work.number] = proof
        while self._reported in self._proofs:
            self._each(self._proofs[self._reported])
            self._reported += 1


def _notes(plan: Plan, recipe: Recipe, judged: dict[str, Any]) -> tuple[str, ...]:
    """Return notes that do not change the verdict."""
    notes = [judged["note"]] if judged["note"] else []
    if plan.tp > 1 and judged["unseen"]:
        notes += [
            f"{judged['unseen']} tokens of the vocabulary did not occur in the steps that were proven: their rows of"
            " the embedding, which tp cuts, are unproven; more --steps, or data that has them"
        ]
    if needs_like_threads(plan) and recipe.launch.threads_per_rank != 1:
        notes += ["proven with one thread a rank; for the same bits in train: --launch.threads_per_rank 1"]
    return tuple(notes)


def _unproven(bound: float, resolved: Resolved) -> dict[str, Any]:
    text = (
        f"rounding alone may be {bound:.1g} of a gradient, which {resolved.batch.leaves} micro-batches make"
    )
    return {
        "cause": "bound_too_wide",
        "explanation": f"{text}; nothing is shown: prove it with --dtype float64",
    }


def one_device(plan: Plan) -> Plan:
    """The plan that all others are held to: the same precision, weights rounded alike, the same policy where it says
    what is computed, one process."""
    same = beside_like(plan) is Fidelity.EXACT or rhythm_of(plan) > 1 or lag_of(plan) > 0
    return Plan(
        zero=f"3:gather={plan.wires.gather}" if plan.wires.gather else 3,  # type: ignore[arg-type]
        precision=plan.text("precision"),
        sync=_on_one(plan.sync) if same else "every_step",
    )


def _on_one(sync: str) -> str:
    """The policy as one device has it."""
    policy = member("sync", sync)
    return sync if policy is None else policy.among(sync, 1)


def _beyond_steps(plan: Plan) -> str:
    """Why steps of this plan cannot be compared one by one; "" where they can."""
    policy = member("sync", plan.sync)
    if policy is not None and not policy.equal:
        return f"sync={plan.sync}: replicas have weights of their own, which no one device has"
    if policy is not None and policy.fidelity is Fidelity.LOSSY:
        return f"sync={plan.sync}: updates are not those of one device; what it equals are its identities"
    steady = None if policy is None else member("sync", policy.steady(plan.sync))
    if policy is None or steady is None or steady.rhythm == policy.rhythm:
        return ""
    said = f"sync={plan.sync} follows what is measured on the way: how many steps make one update"
    return f"{said} is not known before, and no other run has to do the same"


def _beyond_steps_fix(plan: Plan) -> str:
    """What proves a plan whose steps cannot be compared one by one."""
    policy, conformance = member("sync", plan.sync), f"unisono verify --conformance sync={plan.sync}"
    if policy.equal and policy.fidelity is not Fidelity.LOSSY:
        return f"sync={policy.steady(plan.sync)}, or {conformance}"
    inside = replace(plan, dp=1 if policy.equal else policy.neighbours, sync="every_step", codec="plain")
    return f'{conformance} for the policy, --plan "{inside}" for what is inside a replica'


def one_line(recipe: Recipe, plan: Plan) -> str:
    """The parity of a plan in float64 as one line of text."""
    if reason := _beyond_steps(plan):
        return f"{plan}  not proven here: {reason}"
    train = recipe.train.model_copy(update={"dtype": "float64", "micro_batch": recipe.train.micro_batch})
    double = replace(plan, precision="fp64")
    proof = prove(
        recipe.model_copy(update={"train": train, "plan": str(double)}), [double], 3, backend="gloo"
    )[0]
    errors = "  ".join(f"{kind} {error:.0e}" for kind, error in proof.max_rel_err.items())
    same = "bit-identical to one process" if proof.bit_identical else f"against one process: {errors}"
    word = {"proven": "PASS", "unproven": "UNPROVEN", "wrong": "FAIL"}[proof.verdict]
    return f"{proof.plan}  {same}  {word} (3 steps in float64, largest relative error)"
