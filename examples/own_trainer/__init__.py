"""A trainer of one's own on rollgrid's samples: model, optimizer and losses are here, sampling is not."""
