"""gossip, noloco: replicas that hear a few others."""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.sync.outer import distance, flat, gradients_of, mean, play, recipe_of
from unisono.config import Recipe, resolve
from unisono.spec.errors import ConfigProblems
from unisono.sync import POLICIES
from unisono_contrib.sync._graphs import Matrix, metropolis, mixing, pairs, spectral_gap

pytestmark = pytest.mark.timeout(120)

STEPS = 5
GRAPHS = ("ring", "torus", "exponential", "one_peer", "complete", "star", "pairs")
Weights = dict[str, Tensor]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


def sums(matrix: Matrix) -> tuple[list[Fraction], list[Fraction]]:
    """Of rows, of columns."""
    columns = [sum((row.get(j, Fraction(0)) for row in matrix), Fraction(0)) for j in range(len(matrix))]
    return [sum(row.values(), Fraction(0)) for row in matrix], columns


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 12])
def test_mixing_keeps_the_mean_and_consensus(graph, n) -> None:
    for number in range(4):
        rows, columns = sums(matrix := mixing(graph, n, number, 7))
        assert rows == columns == [1] * n
        assert all(weight > 0 for row in matrix for weight in row.values())


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_what_a_replica_throws_adds_up_to_what_it_had(n) -> None:
    for number in range(4):
        rows, columns = sums(matrix := mixing("random", n, number, 7))
        assert columns == [1] * n
        assert sum(rows) == n
        assert all(row[i] >= Fraction(1, 2) for i, row in enumerate(matrix))
    if n > 2:
        assert any(sums(mixing("random", n, number, 7))[0] != [1] * n for number in range(4))


@pytest.mark.parametrize("graph", ["ring", "torus", "complete", "star", "pairs"])
def test_undirected_graphs_are_symmetric(graph) -> None:
    matrix = mixing(graph, 6, 2, 7)
    assert all(matrix[j][i] == weight for i, row in enumerate(matrix) for j, weight in row.items())


def test_an_edge_counts_by_the_busier_of_its_ends() -> None:
    third = Fraction(1, 3)
    assert metropolis(3, {(0, 2), (1, 2)}) == [
        {2: third, 0: 2 * third},
        {2: third, 1: 2 * third},
        {0: third, 1: third, 2: third},
    ]


def test_spectral_gaps_are_those_of_the_books() -> None:
    """Of a ring of n: 1 minus (1 + 2 cos(2 pi / n)) / 3. One-peer exponential graphs of 2^k replicas agree exactly
    after k rounds (Ying et al. 2021)."""
    assert spectral_gap("ring", 8) == pytest.approx(1 - (1 + 2**0.5) / 3)
    assert spectral_gap("complete", 8) == spectral_gap("one_peer", 8) == 1.0
    assert spectral_gap("exponential", 8) == pytest.approx(2 / 4)
    gaps = [spectral_gap(graph, 16) for graph in ("ring", "torus", "exponential", "complete")]
    steps = [after - before for before, after in pairwise(gaps)]
    assert min(steps) >= -1e-15, "torus and exponential have the same gap, to the last bit of a float64"
    assert 0 < spectral_gap("pairs", 8) < 1
    assert 0 < spectral_gap("random", 8) < 1


def test_of_an_odd_number_of_replicas_one_rests_and_not_always_the_same() -> None:
    resting = set()
    for number in range(20):
        drawn = pairs(5, number, 7)
        assert len({i for pair in drawn for i in pair}) == 4
        resting |= set(range(5)) - {i for pair in drawn for i in pair}
    assert len(resting) > 1
    assert [pairs(5, n, 7) for n in range(9)] == [pairs(5, n, 7) for n in range(9)]
    assert [pairs(5, n, 7) for n in range(9)] != [pairs(5, n, 8) for n in range(9)]


