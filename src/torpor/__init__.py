"""Torpor puts a training actor to sleep and wakes it bit for bit.

sleeper = torpor.Sleeper(model, optimizer=optimizer)
with sleeper.asleep():
    ...  # the memory is yours
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.kinds import Fate, Role, State
    from torpor.ledger import Ledger
    from torpor.memory.vmm import pool
    from torpor.rules.derived import derived
    from torpor.sleeper import Sleeper

__version__ = "0.1.0"
__all__ = ["Fate", "Ledger", "Role", "Sleeper", "State", "__version__", "derived", "pool"]

_HOME = {
    "Fate": "torpor.kinds",
    "Role": "torpor.kinds",
    "State": "torpor.kinds",
    "Ledger": "torpor.ledger",
    "Sleeper": "torpor.sleeper",
    "derived": "torpor.rules.derived",
    "pool": "torpor.memory.vmm",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `import torpor` imports no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'torpor' has no attribute {name!r}; it has {__all__}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
