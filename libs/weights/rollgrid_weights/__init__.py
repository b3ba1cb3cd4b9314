"""Checkpoint manifests, validation and delta codecs for rollgrid; needs no torch."""
