"""The SDK and the command line against the whole stack, on the scripted engine."""
