"""Reading a Hugging Face `config.json`: every key by name, and an error that says which one is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from torpor.errors import UsageError

_MODELS = resources.files("torpor.forecast").joinpath("models")


class Config:
    """A parsed `config.json` and the name its errors carry."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is present. Raises `UsageError` when none is and there is no default."""
        value = self._first(keys)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(
                f"{self.name}: '{keys[0]}' is {value!r}, a whole number is needed. "
                "Complete the config, or plan from a Megatron argument file.",
                config=self.name,
                key=keys[0],
            )
        return value

    def optional(self, key: str) -> int | None:
        """The value, or None where the config has none."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """A switch; `default` is that of the class in transformers."""
        value = self.values.get(key)
        return default if value is None else bool(value)

    def items(self, key: str) -> list[Any] | None:
        """A list, or None where the config has none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise UsageError(f"{self.name}: '{key}' is {value!r}, a list is needed.", config=self.name, key=key)
        return value

    def text(self) -> Config:
        """The language model of a multi-modal config; this config itself where it is one."""
        inner = self.values.get("text_config")
        return Config(inner, self.name) if isinstance(inner, dict) else self

    @property
    def model_type(self) -> str:
        """`model_type`, what transformers calls the architecture."""
        return str(self.values.get("model_type", ""))

    def _first(self, keys: tuple[str, ...]) -> Any:
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)


def built_in_names() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(entry.name.removesuffix(".json") for entry in _MODELS.iterdir() if entry.name.endswith(".json"))


def read_config(source: str) -> Config:
    """A config from a path (a file, or a directory that holds `config.json`) or from a built-in name.

    Raises `UsageError` when there is neither, or the file is no JSON object.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return Config(_parse(path.read_text(encoding="utf-8"), str(path)), source)
    if source.lower() in built_in_names():
        name = source.lower()
        return Config(_parse(_MODELS.joinpath(f"{name}.json").read_text(encoding="utf-8"), name), name)
    raise UsageError(
        f"{source}: no such file, and no built-in model of that name. Built in: {', '.join(built_in_names())}.",
        source=source,
        known=built_in_names(),
    )


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}: not JSON ({error}).", config=name) from error
    if not isinstance(values, dict):
        raise UsageError(f"{name}: a JSON object is needed, not a {type(values).__name__}.", config=name)
    return values
