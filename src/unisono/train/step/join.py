"""Take part in a run: what a rank holds by itself, and what it becomes among certain members.

A rank's part of the model, its optimiser and the groups inside its replica do not depend on who else takes part. Groups
across replicas, who computes which leaves, the timetable's length and the policy do: `join` makes them, the first time
and after every change of the members, between two steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce

from unisono.codecs import CODECS, Coder
from unisono.codecs._watched import bound
from unisono.comm.members import Members, stretches_of
from unisono.comm.mesh import Mesh
from unisono.comm.tree import TreeSum
from unisono.parallel.play import StagePlayer
from unisono.parallel.precision import computing
from unisono.parallelize import Local
from unisono.plan import Plan
from unisono.plan.checks import Batch
from unisono.programs.pipeline import Action, Timetable, lower, part_of
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import UsageError
from unisono.spec.fidelity import Fidelity
from unisono.spec.finder import contributed
from unisono.sync import POLICIES, OuterPolicy, Policy, Sync
from unisono.sync._outer import Site
from unisono.sync.every_step import EveryStepSync
from unisono.train.step.assigner import Assigner
from unisono.train.step.batch_norm import changed_buffers, running_norms
from unisono.train.step.grad_norm import ByRow, ByTensor
from unisono.train.step.gradients import Gradients
from unisono.train.step.numbers import LossPlaces
from unisono.train.step.overlap import flowing, gradients_kind, unflushed
from unisono.train.step.routing import router_votes
from unisono.train.step.run import Replica, Run
from unisono.train.step.shared_numbers import SharedNumbers
from unisono.train.step.update import Update


def timetable_of(plan: Plan) -> Timetable:
    """The lowered timetable of a resolved plan."""
    return lower(SCHEDULES.read(plan.schedule).timetable(plan.pp, plan.micros or 1))


def join(part: Replica | Run, members: Members, speeds: Sequence[float] | None = None) -> Run:
    """The run among these members; of one under way, weights, optimiser and step stay as they are.

    speeds: of the replicas, by which leaves are dealt; alike if None. Every one of `members` calls it, or it hangs.
    A rank that joins late brings weights and step with it, from a checkpoint. Raises ValueError where the global batch
    cannot be dealt to them, UsageError where the policy cannot be played so.
    """
    replica, mesh = part.replica if isinstance(part, Run) else part, part.mesh
    if isinstance(part, Run):
        part.gradients.release()
    mesh = mesh if mesh.members == members else mesh.joined(members)
    policy, local = POLICIES.read(replica.plan.sync), replica.local
    count = replica.global_batch // replica.micro_batch
    stretches = _stretches(replica, policy, mesh, speeds)
    leaves = leaves_of(stretches, mesh)
    plan = replace(replica.plan, dp=mesh.dp.size, micros=len(leaves))
    # What a step sees of the others: where replicas have weights of their own, those that it is in lock-step with.
    near = mesh.lockstep(policy.neighbours) if isinstance(policy, OuterPolicy) else mesh
    sync = _sync(part, policy, mesh, near, plan)
    _share_matrices(replica, policy, mesh)
    gradients = gradients_kind(plan, sync)(
        local.slots,
        near.dp,
        sync,
        ties=local.ties,
        mirror=local.mirror,
        sharding=local.sharding,
        inner=mesh.over,
        trees={slot.name: TreeSum(len(leaves)) for slot in local.slots} if policy.leafwise else {},
        places=_places(policy, count, leaves, mesh),
    )
    timetable, row, eval_row = _rows(plan, mesh)
    run = Run(
        replica=replica,
        mesh=mesh,
        leaves=leaves,
        of_leaves=count,
        local=local,
        player=_player(replica, policy, gradients),
        timetable=timetable,
        row=row,
        eval_row=eval_row,
        sync=sync,
        gradients=gradients,
        measure=measure_of(policy, local, mesh),
        update=_update_of(replica, mesh, near, lambda: run, plan),
        shared=SharedNumbers(sync, local.device),
        seed=replica.seed,
        recorder=replica.recorder,
        step=part.step if isinstance(part, Run) else 0,
    )
    sync.assigned(stretches, mesh.shape.shard)
    run.assigner = _assigner(run, policy, stretches)
    return reduce(lambda around, change: change(around), replica.around, flowing(run, plan))


def _share_matrices(replica: Replica, policy: Policy, mesh: Mesh) -> None:
    """Divide the steps of whole matrices over the ranks that hold them. Replicas share them where they step together;
    not where each has weights of its own, nor where state comes to a rank in turns of its own."""
    local = replica.local
    if replica.update.gathers:
        streamed = any(away.optimizer for away in local.away.values())
        over_dp = policy.equal and not isinstance(policy, OuterPolicy) and not streamed
        share = contributed("unisono.train.step.owners").share_matrices
        share(replica.update.optimizer, local.slots, mesh, over_dp)


def _numbered(leaves: range, count: int, mesh: Mesh, near: Mesh) -> range:
    """These leaves of `count` as they are numbered among those of `near`, whose replicas lie side by side."""
    if near is mesh:
        return leaves
    first = (mesh.dp.index - near.dp.index) * (count // mesh.dp.size)
    return range(leaves.start - first, leaves.stop - first, leaves.step)


def take_leaves(run: Run, stretches: Sequence[range]) -> None:
    """Between two steps: each replica computes other leaves from now on. stretches: of each one, which its shards take
    in turn. Weights, optimiser and groups stay as they are. Every rank calls it."""
    mesh, policy = run.mesh, POLICIES.read(run.replica.plan.sync)
    run.leaves = leaves_of(stretches, mesh)
    plan = replace(run.replica.plan, dp=mesh.dp.size, micros=len(run.leaves))
    run.timetable, run.row, run.eval_row = _rows(plan, mesh)
    run.gradients.assign(len(run.leaves), _places(policy, run.of_leaves, run.leaves, mesh))
    run.sync.assigned(stretches, mesh.shape.shard)


def resize(run: Run, count: int) -> None:
    """Between two steps: from now on a step has so many leaves, as many on each replica. Every rank calls it. Raises
    ValueError where they cannot be divided."""
    run.of_leaves, shape = count, run.mesh.shape
    leafwise = POLICIES.read(run.replica.plan.sync).leafwise
    take_leaves(run, stretches_of(count, shape.dp, shape.shard, branches=leafwise))


def leaves_of(stretches: Sequence[range], mesh: Mesh) -> range:
    """The leaves of this rank: of its replica's, which shards take in turn."""
    stretch = stretches[mesh.at["dp"]]
    return range(stretch.start + mesh.at["shard"], stretch.stop, mesh.shape.shard)


