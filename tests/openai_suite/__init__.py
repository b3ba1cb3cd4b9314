"""The unmodified `openai` SDK against rollgrid and against a plain vLLM server: one suite, two endpoints."""
