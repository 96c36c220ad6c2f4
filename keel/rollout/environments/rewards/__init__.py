"""Reward functions: built-in ones, user functions, and the worker processes that run them."""
