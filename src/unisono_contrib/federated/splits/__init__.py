"""Splits, one a file: which client has which samples."""
