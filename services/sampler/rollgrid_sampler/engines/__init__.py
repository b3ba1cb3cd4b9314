"""Engines: what generates.  `base` says what one is; `vllm`, `scripted` and `openai_http` are three of them."""
