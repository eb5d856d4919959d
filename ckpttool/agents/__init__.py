"""Restored agents: networks, backends, environments, rollouts."""