def local_steps(recipe: Recipe, replicas: int) -> Callable[[int, int, Weights], Weights]:
    """Plain SGD of one replica, whose weights afterwards are returned."""
    gradients = gradients_of(recipe, replicas)

    def learn(step: int, replica: int, weights: Weights) -> Weights:
        lr = recipe.train.rate()(step)
        return {name: weights[name] - lr * g for name, g in gradients(step, replica, weights).items()}

    learn.start = dict(gradients.start)  # type: ignore[attr-defined]
    return learn


def times(matrix: Matrix, states: list[Weights]) -> list[Weights]:
    return [
        {n: torch.stack([float(w) * states[j][n] for j, w in row.items()]).sum(0) for n in states[0]}
        for row in matrix
    ]


@pytest.mark.parametrize(
    ("graph", "n"), [("ring", 4), ("one_peer", 4), ("star", 3), ("pairs", 3), ("exponential", 3)]
)
def test_weights_are_the_mixing_matrix_times_what_was_learnt(source, graph, n) -> None:
    recipe = recipe_of(source, STEPS, batch=n)
    learn = local_steps(recipe, n)
    states = [learn.start] * n  # type: ignore[attr-defined]
    trained = play(recipe, f"dp={n} sync=gossip:{graph},report=3")
    seed = recipe.seed
    for step in range(STEPS):
        states = [learn(step, replica, weights) for replica, weights in enumerate(states)]
        if step + 1 == STEPS:
            states = [mean(states)] * n
        else:
            states = times(mixing(graph, n, step, seed), states)
        for got, want in zip(trained, states, strict=True):
            assert distance(flat(got.weights[step]), flat(want)) < 1e-12


def test_push_sum_is_that_of_its_paper_written_out(source) -> None:
    """x and w are mixed alike; gradients are those of z = x / w, and move x."""
    n, recipe = 3, recipe_of(source, STEPS, batch=3)
    learn = local_steps(recipe, n)
    xs, ws = [learn.start] * n, [1.0] * n  # type: ignore[attr-defined]
    trained, uneven = play(recipe, f"dp={n} sync=gossip:random,push=true,report=3"), False
    for step in range(STEPS):
        zs = [{name: x / w for name, x in state.items()} for state, w in zip(xs, ws, strict=True)]
        moved = [learn(step, i, z) for i, z in enumerate(zs)]
        xs = [{name: x + moved[i][name] - zs[i][name] for name, x in xs[i].items()} for i in range(n)]
        matrix = mixing("random", n, step, recipe.seed)
        if step + 1 == STEPS:
            xs, ws = [mean(xs)] * n, [1.0] * n
        else:
            xs, ws = times(matrix, xs), [sum(float(a) * ws[j] for j, a in row.items()) for row in matrix]
        uneven |= any(w != 1.0 for w in ws)
        for got, x, w in zip(trained, xs, ws, strict=True):
            assert distance(flat(got.weights[step]), flat(x) / w) < 1e-12
    assert uneven


def test_push_sum_on_a_graph_that_keeps_the_mean_is_plain_mixing_bit_for_bit(source) -> None:
    recipe, seen = recipe_of(source, STEPS, batch=3, optimizer="adamw"), []

    def look(run, step: int) -> None:
        seen.append(float(run.sync.weight))

    pushed = play(recipe, "dp=3 sync=gossip:exponential,push=true", watch=look)
    plain = play(recipe, "dp=3 sync=gossip:exponential")
    assert seen == [1.0] * 3 * STEPS
    for a, b in zip(pushed, plain, strict=True):
        assert torch.equal(flat(a.weights[-2]), flat(b.weights[-2]))


def test_public_copies_that_nothing_is_lost_of_are_the_weights(source) -> None:
    recipe = recipe_of(source, STEPS, batch=3, momentum=0.9)
    choco, plain = (play(recipe, f"dp=3 sync=gossip:ring{rest}") for rest in (",gamma=1", ""))
    for a, b in zip(choco, plain, strict=True):
        assert distance(flat(a.weights[-2]), flat(b.weights[-2])) < 1e-12


