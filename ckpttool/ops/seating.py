"""Checkpoints become entrants: restored one by one, and seated where they are played."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import cast

from ckpttool import plugins
from ckpttool.agents.envs import EnvSpec
from ckpttool.agents.policy import Backend
from ckpttool.agents.stacking import structure
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, MissingExtraError, UnsupportedError, UsageError
from ckpttool.layouts.recognise import recognised
from ckpttool.ops import results, training_step
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.entries import Entry
from ckpttool.ops.evaluate import Entrant, Place, enter, place_of, require_backend, versions_of
from ckpttool.ops.evaluation import Protocol
from ckpttool.ops.restore import Agent, agent_of, no_agent, own_sidecar, playable_binding


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """An entrant, its number in the order of the checkpoints, and what its result will be known by.

    `steps` is what its counters and its name say of its training, `versions` what it is to be played with.
    """

    number: int
    entrant: Entrant
    key: str
    steps: Mapping[str, int]
    versions: Mapping[str, str]

    @property
    def alike(self) -> Hashable:
        """What those that are played together share; a network that cannot be stacked shares nothing."""
        shape = structure(self.entrant.network)
        return self.entrant.place, self.number if shape is None else shape


class RequestError(Exception):
    """Carries an error that every checkpoint would meet, such as an unknown environment."""

    def __init__(self, error: CkpttoolError) -> None:
        super().__init__(str(error))
        self.error = error


class Seating:
    """Restores checkpoints for one request, and remembers what they have in common."""

    def __init__(
        self, env: str | None, how: Protocol, layout: str | None, facts: AgentFacts = NO_FACTS
    ) -> None:
        require_backend(how)
        self._env, self._how, self._layout, self._facts = env, how, layout, facts
        self._backend = cast(Backend, plugins.find("backends", how.backend).load())
        self._specs: dict[Place, EnvSpec] = {}
        self._layouts: dict[Hashable, str] = {}

    def seat(self, number: int, entry: Entry, *, alone: bool = False) -> Seat | None:
        """Return the entry's seat; None if it holds no policy, and nobody said that it does.

        `alone` takes a policy that no layout names, too, from an entry that is not named. Raise RequestError
        for what is wrong with the request itself, CkpttoolError for what is wrong with this checkpoint.
        """
        checkpoint = entry.open()
        agent = self._agent(checkpoint, named=entry.named, alone=alone)
        if agent is None and entry.named:
            raise no_agent(checkpoint)
        if agent is None or not (entry.named or any(part.acts for part in agent.binding.parts)):
            return None
        place = place_of(agent, self._env, self._how)
        spec = self._spec(place)
        entrant = enter(agent, place, self._how, spec)
        versions = versions_of(self._backend, spec)
        policy = results.digest_of_policy(entrant.network)
        key = results.key(policy, place.identity, self._how, versions)
        return Seat(number, entrant, key, training_step.steps_of(agent), versions)

    def _agent(self, checkpoint: Checkpoint, *, named: bool, alone: bool) -> Agent | None:
        """Return the checkpoint as an agent; what looks like one before it is of the same layout."""
        looks = tuple(
            (name, getattr(checkpoint.tree[path], "shape", None))
            for path, name in checkpoint.tree.names.items()
        )
        layout = self._layout or self._layouts.get(looks)
        binding = recognised(checkpoint, layout)
        # Beside agents, a model that no layout recognises is not taken for a policy unasked.
        if binding is None and (named or alone or self._facts):
            with nullcontext() if named else suppress(UsageError, UnsupportedError):
                binding = playable_binding(checkpoint, layout, self._how.network)
        if binding is None:
            return None
        self._layouts[looks] = binding.layout
        return agent_of(checkpoint, binding, own_sidecar(checkpoint), self._facts)

    def _spec(self, place: Place) -> EnvSpec:
        """Return what an agent must fit there."""
        if place not in self._specs:
            try:
                with place.make(1, self._how.engine, device=self._how.device) as one:
                    self._specs[place] = one.spec
            except (UsageError, MissingExtraError) as error:
                if place.trusted:
                    raise RequestError(error) from None
                raise
        return self._specs[place]
