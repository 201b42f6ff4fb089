"""Flags by which a verb says which checkpoint of a run it reads, and which weights of it."""

from unisono.verbs import Parser


def add_checkpoint_flags(parser: Parser) -> None:
    """`--which latest|best` and `--weights model|ema`."""
    parser.add_argument(
        "--which", choices=("latest", "best"), default="latest",
        help="checkpoint: the newest, or that of the best validation, which [early_stopping] keeps",
    )  # fmt: skip
    parser.add_argument(
        "--weights", choices=("model", "ema"), default="model",
        help="the weights that were trained, or their average over updates, which [ema] keeps",
    )  # fmt: skip
