"""The run directory and what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Names of the files of one run. Example: `RunDirectory(Path("runs/reverse")).metrics`."""

    path: Path

    def create(self) -> None:
        """Make the directory with its parents; an existing one is used."""
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def has_begun(self) -> bool:
        """Whether a run got as far as its first metrics."""
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def clear(self) -> None:
        """Remove what an attempt left that ended before its run began."""
        for path in (self.metrics, self.ledgers, self.samples, self.memory):
            path.unlink(missing_ok=True)

    @property
    def config(self) -> Path:
        """The resolved configuration, JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One object a step, JSONL."""
        return self.path / "metrics.jsonl"

    @property
    def ledgers(self) -> Path:
        """One object for each sleep and wake, JSONL."""
        return self.path / "ledgers.jsonl"

    @property
    def samples(self) -> Path:
        """Some answers of each step with their rewards, JSONL."""
        return self.path / "samples.jsonl"

    @property
    def memory(self) -> Path:
        """Readings of resident memory, JSONL."""
        return self.path / "memory.jsonl"

    @property
    def reward_plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def memory_plot(self) -> Path:
        return self.path / "memory.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def store(self) -> Path:
        """Where the sleeping actor's bytes wait, unless a directory was named."""
        return self.path / "store"
