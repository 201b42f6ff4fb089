"""Warnings of a library's import are kept away, errors and later warnings are not."""

import logging

import pytest

from unisono.spec.quiet import importing

pytestmark = pytest.mark.parametrize("name", ["torchao", "torch.utils._pytree"])


def test_warnings_of_an_import_are_not_logged_and_errors_are(name: str, caplog) -> None:
    logger = logging.getLogger(name)
    with caplog.at_level(logging.WARNING), importing():
        logger.warning("Failed to load kernels")
        logger.error("broken")
    assert [record.message for record in caplog.records if record.name == name] == ["broken"]


def test_afterwards_all_is_as_before_also_behind_an_error(name: str) -> None:
    logger = logging.getLogger(name)
    before = logger.level
    with pytest.raises(ImportError), importing():
        raise ImportError("no such library")
    assert logger.level == before


def test_what_is_stricter_stays_so(name: str) -> None:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with importing():
            assert logger.level == logging.CRITICAL
    finally:
        logger.setLevel(before)
