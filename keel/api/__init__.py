"""The Python API: train from your own loop against an OpenAI-compatible endpoint."""
