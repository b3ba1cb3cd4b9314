"""Measurements; `make bench` prints them."""
