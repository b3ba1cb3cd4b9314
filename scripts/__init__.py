"""Tools of the workspace: set-up, lock, import rules."""
