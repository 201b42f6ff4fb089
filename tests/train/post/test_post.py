"""Post-training: sequences, losses and draws are the same however a step is divided; sampler and trainer have one set of
bits; nothing that is drawn is left out."""

import math
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import World
from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.errors import UnisonoError, UsageError
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.step.train_step import fetch, train_step
from unisono_contrib.config.sections.post import PostConfig
from unisono_contrib.train.post.draw import draw, log_probs, uniforms
from unisono_contrib.train.post.losses import PolicyLoss, PreferenceLoss, counted_log_probs, size_of
from unisono_contrib.train.post.player import LossDesk
from unisono_contrib.train.post.rewards import advantages
from unisono_contrib.train.post.sequences import PostLeaf

REWARD = """
def score(prompt, drawn, answer):
    return sum(map(ord, drawn)) % 7 / 7 + (drawn[:1] == answer[:1])
"""


def recipe(
    folder: Path, packing: Any = "none", micro: int = 4, dtype: str = "float64", **post: Any
) -> Recipe:
    (folder / "reward.py").write_text(REWARD)
    kind = post.get("kind", "grpo")
    grpo = {"group": 4, "max_new_tokens": 3, "reward": f"{folder / 'reward.py'}:score"}
    return Recipe(
        seed=3,
        model=ModelConfig(n_layer=2, n_head=2, d_model=16, context=16, positions="rotary"),
        data=DataConfig(
            source="sums:1,pairs=true" if kind == "dpo" else "sums", packing=packing, tokenizer="char"
        ),
        train=TrainConfig(steps=6, global_batch=16, micro_batch=micro, lr=1e-2, dtype=dtype),
        post=PostConfig(**(grpo if kind == "grpo" else {}) | post),  # type: ignore[call-arg]
    )


def played(ctx: RankContext, told: str, plan: str, steps: int = 2) -> dict[str, Any]:
    """Losses, what the run says, and a digest of all weights after some steps."""
    resolved = resolve(Recipe.model_validate_json(told), plan, ctx.world)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device, kept=run.update.keeps)
    reports = [train_step(run, fetch(run, feed)) for _ in range(steps)]
    whole = {}
    for slot in run.local.slots:
        start = "/".join(map(str, slot.start))
        whole[f"{slot.name}@{start}"] = slot.master.detach().double().flatten().tolist()
    return {
        "loss": [r.loss for r in reports],
        "norm": [r.norm for r in reports],
        "says": [{k: v for k, v in r.says.items() if isinstance(v, float)} for r in reports],
        "lengths": [r.says.get("lengths", {}) for r in reports],
        "weights": whole,
    }


def weights_of(results: list[dict[str, Any]]) -> dict[str, str]:
    """A digest of each tensor, which ranks hold whole or in parts of its rows."""
    parts: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for result in results:
        for key, values in result["weights"].items():
            name, _, start = key.partition("@")
            parts.setdefault(name, {})[tuple(map(int, filter(None, start.split("/"))))] = values
    wholes = {name: [x for _, values in sorted(of.items()) for x in values] for name, of in parts.items()}
    return {
        name: blake2b(torch.tensor(values, dtype=torch.float64).numpy().tobytes(), digest_size=8).hexdigest()
        for name, values in wholes.items()
    }


def near(a: list[float], b: list[float]) -> bool:
    return all(math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-12) for x, y in zip(a, b, strict=True))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["sft", "grpo", "dpo"])
def test_packing_and_accumulation_change_no_loss(threads: World, tmp_path: Path, kind: str) -> None:
    """One rank, 16 sequences in leaves of 4, 8 and 16, one a window or several: 0.65 is never 1.25."""
    extra: dict[str, Any] = {"kl": 0.1, "over": "sequences"} if kind == "grpo" else {"kind": kind}
    (usual,) = threads(played, 1, told=recipe(tmp_path, **extra).model_dump_json(), plan="dp=1", group=False)
    assert any(abs(loss) > 1e-6 for loss in usual["loss"])
    for packing, micro in (("none", 16), ("documents", 4), ("documents", 8), ("documents", 16)):
        told = recipe(tmp_path, packing, micro, **extra).model_dump_json()
        (other,) = threads(played, 1, told=told, plan="dp=1", group=False)
        assert near(other["loss"], usual["loss"]) and near(other["norm"], usual["norm"]), (packing, micro)
        for name, values in usual["weights"].items():
            assert near(values, other["weights"][name]), (packing, micro, name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("extra", "leaf"), [({"kl": 0.1}, 4), ({"kind": "sft"}, 1)], ids=["grpo", "sft"])
