"""The pure parts of the examples."""
