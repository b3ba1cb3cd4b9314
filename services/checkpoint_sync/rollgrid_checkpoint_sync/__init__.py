"""Control plane of weights: watches, verifies and plans versions for the fleet."""
