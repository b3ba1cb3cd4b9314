"""The fleet behind the seams of trainer frameworks, one module and one extra for each; imported by nothing else."""
