"""What the tests of the promises share: a small actor, and a sleeper over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_actor import SmallActor

from torpor import Sleeper


@pytest.fixture
def actor() -> SmallActor:
    return SmallActor()


@pytest.fixture
def trained(actor: SmallActor) -> SmallActor:
    """The small actor after one step, its gradients still there."""
    actor.step(0)
    return actor


@pytest.fixture
def sleeper(trained: SmallActor, tmp_path: Path) -> Iterator[Sleeper]:
    """A sleeper over the trained actor, with the default file store; it has seen a step, so gradients are dead."""
    with Sleeper(trained.model, optimizer=trained.optimizer, store_dir=tmp_path) as made:
        trained.step(1)
        yield made
