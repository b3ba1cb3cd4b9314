"""The episode tree of a session: a pure fold of its events, the paths of it, and how a history is matched to it.

`node` holds what a turn leaves behind, `tree` folds a session's events, `matching` finds where a conversation goes on,
`flatten` makes a closed session the sequences that trainers read.
"""

from .flatten import EpisodePath, TurnSpan, paths
from .matching import IdsMatch, Match, match, match_ids
from .node import Branch, Lost, Node, answer_of, counts
from .tree import SessionEvent, Tree

__all__ = [
    "Branch", "EpisodePath", "IdsMatch", "Lost", "Match", "Node", "SessionEvent", "Tree", "TurnSpan", "answer_of",
    "counts", "match", "match_ids", "paths",
]  # fmt: skip
