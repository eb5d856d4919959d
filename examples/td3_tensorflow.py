"""TD3 in TensorFlow: networks, one compiled update, and object-based checkpoints."""

from __future__ import annotations

from pathlib import Path

import keras  # type: ignore[import-untyped,unused-ignore]  # ships no types
import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]  # ships no types
from td3_contract import AgentSpec, Batch, Float32

ADAM_EPSILON = 1e-7


def prepare(seed: int) -> None:
    """Seed TensorFlow; one thread, because these networks are too small to share out."""
    keras.utils.set_random_seed(seed)  # tf.random.set_seed alone leaves Keras' initializers unseeded
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def versions() -> dict[str, str]:
    """Name the versions of TensorFlow and Keras."""
    return {"tensorflow": tf.__version__, "keras": keras.__version__}


def checkpoint_files(path: Path) -> list[Path]:
    """List the index and the data shards that share the prefix `path`."""
    return sorted(path.parent.glob(path.name + ".*"))


class Actor(tf.keras.Model):  # type: ignore[misc]  # untyped base
    """Policy: obs [batch, obs_dim] to action [batch, action_dim] within +-max_action."""

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__()
        self.l1 = tf.keras.layers.Dense(spec.hidden[0])
        self.l2 = tf.keras.layers.Dense(spec.hidden[1])
        self.l3 = tf.keras.layers.Dense(spec.action_dim)
        self.max_action = spec.max_action

    def call(self, obs: tf.Tensor) -> tf.Tensor:
        """Return the action of the policy."""
        hidden = tf.nn.relu(self.l1(obs))
        hidden = tf.nn.relu(self.l2(hidden))
        return self.max_action * tf.tanh(self.l3(hidden))


class QFunction(tf.keras.Model):  # type: ignore[misc]  # untyped base
    """Value of an action: obs [batch, obs_dim] and action [batch, action_dim] to [batch, 1]."""

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__()
        self.l1 = tf.keras.layers.Dense(spec.hidden[0])
        self.l2 = tf.keras.layers.Dense(spec.hidden[1])
        self.l3 = tf.keras.layers.Dense(1)

    def call(self, obs: tf.Tensor, action: tf.Tensor) -> tf.Tensor:
        """Return the estimated return."""
        hidden = tf.nn.relu(self.l1(tf.concat([obs, action], axis=1)))
        hidden = tf.nn.relu(self.l2(hidden))
        return self.l3(hidden)


