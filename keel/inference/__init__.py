"""Engines that sample tokens: in this process, behind HTTP, and in pools of servers."""
