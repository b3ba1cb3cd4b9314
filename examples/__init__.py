"""Programs to copy; each runs as it is."""
