"""Prompts of a JSONL file, scored by a Python function."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torpor.errors import UsageError
from torpor.rl.tasks.base import Prompt, Question, Split, Task

RewardFunction = Callable[[str, Mapping[str, Any]], float]
"""Called with the answer and the line's object; returns what the answer is worth, in [0, 1]."""


class JsonlTask(Task):
    """One question a line: `prompt` (a text, or a list of chat messages) and whatever the reward needs.

    Example line: `{"prompt": "2 + 2 =", "solution": " 4", "answer": 4}`. `solution`, where given, is a
    completion for supervised warm starts.

    Distinct prompts are shuffled once, the same way for every seed, and the first `eval_share` of them held
    out with all their lines. Training goes through its lines in a new order each epoch.
    """

    def __init__(
        self,
        path: Path,
        reward: str | RewardFunction,
        *,
        stop: tuple[str, ...] = (),
        eval_share: float = 0.1,
        seed: int = 0,
    ) -> None:
        """
        Args:
            reward: the function, or `package.module:function`, or `file.py:function`.

        Raises:
            UsageError: an unreadable file, a line without a prompt, fewer than two distinct prompts, or a
                reward function that cannot be found.
        """
        if not 0 < eval_share < 1:
            raise UsageError(f"eval_share is {eval_share}, it must be between 0 and 1")
        self.name = path.stem
        self.stop = stop
        self._seed = seed
        self._function = load_function(reward) if isinstance(reward, str) else reward
        self._lines = _split(path, list(_read(path)), eval_share)
        self._train_order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._lines[Split.TRAIN])))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order

    def _sample(self, index: int, split: Split) -> Question:
        lines = self._lines[split]
        epoch, position = divmod(index, len(lines))
        line = lines[self._train_order(epoch)[position] if split is Split.TRAIN else position]
        return Question(index, split, line["prompt"], line.get("solution"), line)

    def _reward(self, question: Question, answer: str) -> float:
        return self._function(answer, question.fields)


def load_function(spec: str) -> RewardFunction:
    """The function that `package.module:function` or `file.py:function` names.

    Raises:
        UsageError: the text has no such form, or names nothing that can be called.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise UsageError(f"{spec!r} is neither 'package.module:function' nor 'file.py:function'")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise UsageError(f"cannot load {place!r} for the function {name!r}: {error}") from error
    function = vars(module).get(name)
    if not callable(function):
        raise UsageError(f"{place!r} has no function {name!r}")
    loaded: RewardFunction = function
    return loaded


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", path=str(path)) from error
    for number, raw in enumerate(text.splitlines(), start=1):
        if raw.strip():
            yield _parse(raw, f"{path}, line {number}")


def _parse(raw: str, place: str) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place} is no JSON: {error}") from error
    if not isinstance(line, dict) or not isinstance(line.get("prompt"), (str, list)) or not line["prompt"]:
        raise UsageError(f"{place} is no object with a `prompt` (a text, or a list of messages)")
    return line


def _split(path: Path, lines: list[dict[str, Any]], eval_share: float) -> dict[Split, list[dict[str, Any]]]:
    keys = list(dict.fromkeys(_key(line["prompt"]) for line in lines))
    if len(keys) < 2:
        raise UsageError(f"{path} has {len(keys)} distinct prompts; training and evaluation need one each")
    random.Random("held out").shuffle(keys)
    num_held_out = min(max(1, round(eval_share * len(keys))), len(keys) - 1)
    held_out = set(keys[:num_held_out])
    return {
        Split.TRAIN: [line for line in lines if _key(line["prompt"]) not in held_out],
        Split.EVAL: [line for line in lines if _key(line["prompt"]) in held_out],
    }


def _key(prompt: Prompt) -> str:
    return json.dumps(prompt, sort_keys=True)
