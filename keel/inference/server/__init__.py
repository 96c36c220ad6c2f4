"""The OpenAI-compatible HTTP server and the access rules every Keel server shares."""
