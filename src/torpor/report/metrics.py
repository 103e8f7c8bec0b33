"""Metrics as typed values that know how they add up. Keys are paths: `reward/mean`, `time/train_s`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self


class Metric(Protocol):
    """A value that can absorb another of its kind."""

    @property
    def value(self) -> float: ...

    def merge(self, other: Self) -> Self: ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, kept as its two sums. Example: `Mean(12.5, 64)`: 64 tokens, 12.5 nats in all."""

    total: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total. Example: `Sum(3214)`."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest seen. Example: `Max(1.7)`."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """What was seen last. Example: `Last(1e-5)`."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


class Metrics:
    """The metrics of one step, by path."""

    def __init__(self) -> None:
        self._by_key: dict[str, Metric] = {}

    def record(self, key: str, metric: Metric) -> None:
        """Add `metric` to what `key` has.

        Raises:
            TypeError: `key` was recorded with another reduction before.
        """
        known = self._by_key.get(key)
        if known is not None and type(known) is not type(metric):
            raise TypeError(f"metric {key} is a {type(known).__name__}, not a {type(metric).__name__}")
        self._by_key[key] = metric if known is None else known.merge(metric)

    def update(self, other: Metrics) -> None:
        """Add all of `other`."""
        for key, metric in other._by_key.items():
            self.record(key, metric)

    def values(self) -> dict[str, float]:
        """Each key with its reduced value, in order of first recording."""
        return {key: metric.value for key, metric in self._by_key.items()}