def test_canonical_bits_depend_on_no_division(
    threads: World, tmp_path: Path, extra: dict[str, Any], leaf: int
) -> None:
    """In float32: the same bits of weights, loss and norm on 1, 2 and 4 replicas, 2 shards or stages, any packing, any
    micro-batch; and the sampler's log-probabilities are the trainer's."""
    cases = [
        (1, "dp=1", "none", 4), (1, "dp=1", "documents", 16), (2, "dp=2", "none", 8), (4, "dp=4", "documents", 4),
        (2, "pp=2", "none", leaf), (2, "shard=2", "documents", 2),
    ]  # fmt: skip
    seen = []
    for ranks, plan, packing, micro in cases:
        told = recipe(tmp_path, packing, micro, "float32", **extra).model_dump_json()
        results = threads(played, ranks, told=told, plan=f"{plan} sync=canonical", group=ranks > 1)
        same = {says.get(key, 0.0) for says in results[0]["says"] for key in ("kl_sampler", "logprob_gap")}
        assert same == {0.0}
        seen.append((results[0]["loss"], results[0]["norm"], weights_of(results), results[0]["lengths"]))
    assert seen[1:] == seen[:1] * (len(cases) - 1)
    assert all(sum(counts.values()) == (0 if leaf == 1 else 16) for counts in seen[0][3])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("kind", ["sft", "grpo", "dpo"])
def test_every_plan_is_one_device(tmp_path: Path, kind: str, packing: str) -> None:
    """In float64, by the prover: gradients, weights, optimiser."""
    plans = ["dp=2", "dp=4", "tp=2", "shard=2", "pp=2", "dp=2 tp=2", "dp=2 shard=2 sync=canonical"]
    plans += ["cp=2"] if kind != "dpo" else []
    plans += ["pp=2 schedule=dualpipe micros=4", "dp=2 sync=period:4"] if kind == "sft" else []
    extra: dict[str, Any] = {"kl": 0.1, "max_new_tokens": 12} if kind == "grpo" else {"kind": kind}
    proofs = prove(recipe(tmp_path, packing, **extra), [Plan.parse(plan) for plan in plans], 3)
    assert [(proof.plan, proof.first_divergence) for proof in proofs if not proof.passed] == []
    assert len(proofs) == len(plans)


CANCELS: dict[str, Any] = {
    "max_new_tokens": 1
}  # all sequences of a group weigh alike, and advantages add up to 0


SLOW = pytest.mark.slow


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plan", "kl"),
    [("cp=2", 0.0), *(pytest.param(*c, marks=SLOW) for c in (("tp=2", 0.0), ("cp=2 tp=2", 0.1)))],
)
def test_a_loss_that_cancels_is_held_to_the_size_of_its_terms(tmp_path: Path, plan: str, kl: float) -> None:
    """Groups of one length have a loss of rounding alone, 1e-17, which another order of sums doubles."""
    (proof,) = prove(recipe(tmp_path, kl=kl, **CANCELS), [Plan.parse(plan)], 3)
    assert proof.passed and proof.max_rel_err["loss"] < 1e-15, proof.first_divergence


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", ["cp=2", pytest.param("tp=2", marks=SLOW)])
def test_a_wrong_loss_is_found_where_terms_cancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """One sequence of each micro-batch counts 1e-10 more, under the plan: in the loss alone, no gradient changes."""

    class WrongLoss(PolicyLoss):
        def terms(self, lp: torch.Tensor, *others: Any) -> Any:
            terms, measured = super().terms(lp, *others)
            return terms + 1e-10 * terms.detach().abs() * (torch.arange(len(terms)) == 1)[:, None], measured

    def attach(desk: LossDesk, run: Any) -> None:
        usual(desk, run)
        desk.loss = WrongLoss(desk.loss._how) if run.mesh.world.size > 1 else desk.loss  # type: ignore[attr-defined]

    usual = LossDesk.attach
    monkeypatch.setattr(LossDesk, "attach", attach)
    (proof,) = prove(recipe(tmp_path, **CANCELS), [Plan.parse(plan)], 3)
    assert not proof.passed and "loss of the leaf" in str(proof.first_divergence), proof.first_divergence


