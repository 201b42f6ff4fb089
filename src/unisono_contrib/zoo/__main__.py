"""`python -m unisono_contrib.zoo [NAME ...]`: play the bugs, and print a line for each.

`--markdown` prints the table of docs/zoo.md. The exit code is 3 where a bug is missed or a healthy twin accused.
"""

import argparse
import sys
from collections.abc import Sequence

from unisono_contrib.zoo.play import PlayedBug, lacks, names, played


def main(words: Sequence[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m unisono_contrib.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="which bugs: words in their names (all)")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/zoo.md")
    parser.add_argument("--explain", action="store_true", help="each explanation below its line")
    args = parser.parse_args(words)
    chosen = [name for name in names() if not args.names or any(word in name for word in args.names)]
    bugs: list[PlayedBug] = []
    print(_heads(args.markdown), flush=True)
    for bug in played(chosen):
        bugs.append(bug)
        print(_in_markdown(bug) if args.markdown else _line(bug, args.explain), flush=True)
    missing = {name: lacks(name) for name in chosen if lacks(name)}
    print("".join(f"\nnot played: {name}, {package} is not installed" for name, package in missing.items()))
    print(_sum(bugs))
    return 0 if all(bug.is_caught and bug.twin.passed for bug in bugs) else 3


def _heads(markdown: bool) -> str:
    if markdown:
        return "| bug | stack | mechanism | error | cause |\n| --- | --- | --- | --- | --- |"
    return f"{'bug':<34} {'stack':<32} {'step':>4} {'error':>8}  {'cause':<28} {'right':<6} twin"


def _line(bug: PlayedBug, explain: bool) -> str:
    step = "1" if bug.is_caught else "-"
    text = (
        f"{bug.address:<34} {bug.stack:<32} {step:>4} {bug.error:8.1e}  {bug.verdict.cause or 'not seen':<28}"
        f" {'yes' if bug.is_named else 'no':<6} {'passes' if bug.twin.passed else 'ACCUSED'}"
    )
    said = [str(bug.verdict), *([] if bug.twin.passed else [str(bug.twin)])]
    return "\n    ".join((text, *said)) if explain else text


def _in_markdown(bug: PlayedBug) -> str:
    address = bug.address
    repository, _, number = address.partition("#")
    link = f"[{address}](https://github.com/{repository}/issues/{number})"
    cause = f"`{bug.verdict.cause}`" + ("" if bug.is_named else f" (right: `{bug.cause}`)")
    return f"| {link} | {bug.stack} | {bug.mechanism} | {bug.error:.1e} | {cause} |"


def _sum(bugs: Sequence[PlayedBug]) -> str:
    caught, named = (sum(getattr(bug, name) for bug in bugs) for name in ("is_caught", "is_named"))
    twins = sum(bug.twin.passed for bug in bugs)
    return (
        f"{len(bugs)} bugs: {caught} found in one step, {named} with their cause;"
        f" {twins} of {len(bugs)} healthy twins pass"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