def test_a_codec_sends_less_and_what_it_loses_is_sent_later(source) -> None:
    recipe = recipe_of(source, 12, batch=3, lr=1e-9)
    plain = play(recipe, "dp=3 sync=gossip:ring,report=100")
    topk = play(recipe, "dp=3 sync=gossip:ring,gamma=0.2,report=100 codec=topk:ratio=0.25")
    assert 0 < topk[0].sent[5] < plain[0].sent[5]
    assert topk[0].sent[0] > topk[0].sent[5]  # public copies, whole
    for got in topk:
        public = torch.cat([x.flatten() for name, x in sorted(got.state.items()) if name.endswith("/public")])
        assert public.isfinite().all()


def test_public_copies_keep_the_mean_of_all_whatever_a_codec_loses(source) -> None:
    def freeze(run, step: int) -> None:
        run.update.rate = lambda step: 0.0

    recipe, plan = (
        recipe_of(source, 8, batch=3),
        "dp=3 sync=gossip:ring,gamma=0.2,report=100 codec=topk:ratio=0.1",
    )
    got = play(recipe, plan, watch=freeze)
    apart = [distance(flat(got[0].weights[step]), flat(got[1].weights[step])) for step in (0, 6)]
    first, *later = (flat(mean([one.weights[step] for one in got])) for step in range(7))
    assert all(distance(other, first) < 1e-12 for other in later)
    assert apart[1] < apart[0]


@pytest.mark.parametrize(
    "codec", ["topk:ratio=0.1", "randomk:ratio=0.5", "qsgd", "int8+crc", "block:ratio=0.5", "threshold"]
)
def test_of_a_replica_all_have_the_same_public_copy(source, codec) -> None:
    """What neighbours keep of a replica is what it keeps of itself."""
    recipe, copies, public = recipe_of(source, STEPS, batch=4), {}, {}

    def look(run, step: int) -> None:
        if step == 3:
            me = run.sync.group.index
            public[me] = torch.cat([x.flatten() for x in run.sync.public.values()])
            for j, parts in run.sync.copies.items():
                copies[j, me] = parts[0].clone()

    play(recipe, f"dp=4 sync=gossip:ring,gamma=0.3 codec={codec}", watch=look)
    assert len(copies) == 8
    for (j, _), copy in copies.items():
        assert torch.equal(copy, public[j])


def test_a_complete_graph_is_local_sgd_of_one_step(source) -> None:
    recipe = recipe_of(source, STEPS, batch=3, optimizer="adamw", clip=0.5)
    gossip, local = (play(recipe, f"dp=3 sync={sync}") for sync in ("gossip:complete", "local_sgd:1"))
    for a, b in zip(gossip, local, strict=True):
        assert distance(a.last, b.last) < 1e-12


