"""A recorded step once more, on one process: the bits of a canonical run, the rounding of others, and what is not right."""

import json
import shutil

import pytest

from unisono.cli import main

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ranks_on_threads")]

MODEL = ["--model.n_layer", "2", "--model.n_head", "2", "--model.d_model", "16", "--model.context", "8"]
TRAIN = [
    "--train.steps",
    "5",
    "--train.save_every",
    "2",
    "--train.global_batch",
    "8",
    "--train.micro_batch",
    "1",
]


def trained(folder, plan, *more):
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    words = [
        "train",
        "--plan",
        plan,
        "--data.source",
        f"text:{text}",
        "--model.dropout",
        "0.1",
        "--no-out.report",
    ]
    assert main([*words, *MODEL, *TRAIN, *more, "--quiet", "--out.dir", str(folder / "runs")]) == 0
    (run,) = (folder / "runs" / "run").glob("2*")
    return run


@pytest.fixture(scope="module")
def canonical(tmp_path_factory, ranks_on_threads):
    return trained(tmp_path_factory.mktemp("canonical"), "dp=2 sync=canonical")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory, ranks_on_threads):
    return trained(tmp_path_factory.mktemp("rounded"), "dp=2")


def replayed(run, capsys, *more):
    """(exit code, result)."""
    capsys.readouterr()
    code = main(["verify", "--replay", str(run), *more, "--json", "--quiet"])
    out = json.loads(capsys.readouterr().out)
    return code, out["results"][0] if "results" in out else out


def copied(run, folder):
    shutil.copytree(run, folder / "run")
    return folder / "run"


def edited(run, step, **values):
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[step].update({key: change(lines[step][key]) for key, change in values.items()})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_canonical_run_gives_its_bits(canonical, capsys):
    code, got = replayed(canonical, capsys, "--step", "4")
    assert code == 0 and got["bit_identical"] and got["fidelity"] == "EXACT"
    assert (got["from"], got["compared_with"], got["steps_replayed"]) == ("step-000002", "step-000004", 2)
    assert set(got["max_rel_err"].values()) == {0.0}


def test_what_a_run_skipped_is_skipped_again(tmp_path, capsys):
    """Every loss that is not below the median is a spike here."""
    odd = ["--train.on_bad", "skip", "--train.spike", "0.01", "--train.bad_limit", "99"]
    run = trained(tmp_path, "dp=2 sync=canonical", "--train.steps", "24", "--train.lr", "0", *odd)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["step"] for line in lines if "skipped" in line]
    assert skipped and len(skipped) < 8 and min(skipped) > 16
    code, got = replayed(run, capsys)
    assert code == 0 and got["bit_identical"] and got["compared_with"] == "step-000024"


def test_another_run_is_within_rounding(rounded, capsys):
    code, got = replayed(rounded, capsys, "--step", "4")
    assert code == 0 and got["pass"] and not got["bit_identical"] and got["fidelity"] == "ROUNDING"
    assert 0 < got["max_rel_err"]["optim"] < got["bounds"]["optim"] < 1e-3
    assert got["bounds"]["loss"] < 1e-5


def test_a_rate_that_follows_the_noise_scale_goes_on_from_the_means_in_the_checkpoint(tmp_path, capsys):
    run = trained(tmp_path, "dp=2", "--train.optimizer", "adascale")
    code, got = replayed(run, capsys, "--step", "4")
    assert code == 0 and got["pass"] and got["steps_replayed"] == 2


def test_without_a_checkpoint_it_begins_at_the_beginning(canonical, tmp_path, capsys):
    run = copied(canonical, tmp_path)
    shutil.rmtree(run / "checkpoints")
    code, got = replayed(run, capsys)
    assert code == 0 and got["bit_identical"] and got["step"] == 5
    assert got["from"] == "initial state" and got["compared_with"] is None and got["steps_replayed"] == 5


def test_what_stands_in_for_a_checkpoint_is_one(canonical, tmp_path, capsys):
    """A re-save that died between its two renames leaves the old one under another name."""
    run = copied(canonical, tmp_path)
    (run / "checkpoints/step-000002").rename(run / "checkpoints/step-000002.old-0a1b")
    code, got = replayed(run, capsys, "--step", "4")
    assert code == 0 and got["from"] == "step-000002.old-0a1b" and got["steps_replayed"] == 2


def test_a_number_that_is_not_what_comes_out_is_a_mismatch(canonical, rounded, tmp_path, capsys):
    for run, key, factor in ((canonical, "loss", 1 + 2**-50), (rounded, "grad_norm", 1 + 1e-3)):
        copy = copied(run, tmp_path / key)
        edited(copy, 3, **{key: lambda value, factor=factor: value * factor})
        code, got = replayed(copy, capsys, "--step", "4")
        assert code == 3 and not got["pass"]
        assert got["first_divergence"].startswith(f"{key} of step 4: ")


def test_a_recipe_changed_behind_its_back_is_told(canonical, tmp_path, capsys):
    run = copied(canonical, tmp_path)
    config = run / "config.resolved.toml"
    config.write_text(
        "\n".join("lr = 0.5" if row.startswith("lr =") else row for row in config.read_text().splitlines())
    )
    code, got = replayed(run, capsys, "--step", "2")
    assert code == 3 and "not the one that made this step" in got["first_divergence"]


def test_a_step_that_was_not_recorded_is_refused(canonical, capsys):
    code, got = replayed(canonical, capsys, "--step", "6")
    assert code == 2 and got["code"] == "U-V02" and got["try"] == "--step between 1 and 5"
    code, got = replayed(canonical, capsys, "--plan", "dp=2")
    assert code == 2 and got["code"] == "U-C04"


def test_a_norm_that_was_told_a_step_late_is_compared_too(tmp_path, capsys):
    """Under `sync=priority` gradients are on their way when a step ends, unless somebody looks at the weights."""
    run = trained(tmp_path, "dp=2 sync=priority:slice=0.001", "--train.clip", "0", "--train.eval_every", "0")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["grad_norm"] is None for line in lines] == [True, False, True, False, False]
    assert lines[3]["grad_norm_before"] > 0
    code, got = replayed(run, capsys, "--step", "4")
    assert code == 0 and not got["bit_identical"]
    edited(run, 3, grad_norm_before=lambda norm: norm * 1.01)
    assert replayed(run, capsys, "--step", "4")[0] == 3
