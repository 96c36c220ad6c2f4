"""From tasks to training samples: environments, chat rendering, recorded trajectories and the rollout scheduler."""
