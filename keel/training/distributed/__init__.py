"""Run the trainer on several ranks: process group, commands and FSDP2."""
