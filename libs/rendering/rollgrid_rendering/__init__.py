"""Messages to token ids, history matching and bridges for rollgrid; transformers without torch."""
