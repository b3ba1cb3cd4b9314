"""The SDK without a stack: arrays, cursors, exceptions, and retries against a server that fails on purpose."""
