"""Everything the rollgrid services share that touches the outside: bus, state, blobs, settings, telemetry."""
