"""Tasks whose questions are made from a number, and the split of such questions by their text."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torpor.errors import UsageError
from torpor.rl.tasks.base import Prompt, Question, Split, Task

EVAL_SHARE = 0.2
"""Share of distinct questions that are held out."""
_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Draft:
    """A question without its place in a split."""

    key: str
    """Two drafts are the same question if their keys are equal."""
    prompt: Prompt
    solution: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class ProceduralTask(Task):
    """Questions numbered from 0 to `num_drafts - 1`, many of which may be the same.

    A question is held out by the hash of its text, so no text is on both sides, whatever the seed. Training
    draws numbers at random, with repetition. Evaluation goes through the distinct held-out questions in
    order, the same ones for every seed, and then starts over.
    """

    def __init__(self, name: str, *, num_drafts: int, seed: int) -> None:
        self.name = name
        self._num_drafts = num_drafts
        self._seed = seed
        self._held_out: dict[str, Draft] = {}
        self._num_searched = 0

    @abstractmethod
    def _draft(self, number: int) -> Draft:
        """Question `number`, the same at every call."""

    def _sample(self, index: int, split: Split) -> Question:
        draft = self._train_draft(f"{self._seed}:{index}") if split is Split.TRAIN else self._eval_draft(index)
        return Question(index, split, draft.prompt, draft.solution, draft.fields)

    def _train_draft(self, label: str) -> Draft:
        for attempt in range(_MAX_DRAWS):
            draft = self._draft(_hash(f"{label}:{attempt}") % self._num_drafts)
            if split_of(draft.key) is Split.TRAIN:
                return draft
        raise UsageError(f"task {self.name}: none of {_MAX_DRAWS} questions drawn is for training")

    def _eval_draft(self, index: int) -> Draft:
        while len(self._held_out) <= index and self._num_searched < self._num_drafts:
            draft = self._draft(self._num_searched)
            self._num_searched += 1
            if split_of(draft.key) is Split.EVAL:
                self._held_out.setdefault(draft.key, draft)
        if not self._held_out:
            raise UsageError(f"task {self.name}: none of its {self._num_drafts} questions is held out")
        held_out = list(self._held_out.values())
        return held_out[index % len(held_out)]


def split_of(key: str) -> Split:
    """The side of a question, by the hash of its text."""
    return Split.EVAL if _hash(key) < EVAL_SHARE * 2**64 else Split.TRAIN


def _hash(text: str) -> int:
    """64 bits that are the same in every process and version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
