"""How long OpenMP's threads spin before they sleep: decided by the environment when torch is loaded, never after.

Threads that spin at a barrier take the time of the one that they wait for as soon as another program wants the core:
beside a busy neighbour a step can take forty times as long. Threads that sleep at once make quiet steps half as slow
again. A limited count of spins is nearly as fast as torch's default on a quiet machine and far less slow beside others.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, MutableMapping, Sequence

from torch_odt.errors import OdtWarning

SPIN_COUNT = 30_000
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Once is enough: what the second start finds set was either this or the user's own choice.
GUARD = "TORCH_ODT_REEXECUTED"


def wait_policy_is_set(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether the environment says how OpenMP's threads wait.

    Example:
        >>> wait_policy_is_set({"OMP_WAIT_POLICY": "PASSIVE"})
        True
    """
    return any(name in environment for name in VARIABLES)


def reexecute_with_wait_policy(
    *,
    spin_count: int | None = SPIN_COUNT,
    environment: MutableMapping[str, str] = os.environ,
    words: Sequence[str] | None = None,
    execute: Callable[[str, list[str], MutableMapping[str, str]], object] = os.execve,
) -> None:
    """Start this process anew, once, with a wait policy; returns where one is set, or the start was made already.

    For programs that own their process, first thing in `main`: everything that they have done is done again. The
    process keeps its number; its memory, threads and open files do not survive.

    Args:
        spin_count: of OpenMP's threads; None takes the one that `explored_spin_count` finds for this machine, which
            takes up to a minute the first time and none later.
        environment: of this process, for tests.
        words: the command line; None takes the process's own.
        execute: replaces the process, for tests.

    Example:
        >>> reexecute_with_wait_policy(environment={"GOMP_SPINCOUNT": "30000"})
    """
    if wait_policy_is_set(environment) or GUARD in environment:
        return
    if words is None and sys.argv[:1] in ([""], ["-"]):
        warnings.warn(f"a program that is read from standard input cannot be started anew. {_ADVICE}", OdtWarning, 2)
        return
    if spin_count is None:
        # Most programs do without what it takes to try.
        from torch_odt.runtime.spin_count import explored_spin_count

        try:
            spin_count = explored_spin_count()
        except (RuntimeError, OSError) as error:
            warnings.warn(
                f"spin counts could not be tried, and {SPIN_COUNT} is taken: {error}", OdtWarning, stacklevel=2
            )
            spin_count = SPIN_COUNT
    line = list(sys.orig_argv if words is None else words)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        execute(
            sys.executable, [sys.executable, *line[1:]], {**environment, "GOMP_SPINCOUNT": str(spin_count), GUARD: "1"}
        )
    except OSError as error:
        warnings.warn(f"the process could not be started anew: {error}. {_ADVICE}", OdtWarning, stacklevel=2)


def warn_without_wait_policy(environment: MutableMapping[str, str] = os.environ) -> None:
    """Warn where torch was loaded without a wait policy: it is too late to set one in this process."""
    if not wait_policy_is_set(environment):
        warnings.warn(f"beside other programs, torch's threads take their time by spinning. {_ADVICE}", OdtWarning, 3)


_ADVICE = (
    f"Set GOMP_SPINCOUNT={SPIN_COUNT} in the environment before Python starts (or before torch is imported), "
    'or call torch_odt.runtime.reexecute_with_wait_policy() first thing in a script under `if __name__ == "__main__":`'
)
