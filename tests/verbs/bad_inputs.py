"""Bad inputs, and what is said of each: the exit code, the place, a remedy, and that nothing is left behind.

`python -m tests.verbs.bad_inputs` plays all that answer at once and prints the table; `test_bad_inputs.py` holds it. A
row begins with a good recipe and makes one mistake. Where the remedy can be followed by a machine, `good` follows it,
and the command then passes `--dry-run`.
"""

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from tests.verbs import jobs
from unisono import cli
from unisono.launch import fork_server

RECIPE = """\
name = "tiny"
plan = "dp=2"
[model]
n_layer = 2
n_head = 2
d_model = 16
context = 8
[data]
source = "text:words.txt"
[train]
steps = 4
global_batch = 8
micro_batch = 2
[out]
report = false
"""
FILES = {
    "words.txt": jobs.words(600),
    "empty.txt": "",
    "odd.bin": b"\0" * 7,
    "some.bin": b"\1\0" * 400,
    "latin.txt": "gr\xfc\xdfe ".encode("latin-1") * 200,
    "mixed/a.txt": "text " * 40,
    "mixed/b.bin": b"\0\1" * 40,
    "model.py": "def good(vocab):\n    raise RuntimeError('not before ranks')\n",
    "torn.py": "def good(:\n    pass\n",
    "raises.py": "x = 1 / 0\nclass Own: pass\n",
    "imports.py": "import nothing_of_this_name\nclass Own: pass\n",
    "plain.py": "class Own: pass\n",
    "recipes.py": "def raises():\n    return 1 / 0\ndef leaves():\n    import sys; sys.exit(3)\ndef nothing():\n    pass\n"
    "def wants(x):\n    pass\n",
    "base.toml": "seed = 1\n",
    "round.toml": 'extends = "round.toml"\n',
}
RUN = {
    "runs/tiny/a/config.resolved.toml": RECIPE,
    "runs/tiny/a/metrics.jsonl": "",
    "runs/tiny/a/checkpoints/step-000002/x": "",
    "runs/tiny/latest": "a\n",
}


@dataclass(frozen=True)
class Bad:
    """One mistake. argv: the command. code, says, where, fix: what its error must have, parts of each. files: beside
    those of all. good: a command that follows the remedy, to be passed with --dry-run."""

    name: str
    argv: tuple[str, ...]
    code: str
    says: str
    where: str
    fix: str
    exit: int = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    good: tuple[str, ...] = ()
    mended: Mapping[str, str | bytes] = field(default_factory=dict)


TRAIN = ("train", "r.toml")


def text(name: str, toml: str, line: int, says: str, fix: str, good: str = "", code: str = "C03") -> Bad:
    """A mistake in the text of a recipe, on a line of it, and the text mended."""
    mended = {"r.toml": good} if good else {}
    where = f"r.toml:{line}" if line else "r.toml"
    argv = TRAIN if good else ()
    return Bad(name, TRAIN, code, says, where, fix, files={"r.toml": toml}, good=argv, mended=mended)


def value(key: str, bad: str, says: str, good: str = "", code: str = "C02", fix: str = "") -> Bad:
    """A value of a key that is out of range or of another type, given as a flag."""
    flag = f"--{key}"
    told = (*TRAIN, flag, good) if good else ()
    return Bad(f"{key} = {bad[:40]!r}", (*TRAIN, flag, bad), code, says, f"--{key}", fix or key, good=told)


def plan(bad: str, code: str, says: str, fix: str, good: str = "", where: str = "--plan") -> Bad:
    """A plan that is misspelt, or does not fit the recipe."""
    told = (*TRAIN, "--plan", good) if good else ()
    return Bad(f"plan {bad[:40]!r}", (*TRAIN, "--plan", bad), code, says, where, fix, good=told)


def data(source: str, code: str, says: str, where: str, fix: str, *flags: str) -> Bad:
    """Data that is not there, or is none."""
    return Bad(f"data {source}", (*TRAIN, "--data.source", source, *flags), code, says, where, fix)


