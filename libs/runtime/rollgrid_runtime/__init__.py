"""What touches the outside and is shared by every service: NATS, KV, Redis, S3, lifecycle, health."""