@pytest.mark.parametrize("n", [3, 4])
def test_noloco_is_that_of_its_paper_written_out(source, n) -> None:
    steps, h, lr, momentum, drift = 7, 2, 0.7, 0.5, 0.9
    recipe = recipe_of(source, steps, batch=n)
    learn = local_steps(recipe, n)
    slow = [learn.start] * n  # type: ignore[attr-defined]
    states, velocity = list(slow), [{name: torch.zeros_like(x) for name, x in slow[0].items()}] * n
    trained = play(recipe, f"dp={n} sync=noloco:h={h},outer_lr={lr},outer_momentum={momentum},drift={drift}")
    for step in range(steps - 1):
        states = [learn(step, i, weights) for i, weights in enumerate(states)]
        if (step + 1) % h == 0:
            matrix = mixing("pairs", n, step // h, recipe.seed)
            learnt = [{k: x - s[k] for k, x in state.items()} for state, s in zip(states, slow, strict=True)]
            near, deltas = times(matrix, slow), times(matrix, learnt)
            velocity = [
                {k: momentum * v[k] + lr * deltas[i][k] - drift * (slow[i][k] - near[i][k]) for k in v}
                for i, v in enumerate(velocity)
            ]
            slow = [{k: x + velocity[i][k] for k, x in s.items()} for i, s in enumerate(slow)]
            states = list(slow)
        for got, want in zip(trained, states, strict=True):
            assert distance(flat(got.weights[step]), flat(want)) < 1e-12
    assert all(torch.equal(got.last, trained[0].last) for got in trained)


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:one_peer,push=true", "noloco:2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_after_the_last_step_all_replicas_are_the_mean(source, sync, optimizer) -> None:
    first, *rest = play(recipe_of(source, STEPS, batch=3, optimizer=optimizer), f"dp=3 sync={sync}")
    assert all(torch.equal(other.last, first.last) for other in rest)
    assert distance(first.last, flat(first.center)) < 1e-12
    assert first.metrics[-1]["consensus"] > 0


@pytest.mark.parametrize(
    ("plan", "sync"),
    [
        ("dp=3", "gossip:ring"),
        ("dp=3", "gossip:random,push=true"),
        ("dp=3", "gossip:ring,gamma=0.5"),
        ("dp=3", "noloco:2"),
        ("dp=2 tp=2", "gossip:random,push=true"),
        ("dp=2 tp=2", "noloco:2"),
        ("dp=2 shard=2", "gossip:ring,gamma=0.5"),
    ],
)
def test_a_run_that_was_saved_goes_on_as_if_it_was_not(source, tmp_path, plan, sync) -> None:
    recipe = recipe_of(source, STEPS, batch=12, optimizer="adamw")
    text = f"{plan} sync={sync}"
    whole = play(recipe, text, save_at=3, folder=tmp_path / "run")
    again = play(recipe, text, begin=next((tmp_path / "run" / "checkpoints").iterdir()))
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(flat(a.weights[3]), flat(b.weights[0]))
        assert torch.equal(a.last, b.last)


def test_a_new_replica_begins_with_the_mean_and_the_others_keep_their_weights(source, tmp_path) -> None:
    recipe, folder, sync = recipe_of(source, STEPS, batch=12), tmp_path / "run", "gossip:random,push=true"
    whole = play(recipe, f"dp=3 sync={sync}", save_at=3, folder=folder, steps=4)
    begin = next((folder / "checkpoints").iterdir())
    again = play(recipe, f"dp=4 sync={sync}", begin=begin, steps=3)
    begun = [{n: got.state[f"{n}/before"] for n in got.center} for got in again]
    for got, weights in zip(whole, begun[:3], strict=True):
        assert torch.equal(flat(weights), flat(got.weights[2]))
    masses = [float(got.state["push_weight"]) for got in again]
    assert masses[3] == 1.0
    assert masses[:3] != [1.0] * 3
    center = torch.stack([w * flat(x) for w, x in zip(masses[:3], begun[:3], strict=True)]).sum(0) / 3
    assert distance(flat(begun[3]), center) < 1e-12
    assert distance(flat(again[0].center), center) < 1e-12
    fewer = play(recipe, f"dp=2 sync={sync}", begin=begin, steps=3)
    left = torch.stack([w * flat(x) for w, x in zip(masses[:2], begun[:2], strict=True)]).sum(0)
    assert sum(masses[:2]) != 2.0
    assert distance(flat(fewer[0].center), left / sum(masses[:2])) < 1e-12


@pytest.mark.parametrize(
    ("inside", "sync"),
    [
        ("tp=2", "gossip:ring"),
        ("shard=2", "gossip:ring,gamma=0.5"),
        ("shard=2", "noloco:2"),
        ("pp=2", "noloco:2"),
    ],
)
def test_the_inside_of_a_replica_may_be_cut_in_any_way(source, inside, sync) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw", clip=0.5)
    plain, cut = play(recipe, f"dp=2 sync={sync}"), play(recipe, f"dp=2 {inside} sync={sync}")
    for report, other in zip(plain[0].reports, cut[0].reports, strict=True):
        assert report.loss == pytest.approx(other.loss, rel=1e-12)


def test_neighbours_in_lock_step_are_one_replica(source) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw", clip=0.5)
    groups = play(recipe, "dp=4 sync=gossip:ring,inside=2")
    two = play(recipe, "dp=2 sync=gossip:ring")
    for got, want in zip(groups, (two[0], two[0], two[1], two[1]), strict=True):
        assert distance(got.last, want.last) < 1e-12


def test_a_step_that_is_not_of_numbers_on_one_replica_is_bad_at_the_next_meeting(source) -> None:
    def spoil(run, step: int) -> None:
        if step == 0 and run.mesh.rank == 1:
            with torch.no_grad():
                run.local.slots[0].master.fill_(float("nan"))

    ends = play(recipe_of(source, STEPS), "dp=2 sync=gossip:ring,report=3", watch=spoil, steps=3)
    for end in ends:
        assert [report.bad != "" for report in end.reports] == [False, False, True]


def test_a_request_to_stop_is_heard_at_the_next_meeting(source) -> None:
    recipe, asked = recipe_of(source, STEPS), lambda rank, step: rank == 1 and step == 1
    for end in play(recipe, "dp=2 sync=gossip:ring,report=3", stop=asked, steps=4):
        assert [report.stop for report in end.reports] == [False, False, True, False]


@pytest.mark.parametrize(
    ("sync", "n"),
    [("gossip:ring", 4), ("gossip:ring", 2), ("gossip:star", 3), ("gossip:ring,push=true", 3), ("gossip:one_peer,push=true", 4),
     ("gossip:ring,gamma=0.5", 4), ("gossip:ring,h=2", 3), ("noloco:2", 4)],
)  # fmt: skip
def test_a_run_sends_and_keeps_what_it_declares(source, sync, n) -> None:
    kept = {}

    def look(run, step: int) -> None:
        held = (*run.sync.state().values(), *run.sync.copied)
        kept[run.mesh.rank] = sum(x.nbytes for x in held)

    got = play(recipe_of(source, STEPS, batch=n), f"dp={n} sync={sync},report=100", watch=look, steps=4)[0]
    weights = sum(x.nbytes for x in got.weights[0].values())
    work = POLICIES.read(sync).work(weights, n)
    (said,) = [call for call in work.calls if call.op == "send"]
    first = weights * 2 if "gamma" in sync else 0  # public copies, whole
    assert sum(got.sent) - first == 4 * said.nbytes * said.times
    assert kept[0] == work.kept


@pytest.mark.parametrize(
    ("plan", "code", "word"),
    [
        ("dp=2 sync=gossip:random", "P16", "push"),
        ("dp=2 sync=gossip:pairs,gamma=0.5", "P16", "copies"),
        ("dp=2 sync=gossip:ring,gamma=0.5,push=true", "P16", "push"),
        ("dp=2 sync=gossip:ring codec=topk", "P23", "gamma"),
        ("dp=2 sync=gossip:ring,gamma=0.3 codec=topk+ef", "P23", "topk"),
        ("dp=2 sync=gossip:ring,gamma=0.3 codec=randomk:ratio=0.1,unbiased=true", "P23", "run away"),
        ("dp=2 sync=gossip:ring,gamma=0.3 codec=chunktopk", "P23", "how much"),
        ("dp=2 sync=gossip:ring,gamma=0.3 codec=powersgd", "P23", "neighbours"),
        ("dp=3 sync=gossip:ring,inside=2", "P16", "divide"),
        ("dp=2 sync=noloco:2 codec=topk", "P23", "as it is"),
        ("dp=2 sync=noloco:h=2,drift=0.4", "P16", "apart"),
        ("dp=2 precision=fp16 sync=noloco:2", "P16", "scale"),
    ],
)
def test_what_cannot_be_is_refused(source, plan, code, word) -> None:
    recipe = recipe_of(source, STEPS, batch=12)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"dtype": "float32"})})
    with pytest.raises(ConfigProblems) as error:
        resolve(recipe, plan, 3 if "dp=3" in plan else 2)
    assert error.value.problems[0].code == code
    assert any(word in problem.what + problem.fix for problem in error.value.problems)
