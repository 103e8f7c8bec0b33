"""Set up `.venv` with what a command needs, once; later calls return within a second. Standard library only."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
#: The CPU build that the examples and tests were measured with; any torch from 2.11 on works.
CPU_TORCH = "2.13.0"
_PIP_STEPS = ("Collecting", "Downloading", "Building", "Installing", "Processing", "Obtaining")


def ensure(extras: str, without_dependencies: tuple[str, ...] = ()) -> Path:
    """The interpreter of a virtual environment that has torpor with `extras`, and the packages named."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before anything checked it
        sys.exit(f"Python {platform.python_version()} is too old: torpor needs 3.11 or newer")
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + repr((extras, without_dependencies)).encode())
    stamp = VENV / f"torpor-{wanted.hexdigest()[:16]}"
    if stamp.exists():
        return PYTHON
    if not PYTHON.exists():
        print(f"torpor: creating {VENV}", flush=True)
        venv.create(VENV, with_pip=True)
    _install_torch()
    _pip(f"installing torpor[{extras}]", "-e", f"{ROOT}[{extras}]")
    for package in without_dependencies:
        _pip(f"installing {package}", "--no-deps", package)
    stamp.touch()
    return PYTHON


def run(*arguments: str) -> None:
    """Replace this process by the environment's Python with `arguments`.

    OpenMP's threads wait asleep: on a machine whose cores are shared, threads that spin cost far more than they save.
    """
    environment = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", **os.environ}
    os.execve(PYTHON, [str(PYTHON), *arguments], environment)


def _install_torch() -> None:
    if _succeeds(str(PYTHON), "-c", "import torch"):
        return
    if _has_nvidia_gpu() or platform.system() != "Linux" or platform.machine() != "x86_64":
        _pip("installing torch", "torch>=2.11")
        return
    print("torpor: no NVIDIA GPU here, installing the CPU build of torch", flush=True)
    # A package index that offers CPU builds lists them under this exact version; the default one does not,
    # and uv knows where they are.
    if _succeeds(str(PYTHON), "-m", "pip", "install", "--quiet", f"torch=={CPU_TORCH}+cpu"):
        return
    _pip("installing uv, which finds CPU builds of torch", "uv")
    command = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON), "--torch-backend", "cpu"]
    subprocess.run([*command, f"torch=={CPU_TORCH}"], check=True)


def _has_nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and _succeeds("nvidia-smi", "--list-gpus")


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def _pip(what: str, *arguments: str) -> None:
    """Run pip, showing what it is at and the seconds gone; all it said if it fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    print(f"torpor: {what}", flush=True)
    start = shown = time.monotonic()
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            said.append(line)
            if line.startswith(_PIP_STEPS) and time.monotonic() - shown > 2:
                shown = time.monotonic()
                print(f"  {shown - start:4.0f} s  {line.strip()[:100]}", flush=True)
    if pip.returncode:
        sys.exit("".join(said) + f"torpor: {what} failed; the command was: {' '.join(command)}")
