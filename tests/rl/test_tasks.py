"""Tasks: numbered questions, splits that share nothing, rewards in [0, 1]."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torpor.errors import UsageError
from torpor.rl.models import char_tokenizer
from torpor.rl.tasks.base import Question, Split, Task, encode_prompt, encode_solution, stop_token_ids
from torpor.rl.tasks.jsonl import JsonlTask, load_function
from torpor.rl.tasks.reasoning_gym import ReasoningGymTask
from torpor.rl.tasks.strings import StringTask

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
NUM_QUESTIONS = 150


def right(answer: str, line: dict[str, Any]) -> float:
    return float(answer.strip() == str(line["answer"]))


def out_of_range(answer: str, line: dict[str, Any]) -> float:
    return 1.5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{a} + {b} =", "answer": a + b, "solution": f" {a + b}"} for a in range(6) for b in range(5)]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, lines[0], lines[7]]) + "\n\n")
    return path


def _make(kind: str, file: Path, seed: int = 0) -> Task:
    match kind:
        case "reverse" | "copy":
            return StringTask(kind, seed=seed)
        case "chain_sum":
            pytest.importorskip("reasoning_gym")
            return ReasoningGymTask("chain_sum", ONE_DIGIT, seed=seed)
        case "text":
            pytest.importorskip("reasoning_gym")
            return ReasoningGymTask("chain_sum", ONE_DIGIT, style="text", seed=seed)
        case _:
            return JsonlTask(file, right, eval_share=0.2, seed=seed)


KINDS = ["reverse", "copy", "chain_sum", "text", "jsonl"]


def _prompts(task: Task, split: Split, count: int = NUM_QUESTIONS) -> list[str]:
    return [json.dumps(task.sample(index, split).prompt) for index in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_is_a_function_of_seed_split_and_index(kind: str, file: Path) -> None:
    task, again, other = _make(kind, file), _make(kind, file), _make(kind, file, seed=1)
    for split in Split:
        forwards = [task.sample(index, split) for index in range(40)]
        backwards = [again.sample(index, split) for index in reversed(range(40))][::-1]
        assert forwards == backwards
    assert _prompts(task, Split.TRAIN) != _prompts(other, Split.TRAIN)
    assert _prompts(task, Split.EVAL) == _prompts(other, Split.EVAL), "every seed is judged by the same questions"


@pytest.mark.parametrize("kind", KINDS)
def test_no_question_is_in_both_splits(kind: str, file: Path) -> None:
    train = {prompt for seed in range(3) for prompt in _prompts(_make(kind, file, seed), Split.TRAIN)}
    held_out = set(_prompts(_make(kind, file), Split.EVAL))
    assert len(train) > 1
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_is_worth_one_and_nonsense_less(kind: str, file: Path) -> None:
    task = _make(kind, file)
    for split in Split:
        for index in range(20):
            question = task.sample(index, split)
            assert question.solution is not None
            assert task.reward(question, question.solution) == 1
            assert task.reward(question, "?") == 0
            assert task.reward(question, "") == 0


@pytest.mark.parametrize("kind", ["chain_sum", "text"])
def test_what_follows_a_stop_is_not_looked_at(kind: str, file: Path) -> None:
    task = _make(kind, file)
    question = task.sample(0)
    assert task.reward(question, f"{question.solution}\nand more") == 1
    assert task.reward(question, f"\n{question.solution}") == 0


def test_a_function_of_a_module_by_name() -> None:
    assert load_function("json:dumps") is json.dumps


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(UsageError, match="-1"):
        StringTask().sample(-1)


# --- strings -----------------------------------------------------------------------------------------------


def test_strings_are_reversed_and_scored_by_place() -> None:
    task = StringTask("reverse", min_length=4, max_length=4)
    question = task.sample(0)
    assert isinstance(question.prompt, str)
    text = question.prompt.removesuffix("=")
    assert question.solution == text[::-1]
    assert task.reward(question, text[:0:-1]) == 0.75
    assert task.reward(question, text[::-1] + "aaaa") == 0.5
    assert set(question.prompt) <= set(task.alphabet)


def test_string_lengths_cover_the_range() -> None:
    task = StringTask("copy", min_length=2, max_length=4)
    assert {len(task.sample(index).solution or "") for index in range(60)} == {2, 3, 4}
    with pytest.raises(UsageError, match="min_length 5 and max_length 4"):
        StringTask(min_length=5, max_length=4)
    with pytest.raises(UsageError, match="rotate"):
        StringTask("rotate")  # type: ignore[arg-type]


# --- reasoning-gym -----------------------------------------------------------------------------------------


def test_examples_stand_before_the_question_and_are_not_held_out() -> None:
    pytest.importorskip("reasoning_gym")
    chat = ReasoningGymTask("chain_sum", ONE_DIGIT, num_examples=2)
    turns = chat.sample(0, Split.EVAL).prompt
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2 + ["user"]
    held_out = {chat.sample(index, Split.EVAL).prompt[-1]["content"] for index in range(60)}
    for asked, answered in zip(turns[:-1:2], turns[1::2], strict=True):
        left, sign, right_ = asked["content"].removesuffix(" =").rsplit(maxsplit=3)[-3:]
        assert int(answered["content"]) == (int(left) + int(right_) if sign == "+" else int(left) - int(right_))
        assert asked["content"] not in held_out
    text = ReasoningGymTask("chain_sum", ONE_DIGIT, num_examples=2, style="text").sample(0, Split.EVAL).prompt
    assert (
        text
        == "".join(
            f"{asked['content']} {answered['content']}\n"
            for asked, answered in zip(turns[:-1:2], turns[1::2], strict=True)
        )
        + turns[-1]["content"]
    )


def test_strict_gives_nothing_for_a_number_in_a_sentence() -> None:
    pytest.importorskip("reasoning_gym")
    strict = ReasoningGymTask("chain_sum", ONE_DIGIT)
    lenient = ReasoningGymTask("chain_sum", ONE_DIGIT, strict=False)
    question = strict.sample(0)
    sentence = f"it is {question.solution}, I think"
    assert strict.reward(question, sentence) == 0
    assert 0 < lenient.reward(question, sentence) < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "chain_sums"}, "no data set 'chain_sums'"),
        ({"dataset": "chain_sum", "parameters": {"max_term": 2}}, "max_term"),
        ({"dataset": "chain_sum", "parameters": {"min_terms": 9}}, "max_terms must be"),
        ({"dataset": "chain_sum", "style": "prose"}, "prose"),
        ({"dataset": "chain_sum", "parameters": ONE_DIGIT, "num_examples": 300}, "distinct examples, not 300"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_refused(arguments: dict[str, Any], message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UsageError, match=message):
        ReasoningGymTask(**arguments)


# --- JSONL -------------------------------------------------------------------------------------------------


def test_each_epoch_has_every_training_line_once_in_a_new_order(file: Path) -> None:
    task = JsonlTask(file, right, eval_share=0.2)
    num_lines = 32 - sum(1 for prompt in _all_lines(file) if prompt in set(_plain(task, Split.EVAL)))
    first, second = _plain(task, Split.TRAIN, 0, num_lines), _plain(task, Split.TRAIN, num_lines, 2 * num_lines)
    expected = sorted(prompt for prompt in _all_lines(file) if prompt not in set(_plain(task, Split.EVAL)))
    assert sorted(first) == sorted(second) == expected
    assert first != second


def _all_lines(file: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines() if line]


def _plain(task: Task, split: Split, begin: int = 0, end: int = 40) -> list[str]:
    return [str(task.sample(index, split).prompt) for index in range(begin, end)]


def test_a_chat_prompt_and_a_function_by_name(tmp_path: Path) -> None:
    path, code = tmp_path / "chat.jsonl", tmp_path / "scoring.py"
    code.write_text("def half(answer, line):\n    return 0.5 * (answer == line['word'])\n")
    lines = [{"prompt": [{"role": "user", "content": word}], "word": word} for word in ("a", "b", "c")]
    path.write_text("\n".join(map(json.dumps, lines)))
    task = JsonlTask(path, f"{code}:half", stop=("!",))
    question = task.sample(0)
    assert task.reward(question, question.fields["word"] + "! and so on") == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is no JSON"),
        ('{"prompt": "a"}\n{"question": "b"}', "line 2 is no object with a `prompt`"),
        ('{"prompt": "a"}\n{"prompt": "a"}', "1 distinct prompts"),
        ("", "0 distinct prompts"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        JsonlTask(path, right)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "neither"),
        ("no_such_module_here:f", "no_such_module_here"),
        ("missing.py:f", "missing.py"),
        ("json:no_such_function", "no function 'no_such_function'"),
        ("json:__name__", "no function '__name__'"),
    ],
)
def test_a_reward_function_that_is_not_there_is_named(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_function(spec)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.jsonl"):
        JsonlTask(tmp_path / "nowhere.jsonl", right)


def test_a_reward_outside_its_range_is_refused(file: Path) -> None:
    task = JsonlTask(file, out_of_range)
    with pytest.raises(UsageError, match=r"gave reward 1\.5"):
        task.reward(task.sample(0), "9")


@pytest.mark.parametrize("returned", ["0.5", None, float("nan"), [1]])
def test_a_reward_that_is_no_number_is_refused(file: Path, returned: object) -> None:
    task = JsonlTask(file, lambda answer, line: returned)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=r"gave reward .*, rewards are numbers in \[0, 1\]"):
        task.reward(task.sample(0), "9")


# --- tokens ------------------------------------------------------------------------------------------------


def test_every_token_with_a_stop_in_it_ends_a_completion() -> None:
    tokenizer = char_tokenizer("ab\n.")
    assert stop_token_ids(tokenizer, ("\n", "b")) == (1, 4, 5)
    assert stop_token_ids(tokenizer, ()) == (1,)


def test_prompts_and_solutions_as_tokens() -> None:
    tokenizer = char_tokenizer(StringTask.alphabet)
    question = Question(0, Split.TRAIN, "ab=", "ba")
    assert encode_prompt(tokenizer, question.prompt) == [3, 4, 29]
    assert encode_solution(tokenizer, StringTask(), question) == [4, 3, 1]
    with pytest.raises(UsageError, match="no solution for question 0"):
        encode_solution(tokenizer, StringTask(), Question(0, Split.TRAIN, "ab="))


def test_a_chat_goes_through_the_template() -> None:
    tokenizer = char_tokenizer("abu:>")
    tokenizer.chat_template = (
        "{% for m in messages %}u:{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    expected = tokenizer.encode("u:ab>", add_special_tokens=False)
    assert encode_prompt(tokenizer, [{"role": "user", "content": "ab"}]) == expected
