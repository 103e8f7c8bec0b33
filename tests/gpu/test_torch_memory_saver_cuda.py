"""The backend `torch_memory_saver` over the library itself, in both of its modes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = (
    "bits_addresses_and_the_drivers_memory",
    "training_goes_on",
    "components_in_regions_of_their_own",
    pytest.param("a_thief_and_a_second_try", marks=pytest.mark.exclusive),
    "calls_that_would_end_the_process",
    "allocated_while_it_slept",
    "backups_of_its_own_are_refused",
)
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_memory_saver") is None, reason="needs torch_memory_saver"
)


def run(mode: str, case: str, environment: dict[str, str]) -> None:
    here = Path(__file__).parent
    paths = [str(here.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(here / "saver_cases.py"), mode, case],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("went well\n"), f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def preloaded() -> dict[str, str]:
    from torch_memory_saver.utils import get_binary_path_from_package

    return {"LD_PRELOAD": str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))}


@pytest.mark.parametrize("case", CASES)
def test_in_torch_mode(case):
    run("torch", case, {})


@pytest.mark.parametrize("case", CASES)
def test_in_preload_mode(case):
    run("preload", case, preloaded())


def test_where_all_memory_is_the_librarys_regions_with_tags_of_their_own_sleep():
    run("preload", "everything_hooked", {**preloaded(), "TMS_INIT_ENABLE": "1"})
