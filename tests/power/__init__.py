"""A power cut, simulated: only what had been flushed to the block device survives."""