def _player(replica: Replica, policy: Policy, gradients: Gradients) -> StagePlayer:
    """What plays this rank's rows, and hands on what backwards make."""
    local = replica.local
    return StagePlayer(
        local.stages,
        local.wires,
        replica.recorder,
        partial(computing, replica.plan.precision, local.device),
        gradients.begin,
        gradients.leaf_done if policy.leafwise else None,
        dtype=replica.dtype,
        device=local.device,
        halves=local.halves,
        scale=replica.update.scaler.factor,
    )


def _assigner(run: Run, policy: Policy, stretches: Sequence[range]) -> Assigner:
    """What may assign leaves anew while the run goes on, where the policy asks for it."""
    if not policy.look_every or run.mesh.dp.size == 1:
        return Assigner([len(stretch) for stretch in stretches])
    by_speed = contributed("unisono.train.step.balance").BySpeed
    return by_speed(run, policy.look_every, stretches, policy.leafwise)


def _rows(plan: Plan, mesh: Mesh) -> tuple[Timetable, Sequence[Action], Sequence[Action]]:
    """(the timetable of this replica, the row of this rank, its forwards alone)."""
    timetable, row = timetable_of(plan), mesh.at["pp"]
    return timetable, timetable.rows[row], part_of(timetable, lambda action: action.kind == "F").rows[row]


def _places(policy: Policy, count: int, leaves: range, mesh: Mesh) -> LossPlaces:
    """Where the losses of these leaves of `count` stand in a step's line of numbers."""
    counted = mesh.tp.index == 0
    return LossPlaces(count, leaves, counted) if policy.leafwise else LossPlaces(counted=counted)


