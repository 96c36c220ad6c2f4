"""Rewards that ask another model: a judge behind an OpenAI-compatible endpoint, and a sequence-classification model."""
