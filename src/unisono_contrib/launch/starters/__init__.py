"""Starters that few use, one a file."""
