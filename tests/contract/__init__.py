"""The wire: golden bytes, names, topology.  No I/O."""
