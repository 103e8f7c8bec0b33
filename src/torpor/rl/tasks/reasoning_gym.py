"""Data sets of reasoning-gym (https://github.com/open-thought/reasoning-gym), scored by their checkers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torpor.errors import UnsupportedError, UsageError
from torpor.rl.tasks.base import Message, Question
from torpor.rl.tasks.procedural import Draft, ProceduralTask

_NUM_ENTRIES = 10_000
_DATASET_SEED = 0
"""Fixed: the held-out questions are the same for every seed of a run."""
_TRIES_PER_EXAMPLE = 20


Style = Literal["chat", "text"]


class ReasoningGymTask(ProceduralTask):
    """One-line answers to the questions of one data set, after worked examples.

    With `style="chat"` each worked example is a turn of the user and one of the assistant, for models with a
    chat template. With `style="text"` the prompt is continued as it is:

        State the final answer to the following arithmetic problem: 4 + 5 = 9
        State the final answer to the following arithmetic problem: 7 - 2 =

    The answer is the first line of the completion. The reward is the checker's score; `strict` gives 1 for
    a full score and 0 for any less, so a right number inside a sentence is worth nothing.
    """

    stop = ("\n",)

    def __init__(
        self,
        dataset: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        num_examples: int = 3,
        style: Style = "chat",
        strict: bool = True,
        seed: int = 0,
    ) -> None:
        """
        Args:
            parameters: settings of the data set, for example `{"max_terms": 2, "max_digits": 1}`.
            num_examples: worked examples, the same ones in every prompt, from the training side.

        Raises:
            UnsupportedError: reasoning-gym is not installed.
            UsageError: no such data set, or it refuses the parameters, or has too few distinct questions.
        """
        if style not in get_args(Style):
            raise UsageError(f"unknown style {style!r}, known: {', '.join(get_args(Style))}")
        self._dataset = _create(dataset, {"size": _NUM_ENTRIES, "seed": _DATASET_SEED, **(parameters or {})})
        super().__init__(f"reasoning_gym/{dataset}", num_drafts=len(self._dataset), seed=seed)
        self._strict = strict
        self._style = style
        self._examples: list[Draft] = []
        self._examples = self._worked_examples(num_examples)

    def _worked_examples(self, num_examples: int) -> list[Draft]:
        """Distinct questions with their answers."""
        examples: dict[str, Draft] = {}
        for attempt in range(_TRIES_PER_EXAMPLE * num_examples):
            if len(examples) == num_examples:
                break
            draft = self._train_draft(f"example:{attempt}")
            if draft.solution is not None:
                examples.setdefault(draft.key, draft)
        if len(examples) < num_examples:
            raise UsageError(f"{self.name} has only {len(examples)} distinct examples, not {num_examples}")
        return list(examples.values())

    def _draft(self, number: int) -> Draft:
        entry = self._dataset[number]
        question: str = entry["question"]
        answer: str | None = entry["answer"]
        before = " " if self._style == "text" else ""
        solution = None if answer is None else before + answer
        prompt = self._chat(question) if self._style == "chat" else self._text(question)
        return Draft(key=question, prompt=prompt, solution=solution, fields={"entry": entry})

    def _chat(self, question: str) -> list[Message]:
        turns: list[Message] = []
        for example in self._examples:
            turns.append({"role": "user", "content": example.key})
            turns.append({"role": "assistant", "content": example.solution or ""})
        return [*turns, {"role": "user", "content": question}]

    def _text(self, question: str) -> str:
        return "".join(f"{example.key}{example.solution}\n" for example in self._examples) + question

    def _reward(self, question: Question, answer: str) -> float:
        score = float(self._dataset.score_answer(answer.strip(), question.fields["entry"]))
        return float(score == 1.0) if self._strict else min(max(score, 0.0), 1.0)


def _create(dataset: str, parameters: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UnsupportedError("this task needs the package reasoning-gym: pip install 'torpor[tasks]'") from error
    if dataset not in DATASETS:
        raise UsageError(f"reasoning-gym has no data set {dataset!r}, it has: {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(dataset, **parameters)
    except (TypeError, AssertionError, ValueError) as error:  # unknown, or refused by the data set's config
        raise UsageError(f"reasoning-gym's {dataset} refuses {dict(parameters)}: {error}") from error
