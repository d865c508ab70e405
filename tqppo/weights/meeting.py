"""Where engines that receive weights together meet: one process group of the sender and all of them.

Runs in the sender. Each engine calls for itself, from a thread of its own; what concerns all of them is done once.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch.distributed as dist

from tqppo.errors import EngineError, PeerFailed
from tqppo.protocols import GroupPlace, Member, Party

NUM_KEPT = 64  # meetings that are remembered, so that an engine which comes too late learns why


class Once:
    """Work that several threads ask for. It is done once; all of them wait for its end, or for `fail`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: Future[None] | None = None

    def do(self, work: Callable[[], None]) -> None:
        with self._lock:
            is_first = self._done is None
            done = self._done = self._done or Future()
        if is_first:
            # In a thread of its own, because a collective cannot be interrupted: `fail` releases those that wait.
            threading.Thread(target=self._run, args=(work, done), daemon=True).start()
        done.result()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            done = self._done = self._done or Future()
            if not done.done():
                done.set_exception(error)

    def _run(self, work: Callable[[], None], done: Future[None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - those that wait get it
            self.fail(error)
            return
        with self._lock:
            if not done.done():
                done.set_result(None)


@dataclass(eq=False)
class SendGroup:
    """A process group of the sender and some members, used for every transfer to just these."""

    members: tuple[Member, ...]
    founder: Party
    name: str = field(default_factory=lambda: f"tqppo-{secrets.token_hex(8)}")
    joined: Once = field(default_factory=Once)
    process_group: dist.ProcessGroup | None = None

    @property
    def num_ranks(self) -> int:
        return 1 + sum(member.num_ranks for member in self.members)

    @property
    def backend(self) -> str:
        return self.members[0].backend

    def place(self, party: Party, member: Member) -> GroupPlace:
        before = self.members[: self.members.index(member)]
        first_rank = 1 + sum(each.num_ranks for each in before)
        return GroupPlace(self.name, first_rank, self.num_ranks, is_new=party == self.founder)

    def close(self, error: Exception | None = None) -> None:
        """Leave the group; with an error, break it off, so that members which still receive are not kept waiting."""
        self.joined.fail(error or EngineError("the group of weights was closed"))
        made, self.process_group = self.process_group, None
        if made is None:
            return
        if error is not None:
            made.abort()
        dist.destroy_process_group(made)


@dataclass(eq=False)
class Meeting:
    """The transfer of one party, from its first engine's arrival on."""

    party: Party
    members: dict[str, Member] = field(default_factory=dict)
    group: Future[SendGroup] = field(default_factory=Future)
    sent: Once = field(default_factory=Once)


class Meetings:
    """The transfers that are under way and the groups they use. All methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[str, Meeting] = {}
        self._groups: list[SendGroup] = []

    @property
    def groups(self) -> list[str]:
        return [group.name for group in self._groups]

    def meet(self, party: Party, member: Member, timeout_s: float) -> GroupPlace:
        """Wait until every engine of the party is here; returns this member's place in their group."""
        meeting = self.of(party)
        with self._lock:
            meeting.members[member.engine] = member
            if not meeting.group.done() and len(meeting.members) == len(party.engines):
                self._settle(meeting)
        try:
            return meeting.group.result(timeout_s).place(party, member)
        except futures.TimeoutError:
            late = [name for name in party.engines if name not in meeting.members]
            reason = f"{', '.join(late)} did not come for the weights within {timeout_s:g} s"
            self._fail(meeting, EngineError(f"{reason}; {', '.join(meeting.members)} waited"))
            return meeting.group.result().place(party, member)

    def of(self, party: Party) -> Meeting:
        with self._lock:
            meeting = self._meetings.setdefault(party.name, Meeting(party))
            while len(self._meetings) > NUM_KEPT:
                del self._meetings[next(iter(self._meetings))]
            return meeting

    def leave(self, party: Party, why: str) -> None:
        self._fail(self.of(party), PeerFailed(why))

    def close(self) -> None:
        for group in self._groups:
            group.close()
        self._groups = []

    def _settle(self, meeting: Meeting) -> None:
        """All are here: the group of these members, a new one if there is none. The caller holds the lock."""
        members = tuple(meeting.members[name] for name in meeting.party.engines)
        if len(backends := {member.backend for member in members}) > 1:
            each = ", ".join(f"{member.engine}: {member.backend}" for member in members)
            meeting.group.set_exception(EngineError(f"one group cannot use {' and '.join(sorted(backends))} ({each})"))
            return
        group = next((each for each in self._groups if each.members == members), None)
        if group is None:
            engines = set(meeting.party.engines)
            for old in [each for each in self._groups if engines & {member.engine for member in each.members}]:
                self._groups.remove(old)
                old.close()
            group = SendGroup(members, meeting.party)
            self._groups.append(group)
        meeting.group.set_result(group)

    def _fail(self, meeting: Meeting, error: EngineError) -> None:
        """End a transfer for all of its party. A group in which one member failed cannot be used again."""
        with self._lock:
            if not meeting.group.done():
                meeting.group.set_exception(error)
                return
            meeting.sent.fail(error)
            if meeting.group.exception() is not None or meeting.group.result() not in self._groups:
                return
            group = meeting.group.result()
            self._groups.remove(group)
        group.close(error)
