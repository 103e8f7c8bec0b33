"""What a task is: questions that can be asked for by number, and a reward for each answer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, SupportsFloat, TypedDict

from torpor.errors import UsageError


class Split(StrEnum):
    """Which questions. No question is in both."""

    TRAIN = "train"
    EVAL = "eval"


class Message(TypedDict):
    """One turn of a chat. Example: `{"role": "user", "content": "4 + 5 ="}`."""

    role: str
    content: str


Prompt = str | Sequence[Message]
"""A text to be continued as it is, or a chat for the tokenizer's template."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a task.

    Example: `Question(3, Split.TRAIN, "Reverse: abc =", solution="cba")`.
    """

    index: int
    split: Split
    prompt: Prompt
    solution: str | None = None
    """A completion worth 1, for supervised warm starts; None where no single one is known."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What the reward needs."""


class Task(ABC):
    """Questions by number, and what a completion is worth.

    `sample` is a pure function of the task's arguments, the split and the index: a resumed run asks for the
    next index and sees what an uninterrupted run would have seen.
    """

    name: str
    stop: tuple[str, ...] = ()
    """Any of these in a completion ends the answer; what follows is not looked at."""

    @abstractmethod
    def _sample(self, index: int, split: Split) -> Question:
        """The question; `index` is not negative. Train and eval never share one."""

    @abstractmethod
    def _reward(self, question: Question, answer: str) -> float:
        """What the answer (the completion up to the first stop) is worth, in [0, 1]."""

    def sample(self, index: int, split: Split = Split.TRAIN) -> Question:
        """Question number `index` of a split. Any index from 0 on works; a finite task starts over.

        Raises:
            UsageError: a negative index.
        """
        if index < 0:
            raise UsageError(f"question index {index} is negative", index=index)
        return self._sample(index, split)

    def reward(self, question: Question, completion: str) -> float:
        """What `completion` (the decoded tokens, without special tokens) is worth, in [0, 1].

        Raises:
            UsageError: the task's reward function returned something else.
        """
        reward = self._reward(question, _up_to_any(completion, self.stop))
        # A user's function may return anything, whatever its annotation says.
        if not isinstance(reward, SupportsFloat) or not (math.isfinite(reward) and 0 <= reward <= 1):
            raise UsageError(f"task {self.name} gave reward {reward!r}, rewards are numbers in [0, 1]", reward=reward)
        return float(reward)


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that tasks and the loop use."""

    @property
    def eos_token_id(self) -> int | None: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> Any: ...


def stop_token_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[int, ...]:
    """What ends a completion: each token whose text contains one of `stop`, and the end of text."""
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(len(tokenizer)))
    ending = {token_id for token_id, text in texts if any(end in text for end in stop)} if stop else set()
    if tokenizer.eos_token_id is not None:
        ending.add(tokenizer.eos_token_id)
    return tuple(sorted(ending))


def encode_solution(tokenizer: Tokenizer, task: Task, question: Question) -> list[int]:
    """Token ids of the question's solution and the end of text, for a supervised warm start.

    Raises:
        UsageError: the question has no solution, or the tokenizer no end of text.
    """
    if question.solution is None:
        raise UsageError(f"task {task.name} has no solution for question {question.index}: no warm start")
    if tokenizer.eos_token_id is None:
        raise UsageError("the tokenizer has no end-of-text token: a solution could not end")
    return [*tokenizer.encode(question.solution, add_special_tokens=False), tokenizer.eos_token_id]


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: a text as it is, a chat through the template, ready for the answer."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _up_to_any(text: str, stop: Sequence[str]) -> str:
    return text[: min((place for end in stop if (place := text.find(end)) >= 0), default=len(text))]