def test_the_size_of_a_loss() -> None:
    """That of -Σ log p is the loss itself; that of terms that cancel is what it would be if they did not."""
    lp = -torch.rand(2, 3, dtype=torch.float64) - 1.0
    counted, weight = torch.ones(2, 3, dtype=torch.bool), {"weight": torch.rand(2, 3, dtype=torch.float64)}
    loss = PolicyLoss(PostConfig())  # type: ignore[call-arg]
    terms, _ = loss.terms(lp, counted, weight, {})
    assert math.isclose(size_of(loss, lp, counted, weight, {}), float(terms.sum()), rel_tol=1e-14)
    alike = {"weight": torch.ones(2, 3), "advantage": torch.tensor([[1.0], [-1.0]]), "sampled": lp.clone()}
    terms, _ = loss.terms(lp, counted, alike, {})
    size = size_of(loss, lp, counted, alike, {})
    assert abs(float(terms.sum())) < 1e-15 and math.isclose(size, 2 * float(-lp.sum()), rel_tol=1e-12)


def trained(ctx: RankContext, told: str, steps: int) -> list[list[int]]:
    """Of each step: its number, the version of the weights that drew, the prompt's numbers, the drawn lengths."""
    from unisono_contrib.train.build.post import PostTraining

    resolved = resolve(Recipe.model_validate_json(told), "dp=1", 1)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    place = place_of(0, 1, 0, ctx.backend, 60.0)
    post = PostTraining(resolved.recipe.post, resolved.recipe, corpus)  # type: ignore[attr-defined]
    plain = resolved.recipe.model_copy(update={"post": None})
    run = post.attach(build(plain, resolved.plan, place, corpus, Recorder(0)))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    drawn, used = list[list[int]](), list[list[int]]()
    sampler, generate = post.work.sampler, post.work.sampler.generate  # type: ignore[union-attr]

    def noting(prompts: Any, version: int) -> Any:
        rollouts = generate(prompts, version)
        drawn.append([prompts[0].number, *(rollouts.ends - rollouts.begins).tolist()])
        return rollouts

    sampler.generate = noting  # type: ignore[union-attr,method-assign]
    post.work.heard = lambda step, batch: used.append(  # type: ignore[union-attr]
        [step, batch.rollouts.version, *(batch.rollouts.ends - batch.rollouts.begins).tolist()]
    )
    for _ in range(steps):
        train_step(run, fetch(run, feed))
    return [[len(row), *row] for row in (*drawn, *used)] + [[len(drawn)]]


@pytest.mark.timeout(60)
def test_stale_sequences_are_all_trained_and_carry_their_version(threads: World, tmp_path: Path) -> None:
    """Of 6 steps under a bound of 2, each is trained on what weights of at most 2 updates before drew, and the lengths of
    what is trained are those of what was drawn, slow or not."""
    told = recipe(tmp_path, max_staleness=2).model_dump_json()
    (rows,) = threads(trained, 1, told=told, steps=6, group=False)
    (count,) = rows.pop()
    drawn, used = [row[2:] for row in rows[:count]], [row[1:] for row in rows[count:]]
    assert [(step, version) for step, version, *_ in used] == [(s, max(0, s - 2)) for s in range(6)]
    assert count == 6
    lengths = [
        Counter(length for row in part for length in row) for part in (drawn, [row[2:] for row in used])
    ]
    assert lengths[0] == lengths[1] and len(lengths[0]) > 1


def test_who_draws_does_not_matter() -> None:
    """A token is a function of its logits and its place; frequencies are the distribution's."""
    numbers, members, places = (torch.arange(6000).numpy() // d % m for d, m in ((8, 750), (1, 8), (1, 1)))
    u = uniforms(5, numbers, members, places)
    order = torch.randperm(6000, generator=torch.Generator().manual_seed(1)).numpy()
    assert (uniforms(5, numbers[order], members[order], places[order]) == u[order]).all()
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0]).expand(6000, -1)
    drawn = draw(logits, u, 2.0)
    shares = torch.bincount(drawn, minlength=4) / 6000
    assert torch.allclose(shares, (logits[0] / 2.0).softmax(-1), atol=0.02)
    assert torch.equal(
        log_probs(logits, drawn, 2.0), (logits / 2.0).log_softmax(-1)[torch.arange(6000), drawn]
    )


