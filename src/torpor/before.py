"""A check before a method of one object of somebody else's, until it is taken away."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class Before:
    """Calls `check` with the arguments of each call of a method, and then the method, unless the check raises."""

    def __init__(self, owner: Any, method: str, check: Callable[..., None]) -> None:
        self._owner = owner
        self._method = method
        original = getattr(owner, method)

        @wraps(original)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return original(*args, **kwargs)

        self._checked = checked
        self._before = vars(owner).get(method)
        setattr(owner, method, checked)

    def remove(self) -> None:
        """The method is as it was, unless somebody replaced it meanwhile: then the check goes with that."""
        if vars(self._owner).get(self._method) is self._checked:
            if self._before is None:
                delattr(self._owner, self._method)
            else:
                setattr(self._owner, self._method, self._before)
