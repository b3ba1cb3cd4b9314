"""Deltas: the elements that changed between two states of the weights, lossless.  `docs/reference/delta-format.md`."""
