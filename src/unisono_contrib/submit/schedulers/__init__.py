"""Schedulers, one a file: the class that writes a job for it."""
