"""What samples: the engine in this process, OpenAI-compatible servers, vLLM. It imports no other room but settings."""
