"""A shell completes what the parsers know, and nothing else."""

import shutil
import subprocess

import pytest

from unisono.cli import main
from unisono_contrib.verbs.completion import whole_parser


def completed(script: str, *words: str) -> list[str]:
    """What bash offers behind these words."""
    ask = f'{script}\nCOMP_WORDS=({" ".join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; _shtab_unisono; echo "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_verbs_flags_and_keys(capsys: pytest.CaptureFixture) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "unisono", "ver") == ["verify"]
    assert completed(script, "unisono", "train", "--train.war") == ["--train.warmup_steps"]
    assert completed(script, "unisono", "verify", "--stat") == ["--static"]
    assert completed(script, "unisono", "sample", "--train.l") == []
    assert completed(script, "unisono", "train", "mine") == []  # bash itself looks for files


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_words(shell: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    (verbs,) = (action for action in whole_parser()._actions if isinstance(action.choices, dict))
    for name, parser in verbs.choices.items():
        flags = [flag for action in parser._actions for flag in action.option_strings]
        assert name in script and all(flag.lstrip("-") in script for flag in flags)