def users(name: str, flags: tuple[str, ...], exit: int, code: str, says: str, where: str, fix: str) -> Bad:
    """A mistake in a file of the user's."""
    return Bad(name, (*TRAIN, *flags), code, says, where, fix, exit=exit)


def command(line: str, code: str, says: str, where: str, fix: str, good: str = "", **more: object) -> Bad:
    """A command line that means nothing."""
    return Bad(line, tuple(line.split()), code, says, where, fix, good=tuple(good.split()), **more)  # type: ignore[arg-type]


def run(line: str, code: str, says: str, where: str, fix: str, **files: str | bytes) -> Bad:
    """A run folder that is not what it should be. files: with `__` for `/`."""
    held = dict(RUN) | {name.replace("__", "/"): body for name, body in files.items()}
    told = " ".join(f"{name}={body!r}" for name, body in files.items())
    return Bad(f"{line} {told}".strip(), tuple(line.split()), code, says, where, fix, files=held)


G = RECIPE
TEXTS = [
    text("a value without quotes", "name = x\n", 1, "x is no value", 'name = "value"', G),
    text("two faults of TOML", "name = x\nseed = = 3\n", 2, "= 3 is no value", 'seed = "value"', G),
    text("a section twice", G + "[train]\nlr = 1.0\n", 16, "[train] is there twice", "one heading", G),
    text("a key twice", "seed = 3\nseed = 4\n" + G, 2, "seed is there twice", "keep one", G),
    text("an open string", 'name = "x\n', 1, "a string is not closed", 'name = "value"', G),
    text("no equals sign", "seed 3\n", 1, "has no '='", "key = value", G),
    text("an open bracket", G + "[train2]\nx = [1\n", 17, "a bracket is not closed", "[0.9, 0.95]", G),
    text("True", G.replace("false", "False"), 15, "small letters", "report = false", G),
    text("a number without its zero", G.replace("[out]", "lr = .5\n[out]"), 14, "no number", "lr = 0.5", G),
    text("no value", "seed =\n" + G, 1, "seed has no value", "seed = value", G),
    text("a misspelt key", G.replace("steps", "stpes"), 11, "did you mean train.steps?", "optimiser steps", G, "C01"),
    text("a misspelt section", G.replace("[train]", "[trian]"), 10, "did you mean [train]?", "sections", G, "C01"),
    text("a key in no section", "steps = 3\n" + G, 1, "unknown key steps", "train.steps", G, "C01"),
    text("a section as a value", 'train = "fast"\n', 1, "train is a section", "[train]", G, "C02"),
    text("text for a number", G.replace("steps = 4", 'steps = "4"'), 11, "valid integer", "optimiser steps", G, "C02"),
    text("a number for text", G.replace('name = "tiny"', "name = 3"), 1, "valid string", "folder of its runs", G, "C02"),
    text("extends nothing", 'extends = "nope.toml"\n', 1, "not there", "paths are relative", G, "C05"),
    text("extends a number", "extends = 3\n", 1, "one file name", "base.toml", G, "C05"),
    Bad("extends itself", ("train", "round.toml"), "C05", "in a circle", "round.toml:1", "take one", good=TRAIN),
    text("no key of this kind", G.replace("n_layer", "hidden"), 4, "means nothing to a model of kind gpt", "out", G, "C06"),
    Bad("not UTF-8", TRAIN, "C03", "UTF-8", "r.toml", "TOML text", files={"r.toml": b"\xff\xfe\0s"}),
    Bad("a picture", TRAIN, "C03", "UTF-8", "r.toml", "TOML text", files={"r.toml": b"\x89PNG\r\n\x1a\n\0\0"}),
    Bad("no such recipe", ("train", "q.toml"), "C03", "no such recipe file", "q.toml", "r.toml", good=TRAIN),
    Bad("a folder", ("train", "mixed"), "C03", "folder without config", "mixed", "run folder"),
    Bad("/dev/zero as a recipe", ("train", "/dev/zero"), "C03", "a pipe or a device", "/dev/zero", "path"),
    Bad("a recipe below a file", ("train", "r.toml/x"), "C03", "Not a directory", "r.toml/x", "path"),
    Bad("a very long name", ("train", "a" * 300), "E02", "too long", "aaa", "path"),
]  # fmt: skip
VALUES = [
    value("train.steps", "-1", "greater than or equal to 0", "5"),
    value("train.steps", "many", "whole number", "5"),
    value("train.steps", "1.5", "whole number", "5"),
    value("train.steps", "nan", "whole number", "5"),
    value("train.global_batch", "0", "greater than or equal to 1", "8"),
    value("train.micro_batch", "0", "greater than or equal to 1", "4"),
    value("train.lr", "-1", "greater than or equal to 0", "0.1"),
    value("train.lr", "nan", "finite", "0.1"),
    value("train.lr", "inf", "finite", "0.1"),
    value("train.lr", "fast", "number", "0.1"),
    value("train.clip", "nan", "finite", "1"),
    value("train.weight_decay", "-0.1", "greater than or equal to 0", "0.1"),
    value("train.betas", "0.9", "one value more", "0.9,0.95"),
    value("train.betas", "0.9,1.5", "less than 1", "0.9,0.95"),
    value("train.dtype", "float16", "'float32' or 'float64'", "float64"),
    value("train.optimizer", "adam", "did you mean adamw?", "adamw"),
    value("train.lr_schedule", "cos", "did you mean cosine?", "cosine"),
    value("train.loss", "mse", "no loss 'mse'", "cross_entropy"),
    value("train.metrics", "f1", "no metric 'f1'", "accuracy"),
    value("train.save_every", "-5", "greater than or equal to 0", "5"),
        value("train.stpes", "5", "did you mean train.steps?", code="C01", fix="train.steps"),
    value("train.min_lr", "1.0", "above lr", "0.0001", "C06", "min_lr"),
    value("train.momentum", "0.5", "means nothing to adamw", code="C06", fix="take it out"),
    value("model.n_layer", "0", "greater than or equal to 1", "1"),
    value("model.n_layer", "99999999999", "less than or equal to 100000", "2"),
    value("model.n_head", "3", "does not divide d_model", "2", "C06", "one of 1 2 4"),
    value("model.d_model", "15", "does not divide d_model 15", "16", "C06", "n_head"),
    value("model.context", "-1", "greater than or equal to 1", "8"),
    value("model.dropout", "2", "less than 1", "0.5"),
    value("model.kind", "gtp", "did you mean gpt?", "gpt", "C06", "one of"),
        value("model.kind", "model.py:godo", "did you mean good?", "model.py:good", "C06", "good"),
    value("model.kind", "nothing.py:f", "no such model file", code="C06", fix="working folder"),
    value("data.val_fraction", "1", "less than 1", "0.5"),
    value("data.tokenizer", "bpe", "did you mean byte?", "byte", "C06", "byte, char or hf:FOLDER"),
    value("data.tokenizer", "hf:gpt2", "neither a folder with tokenizer.json nor that file", "byte", "D11", "hf:FOLDER"),
    value("data.source", "txt:words.txt", "did you mean text?", "text:words.txt", "C06", "one of"),
    value("data.source", "digits", "reads tokens, digits gives pictures", "text:words.txt", "C06", "another source"),
    value("data.source", "text", "lacks its option path", "text:words.txt", "C06", "path"),
    value("launch.threads_per_rank", "0", "greater than or equal to 1", "1"),
    value("launch.ranks", "-2", "greater than or equal to 1", "2"),
    value("launch.backend", "mpi", "'auto', 'gloo', 'nccl', 'nccl:shared' or 'sim'", "gloo"),
    value("launch.timeout", "0", "greater than 0", "60"),
    value("out.track", "wandbb", "no sink 'wandbb'", "csv"),
    value("out.dir", "", "at least 1 character", "runs"),
    value("name", "../../evil", "names a folder", "evil", fix='name = "evil"'),
    value("name", "/abs/name", "names a folder", "abs-name", fix='name = "abs-name"'),
    value("name", "", "names a folder", "run", fix='name = "run"'),
    value("name", "a" * 200, "at most 100 characters", "a"),
    value("seed", "-1", "greater than or equal to 0", "0"),
    value("seed", str(2**63), "less than 9223372036854775808", str(2**63 - 1)),
    value("seed", "9" * 5000, "whole number", "0"),
    value("seed", "1e400", "whole number", "0"),
]  # fmt: skip
PLANS = [
    plan("", "P05", "the plan is empty", "dp=1", "dp=1"),
    plan("dp=2,pp=2", "P05", "separated by blanks", '"dp=2 pp=2"', "dp=2 pp=2"),
    plan("dp=2;tp=2", "P05", "separated by blanks", '"dp=2 tp=2"', "dp=2 tp=2"),
    plan("dp = 2", "P05", "blanks stand around '='", '"dp=2"', "dp=2"),
    plan("dp:2", "P05", "form key=value", '"dp=2"', "dp=2"),
    plan("dp", "P05", "form key=value", "dp=2", "dp=2"),
    plan("ddp=2", "P01", "did you mean dp?", "keys of a plan", "dp=2"),
    plan("dp=2 dp=4", "P02", "given twice", "keep one", "dp=2"),
    plan("dp=2.0", "P03", "whole number", "dp=N", "dp=2"),
    plan("dp=-2", "P03", "at least 1", "dp=1", "dp=1"),
    plan("dp=0", "P03", "at least 1", "dp=1", "dp=1"),
    plan("zero=4 shard=2", "P03", "none of 1, 2, 3", "parameters too", "zero=3 shard=2"),
    plan("dp=99999999999", "P03", "counts to 10,000,000", "a smaller dp", "dp=2"),
    plan("dp=" + "9" * 5000, "P03", "counts to 10,000,000", "a smaller dp", "dp=2"),
    plan("precision=fp8", "P04", "precision=fp8 is not known", "one of", "precision=bf16"),
    plan("dp=2 sync=evry_step", "P04", "did you mean every_step?", "one of", "dp=2 sync=every_step"),
    plan("pp=2 schedule=1f2b", "P04", "did you mean 1f1b?", "one of", "pp=2 schedule=1f1b"),
    plan("pp=2 schedule=interleaved:x=2", "P05", "takes no option x", "v", "pp=2 schedule=1f1b"),
    plan("dp=2 collective=rings", "P04", "not known", "one of", "dp=2 collective=auto"),
    plan("cp=3", "P12", "cp=3 does not divide the context 8", "context", "cp=2", "model.context"),
    plan("dp=16", "P11", "has no whole answer", "global_batch", "dp=4", "global_batch"),
    plan("dp=2 micros=3", "P11", "global_batch 8", "global_batch", "dp=2 micros=2", "global_batch"),
    plan("tp=4", "P12", "tp=4 splits the heads, and there are 2", "tp", "tp=2", "model.n_head"),
    plan("pp=3", "P13", "stages", "pp", "pp=2", "plan"),
    plan("dp=2 precision=fp64", "P15", "precision", "float64", "dp=2", "plan"),
    plan("dp=4 shard=3", "P11", "global_batch", "global_batch", "dp=2 shard=2", "global_batch"),
    plan("dp=-1", "P14", "the number of ranks is not known", "--launch.ranks", "dp=2", "plan"),
    plan("dp=2 sync=mine.py:Own", "C03", "no such file", "path", "dp=2", "plan"),
    plan("dp=2 sync=plain.py:Own", "P04", "has no policy Own", "subclass", "dp=2", "plan"),
]
ROOM = [
    Bad(f"no memory for {key} = {size}", (*TRAIN, f"--{key}", size), "M01", "GiB together, this machine has", "model", "simulate", exit=5)
    for key, size in (("model.d_model", "200000"), ("model.context", "90000000"))
]  # fmt: skip
DATA = [
    data("text:nothing.txt", "D02", "no such file or folder: nothing.txt", "--data.source", "absolute"),
    data("text:", "C06", "lacks its option path", "data.source", "a text file"),
    data(
        "bin:nothing.bin",
        "D02",
        "no such file or folder: nothing.bin",
        "--data.source",
        "absolute",
        "--model.vocab",
        "50",
    ),
    data("text:/proc/self/mem", "D03", "cannot read", "/proc/self/mem", "ls -l"),
    data("text:/dev/zero", "D03", "a pipe or a device", "/dev/zero", "to a file"),
    data("bin:/dev/zero", "D03", "a pipe or a device", "/dev/zero", "to a file", "--model.vocab", "50"),
    data("text:/dev/urandom", "D03", "a pipe or a device", "/dev/urandom", "to a file"),
    data("text:pipe", "D03", "a pipe or a device", "pipe", "to a file"),
    data("bin:pipe", "D03", "a pipe or a device", "pipe", "to a file", "--model.vocab", "50"),
    data("text:empty.txt", "D04", "empty", "empty.txt", "text:PATH"),
    data("bin:empty.txt", "D04", "empty", "empty.txt", "text:PATH", "--model.vocab", "50"),
    data(
        "text:/proc/self/environ/x",
        "D02",
        "no such file or folder: /proc/self/environ/x",
        "--data.source",
        "absolute",
    ),
    Bad(
        "out.dir below a file",
        (*TRAIN, "--out.dir", "words.txt"),
        "O01",
        "Not a directory",
        "words.txt",
        "--out.dir",
    ),
    Bad("out.dir in /proc", (*TRAIN, "--out.dir", "/proc/x"), "O01", "cannot write", "/proc/x", "--out.dir"),
    Bad("out.dir too long", (*TRAIN, "--out.dir", "a" * 300), "O01", "too long", "aaa", "shorter"),
]
USERS = [
    users(
        "a sink that raises",
        ("--out.track", "raises.py:Own"),
        1,
        "R01",
        "ZeroDivisionError",
        "raises.py:1",
        "",
    ),
    users(
        "a sink that imports",
        ("--out.track", "imports.py:Own"),
        1,
        "R01",
        "ModuleNotFound",
        "imports.py:1",
        "pip",
    ),
    users("a sink that is torn", ("--out.track", "torn.py:Own"), 1, "R01", "SyntaxError", "torn.py:1", ""),
    users(
        "a sink that is none",
        ("--out.track", "plain.py:Own"),
        2,
        "C02",
        "no sink Own",
        "--out.track",
        "FILE.py",
    ),
    users(
        "no such sink file",
        ("--out.track", "nope.py:Own"),
        2,
        "C02",
        "no such file",
        "--out.track",
        "FILE.py",
    ),
    users(
        "a loss that raises",
        ("--train.loss", "raises.py:Own"),
        1,
        "R01",
        "ZeroDivisionError",
        "raises.py:1",
        "",
    ),
    users(
        "a policy that raises",
        ("--plan", "dp=2 sync=raises.py:Own"),
        1,
        "R01",
        "ZeroDivision",
        "raises.py:1",
        "",
    ),
    users(
        "data that imports",
        ("--data.source", "imports.py:Own"),
        1,
        "R01",
        "ModuleNotFound",
        "imports.py:1",
        "pip",
    ),
    command("train recipes.py:raises", "R01", "ZeroDivisionError", "recipes.py:2 in raises", "", exit=1),
    command("train recipes.py:leaves", "R01", "SystemExit: 3", "recipes.py:4 in leaves", "", exit=1),
    command("train recipes.py:wants", "R01", "missing 1 required", "recipes.py:wants", "", exit=1),
    command("train raises.py:x", "R01", "ZeroDivisionError", "raises.py:1", "", exit=1),
    command(
        "train imports.py:x", "R01", "ModuleNotFoundError", "imports.py:1", "pip install nothing_of", exit=1
    ),
    command("train torn.py:x", "R01", "SyntaxError", "torn.py:1", "", exit=1),
    command(
        "train recipes.py:nothing", "C03", "not (Recipe, Plan)", "recipes.py:nothing", "return unisono.Recipe"
    ),
    command("train recipes.py:raise", "C03", "did you mean raises?", "recipes.py:raise", "functions there"),
    command("train recipes.py", "C03", "no function is named", "recipes.py", "recipes.py:FUNCTION"),
    command("train nope.py:f", "C03", "no such file", "nope.py:f", "path"),
]
COMMANDS = [
    command("train", "C04", "nothing says what to train", "unisono train", "unisono new", "train r.toml"),
    command("train --plan dp=2", "C04", "nothing says what to train", "unisono train", "--demo", "train --demo"),
    command("trian r.toml", "C04", "did you mean train?", "unisono", "--help", "train r.toml"),
    command("train r.toml --jsn", "C04", "did you mean --json?", "unisono train", "--help", "train r.toml --json"),
    command("train r.toml b.toml", "C04", "b.toml", "unisono train", "--help", "train r.toml"),
    command("train --demo r.toml", "C04", "--demo is a recipe", "unisono", "one of them", "train --demo"),
    command("train r.toml --plan", "C04", "lacks its value", "--plan", "plan", "train r.toml --plan dp=2"),
    command("train r.toml --seed", "C04", "lacks its value", "--seed", "seed", "train r.toml --seed 1"),
    command("train r.toml --resume", "C04", "expected one argument", "unisono train", "--help", "train r.toml"),
    command("--quiet", "C04", "without a verb", "unisono", "--help"),
    command("launch r.toml", "C04", "there is no scheduler 'r.toml'", "unisono launch", "one of: k8s ray slurm ssh"),
    command("verify r.toml --steps 0", "C00", "at least one step", "unisono verify", "--steps 3"),
    command("verify r.toml --dtype float16", "C04", "invalid choice", "unisono verify", "--help"),
    command("verify --step 3", "C04", "--replay", "unisono verify", "--replay RUN"),
    command("config shwo", "C04", "shwo", "unisono config", ""),
    command("config diff a", "C04", "takes 2 files", "unisono config", ""),
    command("doctor hang x", "C03", "no such run folder", "x", "name a folder like runs/NAME/ID"),
    command("doctor hang x y", "C04", "unknown argument y", "unisono doctor", "unisono doctor"),
    command("doctor --patience 3", "C04", "goes with hang", "unisono doctor", "hang RUN --patience"),
    command("doctor hang x --patience 0", "C02", "more than 0 seconds", "doctor hang", "--patience 10"),
    command("doctor hang runs/tiny/a", "O03", "not alive", "runs/tiny/a", "--resume", files=RUN),
    command("doctor x", "C04", "unknown argument x", "unisono doctor", "unisono doctor"),
    command("new r.toml", "C03", "is there already", "unisono new", "another name"),
    command("new r.txt", "C04", "does not end with .toml", "unisono new", "r.txt.toml"),
    command("new no/where.toml", "C03", "cannot be written", "unisono new", "another folder"),
    command("new", "C04", "required", "unisono new", "--help"),
    command("report", "C04", "RUN", "unisono report", "--help"),
    command("compare", "C04", "RUN", "unisono compare", "--help"),
    command("compare runs/tiny/a", "C04", "one run alone", "unisono compare", "RUN RUN", files=RUN),
    command("compare runs/tiny/a runs/tiny", "C04", "the same run", "unisono compare", "RUN RUN", files=RUN),
    command("compare runs/tiny/a gone", "C03", "no such run folder", "gone", "runs/NAME/ID", files=RUN),
    command("compare a b --out c.pdf", "C04", "pages are .html", "--out", "--out FILE.html"),
    command("sample runs/tiny/a --tokens x", "C04", "invalid int", "unisono sample", "--help", files=RUN),
    command("export runs/tiny/a --to cloud", "C04", "invalid choice", "unisono export", "--help", files=RUN),
]  # fmt: skip
LATEST = {"runs/tiny/latest": b"\x81\xff\0"}
RUNS = [
    run("report runs/tiny/a/checkpoints/step-000002", "C03", "is a checkpoint, not a run", "step-000002", "runs/tiny/a"),
    run("train --resume none", "C03", "no such run folder", "none", "runs/NAME/ID"),
    run("train --resume runs/tiny/b", "C03", "no such run folder", "runs/tiny/b", "runs/NAME/ID"),
    run("train --resume r.toml", "C03", "is a file, not the folder of a run", "r.toml", "runs/NAME/ID"),
    run("train --resume mixed", "C03", "holds no run", "mixed", "runs/NAME/ID"),
    run("train --resume runs/tiny/a", "K06", "no whole checkpoint", "runs/tiny/a", "without --resume"),
    run("train --resume runs", "K06", "no whole checkpoint", "runs/tiny/a", "without --resume"),
    run("train --resume runs/tiny", "K06", "no whole", "runs/tiny/a", "without --resume", runs__tiny__latest=b"\x81\xff\0"),
    run("train --resume runs/tiny", "K06", "no whole", "runs/tiny/a", "without --resume", runs__tiny__latest="../../etc\n"),
    run("report none", "C03", "no such run folder", "none", "runs/NAME/ID"),
    run("report mixed", "C03", "holds no run", "mixed", "runs/NAME/ID"),
    run("export none", "C03", "no such run folder", "none", "runs/NAME/ID"),
    run("sample none", "C03", "no such run folder", "none", "runs/NAME/ID"),
    run("verify --replay none", "C03", "no such run folder", "none", "runs/NAME/ID"),
]  # fmt: skip
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1"}  # fmt: skip


