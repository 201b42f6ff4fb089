"""What libraries say of themselves while they are imported, kept out of a run's output."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def importing() -> Iterator[None]:
    """Around what may import transformers or torchao: their warnings are not logged, their errors are.

    transformers imports torchao where it is installed, whether a model needs it or not. torchao then warns of kernels
    for other GPUs that it cannot load, and torch of how torchao registers its classes. None of it is about the run.
    Levels that are stricter already stay.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logger.level, logging.ERROR))
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
