"""Engines that sample tokens: in this process, behind HTTP, and pools of servers."""
