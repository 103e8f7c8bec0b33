"""What every rollout engine does, and the one state machine that all of them share.

An engine holds two things that take memory, named by tag: its own copy of the weights (`Tag.WEIGHTS`) and
its key-value cache (`Tag.KV_CACHE`). Each sleeps and wakes on its own, in any order.

    tag          sleep frees it   wake brings it back           generate needs
    weights      yes              empty: contents undefined     awake, then one complete `load_weights`
    kv_cache     yes              empty: nothing is remembered  awake

    engine.sleep()                              both tags; a second call is a no-op that frees 0 bytes
    engine.wake([Tag.WEIGHTS])                  memory for weights is there, contents are not
    engine.load_weights(stream, version=7)      fills them in place; now `weight_version == 7`
    engine.wake([Tag.KV_CACHE])
    engine.generate(prompts, sampling)          every rollout carries version 7

A stream of weights that is incomplete or wrong raises `WeightStreamError` and leaves the engine without a
version; it refuses to generate until a good stream has arrived. `close` ends every state; only `health`
and a second `close` are allowed after it.

An engine implements the underscored hooks. The public methods own the guards, the clock and the accounts,
so each engine refuses the same things with the same errors.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import ClassVar, Self

import torch

from torpor.errors import AsleepError, ClosedError, StateError, UsageError


class Tag(StrEnum):
    """What of an engine can sleep on its own. The names are those of vLLM and SGLang."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last of the completion's tokens."""
    LENGTH = "length"
    """`max_new_tokens` were sampled, and the last is no stop token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue each prompt.

    Example: `SamplingParams(num_samples=8, max_new_tokens=16, stop_token_ids=(2,), seed=7)`.
    """

    max_new_tokens: int
    num_samples: int = 1
    """Completions for each prompt: the group of GRPO."""
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0 is all of them."""
    top_p: float = 1.0
    """Sample from the smallest set of most probable tokens whose probabilities sum to at least this
    (nucleus sampling, https://arxiv.org/abs/1904.09751); 1 is all of them."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends a completion."""
    seed: int = 0
    """Same engine, weights, prompts and parameters: same tokens and log-probabilities, to the bit. Give each
    call of a run a seed of its own."""

    def __post_init__(self) -> None:
        limits = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("num_samples", self.num_samples >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "finite and not below 0"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        )
        for name, holds, limit in limits:
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)}, it must be {limit}", option=name)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of one prompt.

    Example: `Rollout(0, 3, (5, 6), (9, 2), (-0.11, -1.25), FinishReason.STOP, 7)`.
    """

    prompt_index: int
    """Position of its prompt in the call."""
    sample_index: int
    """Position in its group, from 0 to `num_samples - 1`."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """What was sampled, the stop token included; at least one token."""
    logprobs: tuple[float, ...]
    """For each of `token_ids`, its natural log-probability in the distribution it was sampled from: the
    softmax of logits / temperature, renormalised over what top-k and top-p left. Greedy decoding (temperature
    0) reports the model's own distribution, temperature 1."""
    finish_reason: FinishReason
    weight_version: int
    """The version of the weights that produced every token of it."""


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one `generate` did. Example: `GenerationStats(8, 64, 720, 640, 0.6, 4.1, 4.8)`."""

    num_prompts: int
    num_completions: int
    num_prefilled_tokens: int
    """Tokens that went through a prefill; a prompt counts at most once for its whole group."""
    num_generated_tokens: int
    prefill_s: float
    decode_s: float
    """Seconds of forward passes and sampling after the prefill."""
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the seconds of the whole call, prefill included."""
        return self.num_generated_tokens / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one `sleep` or `wake` did to the engine's memory.

    Example: `EngineReport("sleep", (Tag.WEIGHTS,), 538090752, 0, {Tag.WEIGHTS: 0, Tag.KV_CACHE: 0}, 0.02)`.
    """

    operation: str
    tags: tuple[Tag, ...]
    """The tags whose state changed; empty for a no-op."""
    freed_bytes: int
    """Bytes this call gave back."""
    taken_bytes: int
    """Bytes this call allocated."""
    held_bytes: Mapping[Tag, int]
    """Bytes the engine holds afterwards."""
    total_s: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one `load_weights` did. Example: `LoadReport(7, 272, 538090752, 0.31)`."""

    version: int
    num_tensors: int
    loaded_bytes: int
    total_s: float


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The state of an engine, readable in every state."""

    engine: str
    is_closed: bool
    asleep: frozenset[Tag]
    weight_version: int | None
    """None: no complete weights since they last woke, or the last stream was bad."""
    held_bytes: Mapping[Tag, int]
    cannot_generate_because: str | None
    """A clause; None when `generate` may be called."""

    @property
    def can_generate(self) -> bool:
        return self.cannot_generate_because is None


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """What one weight of a stream must look like. Example: `WeightSpec((49152, 576), torch.float32)`."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def difference(self, tensor: torch.Tensor) -> str | None:
        """How `tensor` differs from this, as a clause; None if it does not."""
        if tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype:
            return None
        return f"{tuple(tensor.shape)} {tensor.dtype}, expected {self.shape} {self.dtype}"


