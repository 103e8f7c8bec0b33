"""String tasks: for tests, and small enough for a model of a million parameters."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Literal

from torpor.errors import UsageError
from torpor.rl.tasks.base import Question
from torpor.rl.tasks.procedural import Draft, ProceduralTask

Operation = Literal["reverse", "copy"]
_OPERATIONS: dict[Operation, Callable[[str], str]] = {"reverse": lambda text: text[::-1], "copy": str}
_END_OF_QUESTION = "="
_NUM_DRAFTS = 2**31


class StringTask(ProceduralTask):
    """Reverse or copy a random string of lower-case letters.

    Example: the prompt `"abc="`, the solution `"cba"`. The reward is the share of characters that are right
    and in their place, so 1 is an exact answer.
    """

    alphabet = string.ascii_lowercase + _END_OF_QUESTION
    """Every character of prompts and solutions."""

    def __init__(
        self, operation: Operation = "reverse", *, min_length: int = 3, max_length: int = 6, seed: int = 0
    ) -> None:
        """Raises UsageError where the lengths are no range from 1 on, or the operation is unknown."""
        if not 1 <= min_length <= max_length:
            raise UsageError(f"min_length {min_length} and max_length {max_length} must be 1 <= min <= max")
        if operation not in _OPERATIONS:
            raise UsageError(f"unknown operation {operation!r}, known: {', '.join(_OPERATIONS)}")
        super().__init__(operation, num_drafts=_NUM_DRAFTS, seed=seed)
        self._apply = _OPERATIONS[operation]
        self._lengths = (min_length, max_length)

    def _draft(self, number: int) -> Draft:
        generator = random.Random(number)
        length = generator.randint(*self._lengths)
        text = "".join(generator.choices(string.ascii_lowercase, k=length))
        return Draft(key=text, prompt=text + _END_OF_QUESTION, solution=self._apply(text))

    def _reward(self, question: Question, answer: str) -> float:
        solution = question.solution or ""
        num_right = sum(a == b for a, b in zip(answer, solution, strict=False))
        return num_right / max(len(answer), len(solution))
