"""The table of proven plans: those of `unisono verify examples/proof.toml --all`, proven on ranks that are threads.

python -m tests.verify.proven                     # every plan, a row of the table as each is proven
python -m tests.verify.proven --part 0/2          # every second one, from the first on
python -m tests.verify.proven --out docs/data/proven.md    # and the file of the documentation, once all are proven

Processes give the same numbers and take several times as long on two cores.
"""

import argparse
import sys
from pathlib import Path

from tests.threads import ThreadForkServer
from unisono.config.load import load
from unisono.verify.prover import ENTRY, Proof, prove_on
from unisono_contrib.verify.cover import covering

RECIPE = Path(__file__).parents[2] / "examples" / "proof.toml"


def row(proof: Proof) -> str:
    """One line of the table."""
    plan = " ".join(word for word in proof.plan.split() if word != "precision=fp64")
    figures = [_figure(proof, kind) for kind in ("loss", "grad", "param", "optim")]
    bound = "=" if proof.bit_identical else f"{proof.bound:.1e}"
    return f"| `{plan}` | {proof.ranks} | {proof.fidelity} | {' | '.join(figures)} | {bound} |"


def _figure(proof: Proof, kind: str) -> str:
    error = proof.max_rel_err[kind]
    return "=" if not error else f"{error:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="0/1", help="I/N: every Nth plan, from the Ith on")
    parser.add_argument("--out", type=Path, help="file whose table is written anew")
    args = parser.parse_args()
    first, every = map(int, args.part.split("/"))
    recipe = load(str(RECIPE)).recipe
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"dtype": "float64"})})
    plans = covering(recipe)[first::every]
    bad = 0
    rows: list[str] = []

    def each(proof: Proof) -> None:
        nonlocal bad
        rows.append(row(proof))
        print(rows[-1], flush=True)
        if not proof.passed:
            bad += 1
            print(f"{proof.plan}: {proof.first_divergence}: {proof.explanation}", file=sys.stderr, flush=True)

    prove_on(ThreadForkServer(ENTRY), recipe, plans, 3, each, keep_going=True)
    print(f"{len(plans) - bad} of {len(plans)} plans compute what one process computes", file=sys.stderr)
    if args.out:
        head, heading, _ = args.out.read_text(encoding="utf-8").partition("| --- |")
        rule = heading + " --- |" * 7
        args.out.write_text(f"{head}{rule}\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
