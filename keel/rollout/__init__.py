"""From a task to training samples: environments, conversations token by token, pools of engines, the scheduler."""
