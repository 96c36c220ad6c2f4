"""Rendering of conversations to tokens: sampled tokens are kept exactly across turns."""
