"""NumPy as a witness: torch's one device and plans are its numbers to 1e-12, and it finds what both sides do wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.threads import ranks_on_threads  # noqa: F401  (a fixture)
from tests.verify.engines import LLAMA, beside, recipe
from unisono.cli import main
from unisono.models.gpt import net as torch_net
from unisono_contrib.verify.engines.answers import EngineQuestion
from unisono_contrib.verify.engines.beside import KINDS, ONE, AnswerTable, EngineAnswer
from unisono_contrib.verify.engines.numpy import net as numpy_net

pytestmark = pytest.mark.timeout(300)

PLANS = ("dp=2", "tp=2 pp=2", "shard=2 sync=canonical")


@pytest.mark.parametrize(("optimizer", "model"), [("adamw", {}), ("sgd", LLAMA)], ids=["gpt", "llama"])
def test_torch_is_the_witness_in_loss_gradients_and_update(optimizer: str, model: dict[str, Any]) -> None:
    proofs, rows, odd = beside(recipe(optimizer, **model), PLANS, witnesses=["numpy"], steps=3)
    assert all(proofs) and odd == []
    assert [row.engine for row in rows].count("numpy") == 2  # canonical is held to a one device of its own
    assert [row.plan for row in rows if row.engine == "torch"] == [proof.plan for proof in proofs]
    for row in rows:
        assert row.passed, row
        assert set(row.max_rel_err) == set(KINDS)
        assert max(row.max_rel_err.values()) < 1e-12 and row.bound == 1e-12


def test_gradients_by_hand_are_differences_of_losses() -> None:
    """Of a few weights of each tensor, by central differences: the witness is right by itself, not by torch."""
    rng = np.random.default_rng(0)
    sizes = numpy_net.NumpySizes(2, 4, 2, 16, "rotary", "swiglu", "rms", True)
    weights = {"stem.tok.weight": rng.normal(size=(12, 16)), "head.norm.weight": rng.normal(size=16)}
    shapes = {"attn.qkv.weight": (32, 16), "attn.proj.weight": (16, 16), "mlp.up.weight": (24, 16)}
    shapes |= {
        "mlp.gate.weight": (24, 16),
        "mlp.down.weight": (16, 24),
        "norm1.weight": (16,),
        "norm2.weight": (16,),
    }
    for i in range(2):
        weights |= {f"blocks.{i}.{name}": rng.normal(size=shape) / 3 for name, shape in shapes.items()}
    tokens, targets = rng.integers(12, size=(2, 3, 6))
    turns = numpy_net.turns(6, 4, 10000.0)
    _, grads = numpy_net.loss_and_grads(sizes, weights, tokens, targets, *turns)
    for name, w in weights.items():
        at = np.unravel_index(int(np.abs(grads[name]).argmax()), w.shape)
        sides = []
        for step in (1e-5, -1e-5):
            moved = weights | {name: w.copy()}
            moved[name][at] += step
            sides.append(numpy_net.loss_and_grads(sizes, moved, tokens, targets, *turns)[0])
        assert grads[name][at] == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6), name


def _tanh_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    true = torch_net.F.gelu
    monkeypatch.setattr(torch_net.F, "gelu", lambda x: true(x, approximate="tanh"))


def _other_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch_net, "_norm", lambda config: torch_net.nn.LayerNorm(config.d_model, eps=1e-6, bias=config.bias)
    )


def test_a_wrong_gradient_of_torch_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In plan and one device alike, with the right loss."""

    def forward(self: torch_net.FeedForward, x: Any) -> Any:
        w = self.down.weight
        hidden = torch_net.F.gelu(self.up(x))
        return torch_net.F.linear(hidden, w + (w - w.detach()) * 1e-9, self.down.bias)

    monkeypatch.setattr(torch_net.FeedForward, "forward", forward)
    proofs, rows, _ = beside(recipe(), ["dp=2"], witnesses=["numpy"], steps=1)
    assert all(proofs)
    for row in rows:
        assert "raw/blocks.0.mlp.down.weight is off by 1.0e-09" in str(row.first_divergence)