class WeightStreamError(UsageError):
    """A stream of weights was not what the engine needs; it has no usable weights until a good one."""

    missing: list[str]
    unexpected: list[str]
    repeated: list[str]
    mismatched: dict[str, str]

    @classmethod
    def of(cls, checker: WeightStreamChecker) -> WeightStreamError:
        """The error for what `checker` found."""
        found: dict[str, Sequence[str]] = {
            "missing": checker.missing,
            "unexpected": checker.unexpected,
            "repeated": checker.repeated,
            "mismatched": [f"{name} is {how}" for name, how in checker.mismatched.items()],
        }
        clauses = [f"{kind}: {_shorten(names)}" for kind, names in found.items() if names]
        message = (
            f"bad stream of weights, {'; '.join(clauses)}. The engine refuses to generate until "
            "load_weights has received every weight exactly once"
        )
        return cls(
            message,
            missing=checker.missing,
            unexpected=checker.unexpected,
            repeated=checker.repeated,
            mismatched=checker.mismatched,
        )


class WeightStreamChecker:
    """Passes the good weights of a stream on, one at a time, and remembers all that was wrong with it."""

    def __init__(self, specs: Mapping[str, WeightSpec]) -> None:
        self._specs = specs
        self._seen: set[str] = set()
        self.unexpected: list[str] = []
        self.repeated: list[str] = []
        self.mismatched: dict[str, str] = {}
        self.loaded_bytes = 0

    def check(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of `stream` that are expected, new and of the right shape and dtype."""
        for name, tensor in stream:
            if self._accepts(name, tensor):
                self.loaded_bytes += tensor.nbytes
                yield name, tensor

    def _accepts(self, name: str, tensor: torch.Tensor) -> bool:
        spec = self._specs.get(name)
        if spec is None:
            self.unexpected.append(name)
            return False
        if name in self._seen:
            self.repeated.append(name)
            return False
        self._seen.add(name)
        difference = spec.difference(tensor)
        if difference is not None:
            self.mismatched[name] = difference
        return difference is None

    @property
    def missing(self) -> list[str]:
        return [name for name in self._specs if name not in self._seen]

    @property
    def is_good(self) -> bool:
        return not (self.missing or self.unexpected or self.repeated or self.mismatched)


class RolloutEngine(ABC):
    """Generates completions, sleeps and wakes by tag, and takes new weights. See the module for the states.

    Not safe for use by several threads at once. As a context manager it closes itself.
    """

    name: ClassVar[str]

    def __init__(self, *, weight_version: int | None) -> None:
        """`weight_version` is that of the weights the engine starts with; None if it starts with none."""
        self._asleep: set[Tag] = set()
        self._weight_version = weight_version
        self._is_closed = False
        self._last_generation: GenerationStats | None = None

    # --- what an engine implements -----------------------------------------------------------------

    @abstractmethod
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, weight_version: int
    ) -> tuple[list[Rollout], GenerationStats]:
        """Rollouts in order of (prompt, sample), and what it took. Everything needed is awake."""

    @abstractmethod
    def _sleep(self, tag: Tag) -> None:
        """Free the memory of one tag that is awake; return when it is free."""

    @abstractmethod
    def _wake(self, tag: Tag) -> None:
        """Take the memory of one sleeping tag again. A failure leaves it asleep."""

    @abstractmethod
    def _load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy each weight in place as it comes, holding no more than one. The stream is checked already."""

    @abstractmethod
    def _held_bytes(self, tag: Tag) -> int:
        """Bytes of memory the engine holds for `tag` now; 0 asleep and after `close`."""

    @abstractmethod
    def _close(self) -> None:
        """Give everything back."""

    @abstractmethod
    def weight_specs(self) -> Mapping[str, WeightSpec]:
        """What each weight of a stream must be, by name, in any state. Tied weights count once."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids of prompts are below this."""

    # --- what a caller uses --------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Rollout]:
        """Continue each prompt `sampling.num_samples` times.

        Args:
            prompts: token ids of each prompt; lengths may differ, none may be empty.

        Returns:
            `len(prompts) * num_samples` rollouts, the samples of the first prompt first.

        Raises:
            AsleepError: a tag is asleep; its name is in `component`.
            StateError: the engine has no complete weights.
            UsageError: an empty prompt, a token outside the vocabulary, or a prompt too long for the engine.
            ClosedError: after `close`.
        """
        version = self._version_to_generate_with()
        self._check_prompts(prompts)
        if not prompts:
            return []
        rollouts, self._last_generation = self._generate(prompts, sampling, version)
        return rollouts

    def sleep(self, tags: Iterable[Tag | str] | None = None) -> EngineReport:
        """Free the memory of `tags` (None: all). Those that sleep already are left alone.

        Raises:
            UsageError: an unknown tag.
            ClosedError: after `close`.
        """
        return self._change("sleep", [tag for tag in _parse(tags) if tag not in self._asleep])

    def wake(self, tags: Iterable[Tag | str] | None = None) -> EngineReport:
        """Take the memory of `tags` (None: all) again. Those that are awake already are left alone.

        Weights wake empty: `load_weights` must fill them before the next `generate`.

        Raises:
            UsageError: an unknown tag.
            MemoryBackendError: no room; what did not fit is still asleep and can be woken later.
            ClosedError: after `close`.
        """
        return self._change("wake", [tag for tag in _parse(tags) if tag in self._asleep])

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadReport:
        """Overwrite all weights in place, one at a time as they come; nothing of the stream is kept.

        Args:
            stream: each name of `weight_specs()` exactly once, in any order, with its tensor.
            version: what `weight_version` and the rollouts say from now on.

        Raises:
            WeightStreamError: names are missing, unexpected or repeated, or shapes or dtypes differ. The
                engine has no version then and refuses to generate. So it does after an error of the stream.
            AsleepError: the weights are asleep.
            UsageError: a negative version.
            ClosedError: after `close`.
        """
        self._require_open("load_weights")
        self._require_awake("load_weights", (Tag.WEIGHTS,))
        if version < 0:
            raise UsageError(f"weight version {version} is negative; versions count from 0", version=version)
        start = time.perf_counter()
        self._weight_version = None
        checker = WeightStreamChecker(self.weight_specs())
        self._load_weights(checker.check(stream))
        if not checker.is_good:
            raise WeightStreamError.of(checker)
        self._weight_version = version
        return LoadReport(version, len(self.weight_specs()), checker.loaded_bytes, time.perf_counter() - start)

    @property
    def weight_version(self) -> int | None:
        """Version of the complete weights the engine holds; None if it holds none."""
        return self._weight_version

    @property
    def asleep(self) -> frozenset[Tag]:
        """The tags that sleep now."""
        return frozenset(self._asleep)

    @property
    def last_generation(self) -> GenerationStats | None:
        """What the last `generate` did; None before the first."""
        return self._last_generation

    def held_bytes(self) -> dict[Tag, int]:
        """Bytes of memory the engine holds now, by tag."""
        return {tag: self._held_bytes(tag) for tag in Tag}

    def health(self) -> EngineHealth:
        """The state of the engine. Never raises."""
        return EngineHealth(
            self.name,
            self._is_closed,
            self.asleep,
            self.weight_version,
            self.held_bytes(),
            self._why_not_generate(),
        )

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._weight_version = None
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- guards ----------------------------------------------------------------------------------------

    def _change(self, operation: str, tags: Sequence[Tag]) -> EngineReport:
        self._require_open(operation)
        start = time.perf_counter()
        before = self.held_bytes()
        for tag in tags:
            self._change_one(operation, tag)
        after = self.held_bytes()
        changes = [after[tag] - before[tag] for tag in Tag]
        return EngineReport(
            operation=operation,
            tags=tuple(tags),
            freed_bytes=-sum(change for change in changes if change < 0),
            taken_bytes=sum(change for change in changes if change > 0),
            held_bytes=after,
            total_s=time.perf_counter() - start,
        )

    def _change_one(self, operation: str, tag: Tag) -> None:
        if operation == "wake":
            self._wake(tag)
            self._asleep.discard(tag)
            return
        if tag is Tag.WEIGHTS:
            self._weight_version = None
        self._asleep.add(tag)
        self._sleep(tag)

    def _version_to_generate_with(self) -> int:
        self._require_open("generate")
        self._require_awake("generate", tuple(Tag))
        if self._weight_version is None:
            raise StateError(f"the {self.name} engine cannot generate: {self._why_not_generate()}")
        return self._weight_version

    def _why_not_generate(self) -> str | None:
        if self._is_closed:
            return "it is closed"
        if self._asleep:
            return f"{' and '.join(sorted(self._asleep))} asleep"
        if self._weight_version is None:
            return "it has no complete weights; call load_weights with all of them"
        return None

    def _require_open(self, operation: str) -> None:
        if self._is_closed:
            raise ClosedError(f"{operation} of the {self.name} engine after its close()")

    def _require_awake(self, operation: str, tags: Sequence[Tag]) -> None:
        for tag in tags:
            if tag in self._asleep:
                remedy = f"Call wake(['{tag}']) first."
                raise AsleepError(f"the {self.name} engine", tag.value, operation, remedy)

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise UsageError(f"prompt {index} is empty; it needs at least one token", prompt_index=index)
            if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
                wrong = next(token for token in prompt if not 0 <= token < self.vocab_size)
                raise UsageError(
                    f"prompt {index} has token id {wrong}, the vocabulary ends at {self.vocab_size - 1}",
                    prompt_index=index,
                    token_id=wrong,
                )


def _parse(tags: Iterable[Tag | str] | None) -> list[Tag]:
    if tags is None:
        return list(Tag)
    names = [tags] if isinstance(tags, str) else list(tags)
    known = set(Tag)
    for name in names:
        if name not in known:
            raise UsageError(f"unknown tag {name!r}, known tags: {', '.join(Tag)}", tag=str(name))
    return [tag for tag in Tag if tag in names]


def _shorten(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
