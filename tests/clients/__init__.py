"""Other people's clients, unmodified, each in an environment of its own, against a whole stack on real vLLM."""
