"""One fully filled example of everything that crosses a process boundary, by topic."""
