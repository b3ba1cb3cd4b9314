"""Verifiers: pure functions from a finished sample to a number."""
