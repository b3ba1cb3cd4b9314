"""Tests of rollgrid; see AGENTS.md for what runs when."""