def environ(name: str, code: str, says: str, where: str, fix: str, **values: str) -> Bad:
    """Variables that contradict the recipe or each other."""
    return Bad(f"variables: {name}", TRAIN, code, says, where, fix, environ=values, good=TRAIN)


ENVIRONS = [
    environ("a value", "C02", "should be a number", "env UNISONO_TRAIN_LR", "learning rate", UNISONO_TRAIN_LR="fast"),
    environ("a key", "C01", "did you mean train.lr?", "env UNISONO_TRAIN_LRR", "train.lr", UNISONO_TRAIN_LRR="1"),
    environ("a plan", "P03", "at least 1", "env UNISONO_PLAN", "dp=1", UNISONO_PLAN="dp=0"),
    environ("RANK alone", "L02", "WORLD_SIZE", "RANK", "set all of them", RANK="0"),
    environ("a rank that is no number", "L02", "RANK is 'x'", "RANK", "torchrun", **(TORCHRUN | {"RANK": "x"})),
    environ("a rank beyond the world", "L02", "rank 2 of 2", "environment", "count from 0", **(TORCHRUN | {"RANK": "2"})),
    environ("another world", "P14", "3 were started", "plan", "start 2 ranks", **(TORCHRUN | {"WORLD_SIZE": "3"})),
    environ("a port beyond all", "L02", "port 99999", "MASTER_PORT", "below 65536", **(TORCHRUN | {"MASTER_PORT": "99999"})),
]  # fmt: skip
AT_ONCE: list[Bad] = [*TEXTS, *VALUES, *PLANS, *ROOM, *DATA, *USERS, *COMMANDS, *RUNS, *ENVIRONS]


