"""Classes of libraries that rules know and never import: whoever uses them has imported them."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module_name: str, name: str) -> Any:
    """The class or other object, if somebody imported its module and this version has it; else None."""
    return getattr(sys.modules.get(module_name), name, None)
