"""Rendering conversations to tokens, token-exact across turns."""
