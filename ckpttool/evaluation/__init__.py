"""Evaluation: environments, rollout, statistics, video."""
