"""Take one training step: packing, forward, loss, backward and optimizer step."""
