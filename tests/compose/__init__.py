"""deploy/compose.yaml brought up for real, unmodified; `make test-compose`."""
