"""What torch has once per process, for roles that share one: each sees the values that it left behind."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Globals:
    """The number of threads, whether algorithms must be deterministic, and the state of the random numbers."""

    threads: int
    is_deterministic: bool
    only_warns: bool
    random: Tensor

    @staticmethod
    def now() -> Globals:
        return Globals(
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_rng_state(),
        )

    def restore(self) -> None:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        torch.set_rng_state(self.random)


class TorchState:
    """Entered around every call of a role: puts the role's values in place, and on leaving those of before.

    A role begins with the values that it finds.
    """

    def __init__(self) -> None:
        self._own: Globals | None = None
        self._before: Globals | None = None

    def __enter__(self) -> None:
        self._before = Globals.now()
        if self._own is not None:
            self._own.restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._before is not None, "entered"
        self._own = Globals.now()
        self._before.restore()
