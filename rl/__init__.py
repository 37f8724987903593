"""Stage two: DCPO, reinforcement learning of the chunk policy (objective, rollouts, rewards,
trainer, export)."""