class Critic(tf.keras.Model):  # type: ignore[misc]  # untyped base
    """Twin value functions, learned side by side."""

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__()
        self.q1 = QFunction(spec)
        self.q2 = QFunction(spec)

    def call(self, obs: tf.Tensor, action: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return both estimates, [batch, 1] each."""
        return self.q1(obs, action), self.q2(obs, action)


class TD3(tf.Module):  # type: ignore[misc]  # untyped base
    """Twin delayed deep deterministic policy gradient agent."""

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__()
        self.spec = spec
        self.actor = Actor(spec)
        self.actor_target = Actor(spec)
        self.critic = Critic(spec)
        self.critic_target = Critic(spec)
        self.actor_optimizer = _adam(spec)
        self.critic_optimizer = _adam(spec)
        self.total_it = tf.Variable(0, dtype=tf.int64, trainable=False)
        # A manager is not trackable, so holding it here adds nothing to the checkpoint.
        self._manager: tf.train.CheckpointManager | None = None
        self._create_variables()

    def _create_variables(self) -> None:
        """Create every variable now: a checkpoint holds, and restores, only those that exist."""
        obs = tf.zeros([1, self.spec.obs_dim])
        action = tf.zeros([1, self.spec.action_dim])
        for actor in self.actor, self.actor_target:
            actor(obs)
        for critic in self.critic, self.critic_target:
            critic(obs, action)
        self.actor_target.set_weights(self.actor.get_weights())
        self.critic_target.set_weights(self.critic.get_weights())
        self.actor_optimizer.build(self.actor.trainable_variables)
        self.critic_optimizer.build(self.critic.trainable_variables)

    def select_action(self, obs: Float32) -> Float32:
        """Return the deterministic action [action_dim] for one observation [obs_dim]."""
        action: Float32 = self._act(tf.constant(obs[None]))[0].numpy()
        return action

    @tf.function  # type: ignore[untyped-decorator]  # untyped library
    def _act(self, obs: tf.Tensor) -> tf.Tensor:
        return self.actor(obs)

    def update(self, batch: Batch) -> None:
        """Make one step of both critics and, every `policy_freq` calls, of actor and targets."""
        self._update(*(tf.constant(array) for array in batch))

    @tf.function  # type: ignore[untyped-decorator]  # untyped library
    def _update(
        self,
        obs: tf.Tensor,
        action: tf.Tensor,
        next_obs: tf.Tensor,
        reward: tf.Tensor,
        not_done: tf.Tensor,
    ) -> None:
        self.total_it.assign_add(1)
        self._update_critic(obs, action, self._target_value(next_obs, reward, not_done))
        if self.total_it % self.spec.policy_freq == 0:
            self._update_actor(obs)
            self._track_targets()

    def _target_value(self, next_obs: tf.Tensor, reward: tf.Tensor, not_done: tf.Tensor) -> tf.Tensor:
        """Return the value [batch, 1] that both critics are pulled to, with a smoothed action."""
        spec = self.spec
        next_action = self.actor_target(next_obs)
        limit = spec.noise_clip * spec.max_action
        noise = tf.random.normal(tf.shape(next_action)) * (spec.policy_noise * spec.max_action)
        next_action = next_action + tf.clip_by_value(noise, -limit, limit)
        next_action = tf.clip_by_value(next_action, -spec.max_action, spec.max_action)
        q1, q2 = self.critic_target(next_obs, next_action)
        return reward + not_done * spec.discount * tf.minimum(q1, q2)

    def _update_critic(self, obs: tf.Tensor, action: tf.Tensor, target: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            q1, q2 = self.critic(obs, action)
            loss = tf.reduce_mean((q1 - target) ** 2) + tf.reduce_mean((q2 - target) ** 2)
        _step(self.critic_optimizer, tape, loss, self.critic)

    def _update_actor(self, obs: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic.q1(obs, self.actor(obs)))
        _step(self.actor_optimizer, tape, loss, self.actor)

    def _track_targets(self) -> None:
        """Move each target a fraction tau towards its network."""
        for network, slow in (self.actor, self.actor_target), (self.critic, self.critic_target):
            for value, kept in zip(network.variables, slow.variables, strict=True):
                kept.assign_add(self.spec.tau * (value - kept))

    def save(self, folder: Path, step: int, keep: int) -> Path:
        """Write the bundle `ckpt-<step>`, drop all but the `keep` newest, return its prefix."""
        if self._manager is None:
            self._manager = tf.train.CheckpointManager(
                tf.train.Checkpoint(policy=self), str(folder), max_to_keep=keep
            )
        return Path(self._manager.save(checkpoint_number=step))

    def restore(self, path: Path) -> None:
        """Fill networks, optimizers and `total_it` from a prefix; all of them must be in it."""
        # read, not restore: a count of saves is the manager's affair, and not every writer stores one.
        status = tf.train.Checkpoint(policy=self).read(str(path))
        status.assert_existing_objects_matched().expect_partial()


def _adam(spec: AgentSpec) -> tf.keras.optimizers.Adam:
    return tf.keras.optimizers.Adam(spec.learning_rate, epsilon=spec.adam_epsilon)


def _step(
    optimizer: tf.keras.optimizers.Optimizer,
    tape: tf.GradientTape,
    loss: tf.Tensor,
    network: tf.keras.Model,
) -> None:
    variables = network.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