def test_packed_leaves_hold_the_same_sequences() -> None:
    lengths = torch.tensor([3, 6, 2, 5])
    at = torch.arange(8)
    targets = torch.where((at >= 1) & (at < lengths[:, None]), at + 10 * torch.arange(4)[:, None], -100)
    leaf = PostLeaf(
        targets.clamp(min=0), targets, torch.arange(4), 1.0, lengths, {"weight": targets.double()}, {}
    )
    for fixed, rows in ((False, 3), (True, 4)):
        packed = leaf.packed(fixed)
        assert packed.inputs.shape == (rows, 8) and packed.samples.shape == (rows,)
        counted = packed.targets != -100
        assert sorted(packed.targets[counted].tolist()) == sorted(targets[targets != -100].tolist())
        assert torch.equal(packed.by_token["weight"][counted], packed.targets[counted].double())


def test_importance_weights_are_truncated() -> None:
    """A token that the trainer finds e^5 times as likely as the sampler did weighs 2, also where it was bad."""
    for advantage in (1.0, -1.0):
        lp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
        sides = {
            name: torch.tensor([[x]])
            for name, x in (("weight", 1.0), ("advantage", advantage), ("sampled", -6.0))
        }
        counted = torch.tensor([[True]])
        loss, found = PolicyLoss(PostConfig(clip=0.0)).terms(lp, counted, sides, {})  # type: ignore[call-arg]
        loss.backward()
        assert float(loss.detach()) == -2.0 * advantage and float(lp.grad) == -2.0 * advantage  # type: ignore[arg-type]
        assert found[3] == 1


def test_preference_loss_is_that_of_the_paper() -> None:
    lp = torch.tensor([[-1.0, -2.0], [-4.0, 0.0]], dtype=torch.float64)
    sides = {"sequence": torch.tensor([[0, 0], [1, 1]])}
    counted = torch.tensor([[True, True], [True, False]])
    reference = {"reference": torch.tensor([-3.5, -3.0]), "length": torch.tensor([2, 2])}
    loss, found = PreferenceLoss(PostConfig(kind="dpo", beta=0.5)).terms(lp, counted, sides, reference)  # type: ignore[call-arg]
    margin = 0.5 * ((-3.0 + 3.5) - (-4.0 + 3.0))
    assert math.isclose(float(loss), math.log1p(math.exp(-margin))) and found.tolist() == [1.0, 1.0, margin]


def test_groups_whose_rewards_are_alike_teach_nothing() -> None:
    found = advantages(torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 1.0], dtype=torch.float64), 3, True)
    assert found[:3].tolist() == [0.0, 0.0, 0.0] and math.isclose(float(found.sum()), 0.0, abs_tol=1e-12)


def test_counted_log_probs_leave_others_out() -> None:
    lp, counted = counted_log_probs(torch.zeros(1, 2, 4), torch.tensor([[-100, 3]]), 1.0)
    assert lp.tolist()[0][0] == 0.0 and counted.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("post", "plan", "code"),
    [
        ({"kind": "dpo"}, "cp=2", "C09"),
        ({}, "dp=2 sync=local_sgd:h=4", "C09"),
        ({"kind": "dpo", "kl": 0.1}, "dp=1", "C06"),
        ({"group": 3}, "dp=1", "C06"),
    ],
)
def test_what_cannot_be_played_is_refused(tmp_path: Path, post: dict[str, Any], plan: str, code: str) -> None:
    with pytest.raises(UnisonoError) as error:
        resolve(recipe(tmp_path, **post), plan, 2 if "=2" in plan else 1)
    assert code in str(error.value.code) or code in str(error.value)


def test_data_without_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be. " * 40)
    told = recipe(tmp_path).model_copy(update={"data": DataConfig(source=f"text:{tmp_path / 'text.txt'}")})
    resolved = resolve(told, "dp=1", 1)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    with pytest.raises(UsageError) as error:
        feeds(resolved.recipe, resolved.plan, corpus, torch.device("cpu"))
    assert error.value.code == "D21"
