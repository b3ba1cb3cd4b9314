"""Multi-turn rollouts: the environment is here, sampling is not."""
