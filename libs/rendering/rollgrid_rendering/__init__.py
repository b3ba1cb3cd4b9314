"""Messages to token ids, history matching and bridges for rollgrid; transformers without torch.

`files` says which files make a tokenizer and how they are pinned, `messages` puts OpenAI's messages
into the form templates expect, `renderer` turns text and messages into ids and ids into text,
`offload` runs that outside the event loop.
"""
