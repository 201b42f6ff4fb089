"""Every kind of model by flags alone, a config.json or a user's file; what cannot be priced says why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planner.test_experts import DEEPSEEK, MIXTRAL
from unisono.cli import main
from unisono.plan import Plan

MODEL = """
from torch import nn

def words(vocab, context):
    return nn.Sequential(nn.Embedding(vocab, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, vocab))

def pictures(classes, sample_shape):
    return nn.Sequential(nn.Conv2d(sample_shape[0], 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
                         nn.LazyLinear(classes) if False else nn.Linear(16 * 6 * 6, classes))

class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum().item() else -x

def branch():
    return Branch()
"""


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = main(["simulate", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        ("--model.kind convnet --model.resnet 50 --plan dp=4", 25_557_032),
        ("--model.kind mlp --data.source digits", 64 * 128 + 3 * 128 * 128 + 4 * 128 + 1290),
        ("--model.kind convnet --model.image 3,32,32 --model.classes 10 --plan dp=2", None),
        ("--model.kind dlrm --model.tables 1000,2000 --plan shard=4\u00a0ep=2\u00a0zero=1", None),
        ("--model.kind moe --plan shard=4\u00a0ep=4\u00a0zero=1", None),
    ],
)
def test_by_flags_alone(words: str, parameters: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    given = [word.replace("\u00a0", " ") for word in words.split(" ")]
    code, got = said(given, capsys)
    assert code == 0 and got["step_s"] > 0 and got["fits"]
    assert got["parameters"] == (parameters or got["parameters"]) >= got["active_parameters"] > 0
    assert sum(part["seconds"] for part in got["waterfall"]) == pytest.approx(got["step_s"])
    assert got["error_pct"] is None  # nobody has measured such models for this version


def test_a_config_by_folder_file_and_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "hub" / "models--some--model" / "snapshots" / "1"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text(json.dumps(MIXTRAL))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    words = ["--cluster", "dgx-h100:16", "--model.context", "4096", "--train.global_batch", "128",
             "--plan", "shard=16 tp=8 ep=8 precision=bf16"]  # fmt: skip
    prices = []
    for name in (str(kept), str(kept / "config.json"), "some/model"):
        code, got = said(["--model.kind", f"hf:{name}", *words], capsys)
        assert code == 0 and got["parameters"] == 46_702_792_704
        prices.append(got["step_s"])
    assert len(set(prices)) == 1
    code, got = said(["--model.kind", "hf:some/other", *words], capsys)
    assert code == 2 and "config.json" in got["what"]


def test_a_sweep_over_a_config_keeps_to_sizes_that_tp_divides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sample on eight devices leaves tp and pp alone; 2732 is four times 683."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2732}
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model.kind", f"hf:{tmp_path}", "--cluster", "dgx-a100:1", "--train.global_batch", "1"]
    code, got = said([*words, "--plan", "precision=bf16", "--sweep", "context=512,1024"], capsys)
    assert code == 0 and not any("tp=8" in point["plan"] for point in got["sweep"]["points"])


def test_sections_judge_plans_of_a_config_before_one_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 4096}
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model.kind", f"hf:{tmp_path}", "--cluster", "dgx-a100:1", "--train.global_batch", "64"]
    private = [*words, "--privacy.noise", "1.0"]
    assert main(["plan", *private, "--json"]) == 0
    plans = [Plan.parse(one["plan"]) for one in json.loads(capsys.readouterr().out)["plans"]]
    assert plans and all(plan.cp == plan.ep == 1 and plan.precision == "fp32" for plan in plans)
    code, got = said([*private, "--plan", "dp=8 precision=bf16"], capsys)
    assert code == 2 and "privacy" in str(got)


def test_a_config_is_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    words = ["simulate", "--model.kind", f"hf:{tmp_path}", "--model.context", "4096", "--cluster", "hgx-h800:256",
             "--plan", "shard=128 pp=16 ep=64 zero=1 schedule=dualpipev precision=bf16 recompute=full",
             "--train.global_batch", "15360", "--train.micro_batch", "1", "--json"]  # fmt: skip
    script = f"from unisono.cli import main; main({words}); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {"torch", "numpy", "transformers"}.isdisjoint(done.stdout.splitlines()[-1].split())
    assert '"parameters": 671026404352' in done.stdout


def test_a_family_that_is_not_known_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, vocab_size=100,
        max_position_embeddings=32,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    code, got = said(["--model.kind", f"hf:{tmp_path}", "--plan", "pp=2"], capsys)
    assert code == 0, got
    import torch

    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    assert got["parameters"] == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize("name", ["words", "pictures"])
def test_a_module_of_ones_own(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data.source", "digits"] if name == "pictures" else ["--model.context", "32"]
    code, got = said(["--model.kind", f"{file}:{name}", *data, "--plan", "dp=2"], capsys)
    own = 256 * 64 + 64 * 64 + 64 + 64 * 256 + 256
    assert code == 0, got
    assert got["parameters"] == (own if name == "words" else 16 * 9 + 16 + 32 + 16 * 36 * 10 + 10)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model.kind", "moe", "--plan", "ep=3 shard=3"], "1 2 4 8"),
        (["--model.kind", "moe", "--plan", "ep=8 shard=4"], "shard x cp x tp = 4"),
        (["--model.kind", "gpt", "--plan", "ep=2 shard=2"], "no experts"),
        (["--model.kind", "moe", "--model.top_k", "9"], "--model.top_k 8"),
        (["--model.kind", "dlrm"], "--model.tables"),
        (["--model.kind", "convnet", "--model.resnet", "50", "--plan", "tp=2"], "tp"),
        (["--model.kind", "mlp", "--data.source", "digits", "--plan", "pp=3"], "pp=2 or less"),
        (["--model.kind", "FILE:branch"], "traced"),
        (["--model.kind", "FILE:brunch"], "branch"),
    ],
)
def test_mistakes_have_a_remedy(
    words: list[str], told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, got = said([word.replace("FILE", str(file)) for word in words], capsys)
    assert code == 2
    assert told in json.dumps(got)


def test_training_goes_on_refusing_what_is_only_priced(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.kind", "convnet", "--model.resnet", "50"]
    assert main(["train", *words, "--dry-run", "--json"]) == 2
    assert "not yet" in capsys.readouterr().out


def test_plans_for_a_sparse_model_hold_its_expert_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model.kind moe --model.d_model 512 --model.context 512 --train.global_batch 64 --cluster dgx-a100".split()
    assert main(["plan", *words, "--plan", "ep=4 precision=bf16", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["feasible"] > 1 and all("ep=4" in plan["plan"] for plan in got["plans"])


def test_the_optimiser_is_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    adam, velocity, nothing = (
        said(["--cluster", "dgx-a100", "--plan", "dp=8", *f"--train.optimizer {how}".split()], capsys)[1]
        for how in ("adamw", "sgd", "sgd --train.momentum 0")
    )
    optim = [got["mem_gib"]["optim"] for got in (adam, velocity, nothing)]
    assert optim[0] == pytest.approx(2 * optim[1])
    assert optim[0] > 0.0 == optim[2]
    assert adam["step_s"] > velocity["step_s"] > nothing["step_s"]
