"""The episode tree of a session: a pure fold of its events, the paths of it, and how a history is matched to it."""