@dataclass(frozen=True)
class Answer:
    """What a command said. left: what it left behind, in words."""

    code: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...]

    def row(self, name: str) -> str:
        """The value of a line of the last error block: `where`, `likely`, `try`, or "" for its first line."""
        block = self.err[self.err.rfind("error U-") :].splitlines()
        if not name:
            return block[0] if block else ""
        return next((line[10:] for line in block[1:] if line[2:9].strip() == name), "")


@contextlib.contextmanager
def working_folder(*files: Mapping[str, str | bytes]) -> Iterator[Path]:
    """A working folder with the files of all and these, which is the current one."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        put(place, {"r.toml": RECIPE, **FILES})
        os.mkfifo(place / "pipe")
        for more in files:
            put(place, more)
        before = Path.cwd()
        os.chdir(place)
        try:
            yield place
        finally:
            os.chdir(before)


def put(place: Path, files: Mapping[str, str | bytes]) -> None:
    for name, body in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(body.encode() if isinstance(body, str) else body)


def traces(place: Path) -> set[str]:
    """What could be left behind: files of the working folder and of /dev/shm, open descriptors, child processes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    descriptors = {
        f"descriptor {os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if _open(fd)
    }
    files = {str(path.relative_to(place)) for path in place.rglob("*") if "__pycache__" not in path.parts}
    return (
        files
        | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
        | descriptors
        | {f"child {n}" for n in children}
    )


