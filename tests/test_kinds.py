from __future__ import annotations

import pickle

import pytest

from torpor.kinds import Fate, Role, State
from torpor.rules.base import Standing
from torpor.rules.walk import Place


@pytest.mark.parametrize("kind", [Role, Fate, State, Standing, Place])
def test_looking_at_a_member_runs_no_code(kind) -> None:
    for member in kind:
        assert vars(kind)[member.name] is member


def test_members_are_what_they_were() -> None:
    assert Fate("moved") is Fate.MOVED is Fate["MOVED"]
    assert pickle.loads(pickle.dumps(Fate.MOVED)) is Fate.MOVED
    assert str(Fate.MOVED) == "moved"
    with pytest.raises(AttributeError):
        Fate.MOVED = Fate.KEPT
