"""Scores finished samples; a verifier that fails gives a null reward with its status."""
