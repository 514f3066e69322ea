"""The OpenAI-compatible front end: an HTTP process of its own in front of one or several Triton servers."""
