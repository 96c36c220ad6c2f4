"""The processes that reward functions run in: a fork server and the workers it forks."""