def _open(fd: str) -> bool:
    """Whether it is a descriptor still, not that of the listing itself, and not a test runner's own."""
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return not target.startswith("/proc/")


def called(argv: tuple[str, ...], place: Path, environ: Mapping[str, str]) -> Answer:
    """A command through the command line's main function, in this process."""
    out, err, before, began = io.StringIO(), io.StringIO(), traces(place), time.perf_counter()
    with (
        mock.patch.dict(os.environ, environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = cli.main(list(argv))
    seconds = time.perf_counter() - began
    return Answer(code, out.getvalue(), err.getvalue(), seconds, tuple(sorted(traces(place) - before)))


def at_once(bad: Bad) -> tuple[Answer, list[str]]:
    """What is said of a mistake that is found before ranks start, and all that is not as it should be: in the answer,
    or when its remedy is followed."""
    with working_folder(bad.files) as place, mock.patch.object(fork_server, "start", _no_ranks):
        answer = called(bad.argv, place, bad.environ)
        problems = judged(bad, answer)
        if bad.good:
            put(place, bad.mended)
            after = called((*bad.good, "--dry-run"), place, {})
            if after.code:
                problems.append(f"the remedy does not work: {after.err}")
        return answer, problems


def _no_ranks(*_: object, **__: object) -> contextlib.nullcontext[None]:
    """In the place of a nursery, whose import would begin beside what is looked at here: nobody can run anything."""
    return contextlib.nullcontext()


def judged(bad: Bad, answer: Answer) -> list[str]:
    """What an answer lacks."""
    head, above = answer.row(""), answer.err[: answer.err.find("error U-")].partition("Traceback")
    checks = {
        f"exit {answer.code}, not {bad.exit}": answer.code == bad.exit,
        f"not U-{bad.code}: {head}": head.startswith(f"error U-{bad.code}  "),
        f"does not say {bad.says!r}: {head}": bad.says in head,
        f"where is not {bad.where!r}: {answer.row('where')}": bad.where in answer.row("where"),
        f"try is not {bad.fix!r}: {answer.row('try')}": bad.fix in answer.row("try"),
        f"no remedy: {head}": bool(answer.row("try")) or bad.exit not in (2, 5),
        f"a traceback of nobody's: {answer.err}": not above[1] or bad.code == "R01",
        f"more than six lines above it: {answer.err}": above[2].count("\n") <= 6,
        f"left behind: {answer.left}": not answer.left,
    }
    return [words for words, good in checks.items() if not good]


def main() -> int:
    """Prints a row for each: milliseconds, verdict, the mistake, and what is said of it."""
    bad = 0
    for one in AT_ONCE:
        answer, problems = at_once(one)
        bad += bool(problems)
        print(
            f"{answer.seconds * 1e3:5.0f} ms  {'FAIL' if problems else 'ok  '}  {one.name[:44]:<44}  {answer.row('')[:100]}"
        )
        for problem in problems:
            print(f"{'':16}{problem}")
    print(f"{len(AT_ONCE)} bad inputs, {bad} not answered as they should be")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
