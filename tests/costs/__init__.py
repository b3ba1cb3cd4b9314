"""What a group costs: flushes of the NATS server, operations of Redis."""
