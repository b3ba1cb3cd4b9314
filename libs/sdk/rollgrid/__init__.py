"""Client of rollgrid, the sampling fleet for teams that own their RL trainer."""
