"""Run the agents: python -m tests.agent_truth [--only PATTERN] [--record]."""

from tests.agent_truth.matrix import main

main()
