"""Evaluation of a policy: episodes, intervals and stored completions."""
