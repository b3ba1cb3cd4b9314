"""Samples jobs on a vLLM engine (or the scripted one) and publishes what finished."""