@pytest.mark.parametrize("plant", [_tanh_gelu, _other_eps])
def test_what_plan_and_one_device_do_wrong_alike_is_found(
    plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    proofs, rows, _ = beside(recipe(), ["dp=2"], witnesses=["numpy"], steps=1)
    assert all(proofs)  # nobody else sees it
    for row in rows:
        assert not row.passed and row.max_rel_err["grad"] > 1e-9
        assert row.first_divergence and row.first_divergence.startswith("step 1: loss is off by")


@pytest.mark.parametrize("name", ["stem.tok.weight", "blocks.1.mlp.down.weight", "blocks.0.norm1.bias"])
def test_a_wrong_gradient_is_reported_with_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = numpy_net.NumpyGPT._add

    def off(self: numpy_net.NumpyGPT, of: str, grad: numpy_net.Array) -> None:
        true(self, of, grad * (1 + 1e-10 * (of == name)))

    monkeypatch.setattr(numpy_net.NumpyGPT, "_add", off)
    _, rows, _ = beside(recipe(), ["dp=2"], witnesses=["numpy"], steps=1)
    for row in rows:
        assert f"raw/{name} is off by 1.0e-10 of its largest entry" in str(row.first_divergence)
        assert row.max_rel_err["loss"] < 1e-12


def test_a_wrong_update_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono_contrib.verify.engines import beside as compared

    true = compared.stepped
    monkeypatch.setattr(
        compared, "stepped", lambda law, before, raw, lr, step: true(law, before, raw, lr * (1 + 1e-9), step)
    )
    _, rows, _ = beside(recipe(), ["dp=2"], witnesses=["numpy"], steps=1)
    for row in rows:
        assert row.max_rel_err["grad"] < 1e-12 < row.max_rel_err["param"]
        assert "model/" in str(row.first_divergence)


def test_of_three_engines_the_odd_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "about.json").write_text('{"steps": 1}')
    save_file({"cos": np.zeros((4, 1)), "sin": np.zeros((4, 1))}, tmp_path / "batch-0.safetensors")
    answers = []
    for engine, value in (("torch", 2.0), ("jax", 1.0), ("other", 1.0 + 1e-15)):
        folder = tmp_path / engine
        folder.mkdir()
        one = {"loss": np.array([1.0]), "raw/a.weight": np.array([1.0, value])}
        save_file(one, folder / "step-0.safetensors")
        answers.append(EngineAnswer(engine, ONE, 1, folder))
    table = AnswerTable(EngineQuestion.read(tmp_path), answers)
    assert list(table.odd()) == ["torch"]
    assert [row.passed for row in table.rows] == [False, False]
    assert "raw/a.weight is off by 5.0e-01 of its largest entry at [1] from torch's" in str(
        table.rows[0].first_divergence
    )
    assert list(AnswerTable(EngineQuestion.read(tmp_path), answers[1:]).odd()) == []


SMALL = (
    "--model.n_layer 1 --model.n_head 2 --model.d_model 8 --model.context 8 --train.global_batch 4".split()
)
REFUSED = {
    "model.dropout 0.1": ["--model.dropout", "0.1"],
    "a model of kind moe": ["--model.kind", "moe"],
    "train.optimizer lamb": ["--train.optimizer", "lamb"],
    "train.lora_rank": ["--train.lora_rank", "2"],
    "train.loss": ["--train.loss", "cross_entropy:smoothing=0.1"],
    "codec=int8": ["--plan", "dp=2 codec=int8"],
    "sync=period:2": ["--plan", "dp=2 sync=period:2"],
    "[privacy]": ["--privacy.noise", "1.0"],
    "precision fp32": ["--dtype", "float32"],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_play_is_refused_by_name(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = REFUSED[what]
    plan = [] if "--plan" in words else ["--plan", "dp=2"]
    assert main(["verify", *SMALL, *words, *plan, "--witness", "numpy"]) == 2
    said = capsys.readouterr().err
    assert "error U-V07  numpy cannot be set beside" in said and what in said


@pytest.mark.usefixtures("ranks_on_threads")
def test_json_has_a_row_for_the_witness(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    words = [
        "verify",
        *SMALL,
        "--plan",
        "dp=2",
        "--plan",
        "dp=2 codec=int8",
        "--witness",
        "numpy",
        "--steps",
        "1",
    ]
    assert main([*words, "--json"]) == 2  # the codec's row is refused, and the others hold
    result = json.loads(capsys.readouterr().out)
    rows = {
        (row.get("engine"), row["plan"].split()[0]): row for row in result["results"] if row.get("engine")
    }
    assert rows["numpy", "one"]["pass"] and rows["torch", "dp=2"]["pass"]
    assert rows["torch", "dp=2"]["against"] == ["numpy"]
    refused = [row for row in result["results"] if row.get("refused")]
    assert [row["refused"]["code"] for row in refused] == ["U-V07"]
