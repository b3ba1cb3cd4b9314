"""Small models to start with: prepared once, cached, checked by digest."""