def _sync(part: Replica | Run, policy: Policy, mesh: Mesh, near: Mesh, plan: Plan) -> Sync:
    """The live policy with its codec, which may be chosen by measuring, and with the sums of sparse gradients. What one
    under way has kept goes on. near: see `join`."""
    replica = part.replica if isinstance(part, Run) else part
    slots, coder = replica.local.slots, _coder(replica)
    if isinstance(policy, OuterPolicy):
        bound = policy.bind_outer(_site(replica, policy, mesh, near, coder))
    else:
        bound = policy.bind(slots, mesh.dp, coder)
    bound.among(mesh.world, mesh.replica, frozenset(slot.name for slot in slots if slot.counted(mesh.at)))
    if coder.rungs:
        choosing = contributed("unisono.sync._choice").choosing
        bound = choosing(bound, coder, slots, mesh.world, later=unflushed(plan) is None)
    sparse = any(slot.sparse and slot.live.requires_grad for slot in slots)
    sync = contributed("unisono.train.step.rows").with_rows(bound, slots, near, plan.ep) if sparse else bound
    if isinstance(part, Run) and sync.kept is not None and part.sync.kept is not None:
        sync.kept.take_over(part.sync.kept, mesh.dp)
    return sync


def _site(replica: Replica, policy: OuterPolicy, mesh: Mesh, near: Mesh, coder: Coder) -> Site:
    """What an outer policy finds on this rank. Its codec is given weights' differences, of which the optimiser wants
    nothing, and no loss scale changes them."""
    slots = replica.local.slots
    return Site(
        slots,
        EveryStepSync(near.dp, None, slots),
        mesh.across(policy.neighbours),
        coder,
        replica.update.optimizer,
        mesh.replica,
        frozenset(slot.name for slot in slots if slot.counted(mesh.at)),
        [
            x
            for stage in replica.local.stages.values()
            for x in changed_buffers(stage, replica.local.routers).values()
        ],
        replica.steps,
        replica.servers,
        replica.global_batch,
        replica.update.rate,
        replica.update.max_norm,
        replica.update.optimizer_over,
        replica.mailbox,
        replica.local.owners,
    )


def _coder(replica: Replica) -> Coder:
    """The live codec, which draws by the run's seed and knows the scale of what it is given."""
    member = CODECS.read(replica.plan.codec)
    coder = bound(member)
    if member.fidelity is Fidelity.LOSSY and not POLICIES.read(replica.plan.sync).equal:
        coder.loses = True
    elif member.fidelity is Fidelity.LOSSY:
        coder = replica.update.crossing(coder)
        # A plain sum carries an overflow to all by itself.
        coder.scale, coder.loses = replica.update.scaler.factor, not coder.rungs
    coder.called, coder.seed = coder.called or replica.plan.codec, replica.seed
    return coder


def _update_of(replica: Replica, mesh: Mesh, near: Mesh, run: Callable[[], Run], plan: Plan) -> Update:
    """The replica's update, after which routers vote and batch norms have seen the step, where there are any. run():
    the one that is joined, whose leaves may change."""
    local, flushed = replica.local, unflushed(plan) is None
    votes = router_votes(local, near.world, replica.update.scaler)
    leaves = lambda: _numbered(run().leaves, run().of_leaves, mesh, near)
    count = lambda: run().of_leaves // (mesh.dp.size // near.dp.size)
    after = (*votes, *running_norms(local, near, leaves, count, flushed))
    lag = POLICIES.read(replica.plan.sync).update_lag
    return replace(replica.update, after=after, lag=lag) if after or lag else replica.update


def measure_of(policy: Policy, local: Local, mesh: Mesh) -> ByTensor:
    """What adds up squares over the ranks of this replica, so that their order changes no bit under a policy that
    promises this."""
    if not policy.leafwise:
        return ByTensor(local.shapes, mesh.replica, mesh.at)
    return ByRow(local.shapes, mesh.replica, mesh.at, policy.virtual)


def _stretches(
    replica: Replica, policy: Policy, mesh: Mesh, speeds: Sequence[float] | None
) -> Sequence[range]:
    """The leaves of each replica; by the policy's own speeds where nobody says others. Raises ValueError, and
    UsageError, on every rank alike, where the policy cannot be played with what some replica computes."""
    count, said = replica.global_batch // replica.micro_batch, policy.replica_speeds
    if speeds is None and len(said) == mesh.dp.size:
        speeds = said
    stretches = stretches_of(count, mesh.dp.size, mesh.shape.shard, speeds, policy.leafwise)
    for micros in sorted({len(stretch) // mesh.shape.shard for stretch in stretches}):
        sync = policy.among(replica.plan.sync, mesh.dp.size)
        plan = replace(replica.plan, dp=mesh.dp.size, micros=micros, sync=sync)
        batch = Batch(replica.global_batch, replica.micro_batch, micros, mesh.data.size)
        for problem in POLICIES.read(sync).problems(plan, batch):
            raise UsageError(problem.what, where=problem.where, fix=problem.fix, code=problem.code)
    return stretches
