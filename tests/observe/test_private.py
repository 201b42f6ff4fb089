"""Secrets on a command line stay out of what a run writes down."""

import pytest

from unisono.observe.private import is_secret, without_secrets


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "a.toml", "--train.lr", "1"], ["train", "a.toml", "--train.lr", "1"]),
        (["--hf-token", "abc", "x"], ["--hf-token", "***", "x"]),
        (["--hf-token=abc"], ["--hf-token=***"]),
        (["API_KEY=abc"], ["API_KEY=***"]),
        (["s3://me:pass@host/x"], ["s3://me:***@host/x"]),
        (["--out.dir", "keys"], ["--out.dir", "keys"]),
        (["--data.tokenizer", "byte"], ["--data.tokenizer", "byte"]),
        (["--password"], ["--password"]),
    ],
)
def test_what_a_flags_name_calls_secret_is_not_told(words: list[str], told: list[str]) -> None:
    assert without_secrets(words) == told


def test_names() -> None:
    assert is_secret("WANDB_API_KEY") and is_secret("hf_token") and not is_secret("OMP_NUM_THREADS")
