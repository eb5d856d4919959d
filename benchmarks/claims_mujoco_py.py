"""Plays exported policies in Gym's MuJoCo tasks of version 3: the authors' simulator in results/claims.md.

Needs an environment of its own: Python 3.8, gym 0.21.0, free-mujoco-py 2.1.6 (which brings
MuJoCo 2.1.0) and onnxruntime. The policies are what `ckpttool convert AGENT.zip --to onnx NAME.onnx` writes.

    python claims_mujoco_py.py 'SAC Hopper-v3' sac.onnx Hopper-v3 100 >> returns.jsonl
    python claims_mujoco_py.py 'PPO Walker2d-v3' ppo.onnx Walker2d-v3 100 --time-feature >> returns.jsonl
"""

import json
import sys

import gym
import numpy as np
import onnxruntime

SEED = 1000


def main() -> None:
    """Play the episodes and print one line of JSON."""
    name, file, env_id, episodes = sys.argv[1:5]
    timed = "--time-feature" in sys.argv
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    policy = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    observed = policy.get_inputs()[0].name
    env = gym.make(env_id)
    returns = []
    for number in range(int(episodes)):
        env.seed(SEED + number)
        obs, total, done, step = env.reset(), 0.0, False, 0
        while not done:
            # sb3_contrib's TimeFeatureWrapper: the share of the 1,000 steps that is left.
            timed_obs = np.append(obs, 1 - step / 1000) if timed else obs
            (actions,) = policy.run(None, {observed: np.asarray(timed_obs, np.float32)[None]})
            obs, reward, done, _ = env.step(np.clip(actions[0], env.action_space.low, env.action_space.high))
            total, step = total + reward, step + 1
        returns.append(float(total))
    spread = float(np.std(returns, ddof=1))
    print(
        json.dumps(
            {"agent": name, "env": env_id, "mean": float(np.mean(returns)), "std": spread, "returns": returns}
        )
    )


if __name__ == "__main__":
    main()
