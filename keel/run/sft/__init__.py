"""Supervised fine-tuning: recorded conversations in place of rollouts, cross-entropy in place of a reward."""
