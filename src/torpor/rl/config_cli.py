"""From a file and flags to a `RunConfig`. Imports no torch."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tyro
from pydantic import BaseModel, ValidationError

from torpor.errors import UsageError
from torpor.rl.config import RunConfig

PROGRAM = "torpor train CONFIG"

RESUMABLE_CHANGES = frozenset({"name", "run_dir", "resume", "steps", "checkpoint", "memory", "report", "threads"})
"""Top-level keys that a resumed run may set differently: they do not touch what was computed so far."""


def parse_run_config(path: Path | None, flags: Sequence[str] = ()) -> RunConfig:
    """The configuration of `path` (the defaults if None), overridden by `flags`.

    `--help` among the flags prints every field with its meaning and its value in `path`, and exits.

    Raises:
        UsageError: the file cannot be read, has an unknown key, a bad value, or options that clash.
        SystemExit: the same in `flags`; tyro has printed why.
    """
    default = RunConfig() if path is None else load_config(path)
    return tyro.cli(RunConfig, default=default, args=list(flags), prog=PROGRAM, config=(tyro.conf.AvoidSubcommands,))


def load_config(path: Path) -> RunConfig:
    """A TOML file, or the JSON that a run wrote.

    Raises:
        UsageError: see `parse_run_config`.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the config {path}: {error}", path=str(path)) from error
    return config_from_mapping(raw, source=str(path))


def config_from_mapping(raw: Mapping[str, Any], source: str) -> RunConfig:
    """Validate plain values; `source` names them in errors.

    Raises:
        UsageError: an unknown key (the message has the nearest known), a bad value, or options that clash.
    """
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = [_explain(problem["loc"], problem) for problem in error.errors()]
        raise UsageError(f"{source}: {'; '.join(problems)}", source=source, problems=problems) from error


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as JSON that `load_config` reads back to an equal one."""
    path.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def changed_for_resume(saved: RunConfig, wanted: RunConfig) -> list[str]:
    """Dotted keys that differ and would make the resumed run another one."""
    before, after = _flatten(saved.model_dump()), _flatten(wanted.model_dump())
    return sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key) and key.split(".")[0] not in RESUMABLE_CHANGES
    )


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key that a file may have."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for choice in (field.annotation, *get_args(field.annotation)):
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                yield from known_keys(choice, f"{prefix}{name}.")


def _explain(location: tuple[int | str, ...], problem: Mapping[str, Any]) -> str:
    key = _dotted(location)
    if problem["type"] == "extra_forbidden" and key in set(known_keys()):
        section = key.rsplit(".", 1)[0]
        return f"{key} belongs to another {section}.kind than the one chosen"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{_suggestion(key)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{key} = {problem['input']!r}: {message}" if location and problem["type"] != "value_error" else message


def _dotted(location: tuple[int | str, ...]) -> str:
    """The key as the file has it: pydantic puts the kind of a tagged union into the path."""
    keys = set(known_keys())
    dotted = ""
    for part in map(str, location):
        longer = f"{dotted}.{part}" if dotted else part
        if longer in keys or part is location[-1]:
            dotted = longer
    return dotted


def _suggestion(key: str) -> str:
    keys = sorted(set(known_keys()))
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [known for known in keys if known.rsplit(".", 1)[-1] == leaf]
    nearest = same_leaf or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else "; `--help` lists the known ones"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
