"""The module that Python runs at its start in each process of a rehearsal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from invoked import invoked

import hf_memopt

HOOK = Path(hf_memopt.__file__).parent / "prediction" / "rehearsal" / "hook"


def _run(code: str, *folders: Path, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k != "HF_MEMOPT_GPU_MEMORY" or environment.get("rehearse")}
    path = os.pathsep.join(map(str, (HOOK, *folders)))
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env={**inherited, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_outside_a_rehearsal_it_lets_the_next_one_run_and_does_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.seen = 'the next one'\n")
    code = "import sys; print(sys.seen, [f for f in sys.meta_path if getattr(f, '__name__', '') == 'AfterImport'])"
    assert _run(code, tmp_path) == "the next one []"


def test_at_the_start_it_imports_no_torch(tmp_path: Path) -> None:
    assert _run("import sys; print('torch' in sys.modules, 'hf_memopt' in sys.modules)") == "False False"


@pytest.mark.stand_in
def test_values_are_installed_with_torch_even_after_a_look_for_it() -> None:
    code = """
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("bitsandbytes")
import torch
print(float((torch.ones(3, device="cuda") * 2).sum()))
import bitsandbytes
from bitsandbytes.functional import quantize_4bit
packed, _ = quantize_4bit(torch.linspace(-1, 1, 128, device="cuda"))
print(packed.unique().numel() > 8)
"""
    assert _run(code, rehearse="yes").split() == ["6.0", "True"]


# ---- What is refused, of packages that have as much as accelerate 1.15 and transformers 5.23 look at

PACKAGES = {
    "deepspeed-0.18.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.9\n",
    "deepspeed/__init__.py": "from deepspeed import comm, runtime, utils\nDeepSpeedEngine, initialize = type, print\n",
    "deepspeed/comm/__init__.py": "from deepspeed.comm.comm import *\n",
    "deepspeed/comm/comm.py": "init_distributed = print\n",
    "deepspeed/runtime/__init__.py": "from deepspeed.runtime import lr_schedules\n",
    "deepspeed/runtime/lr_schedules.py": "VALID_LR_SCHEDULES = []\n",
    "deepspeed/utils/__init__.py": "from logging import root as logger\n",
    "kernels-0.18.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n",
    "kernels/__init__.py": """
from kernels.load import get_kernel
def __getattr__(name):
    return lambda *_: lambda layer: layer
""",
    "kernels/load.py": """
from types import SimpleNamespace
get_kernel_with_resolver = print
def get_kernel(name, **_):
    return get_kernel_with_resolver(api=None, kernel=SimpleNamespace(repo_id=name))
""",
}
DEEPSPEED = "DeepSpeed cannot be rehearsed; expected torch's own code. Run the script without it"
KERNEL = (
    "kernel='kernels-community/relu' of the hub cannot be rehearsed; expected torch's own code. Run the script without"
)
KERNEL += " it"
TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(vocab_size=100, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
rows = [{"input_ids": [5] * 16, "labels": [5] * 16}] * 8
settings = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
arguments = TrainingArguments("out", report_to="none", deepspeed=settings)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
"""
ATTENTION = """
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, attn_implementation="kernels-community/relu"))
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PACKAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return tmp_path


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("package", "call", "message"),
    [
        ("deepspeed", "deepspeed.initialize(model=None)", DEEPSPEED),
        ("deepspeed", "deepspeed.comm.init_distributed()", DEEPSPEED),
        ("kernels", "kernels.get_kernel('kernels-community/relu', version=1)", KERNEL),
    ],
)
def test_a_call_that_cannot_be_rehearsed_ends_the_script_where_it_is(
    package: str, call: str, message: str, packages: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (packages / "train.py").write_text(f"import {package}\n{call}\n", encoding="utf-8")
    done = invoked("rehearse", "--memory", "2GiB", "train.py")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "")
    error = capfd.readouterr().err
    own = f'Traceback (most recent call last):\n  File "{packages}/train.py", line 2, in <module>\n    {call}\n'
    assert error.startswith(own)
    frame = r"  File .*, line \d+, in (get_kernel|refuse)\n    .*\n(?: +\^+\n)?"
    assert (
        re.sub(frame, "", error.removeprefix(own))
        == f"hf_memopt.prediction.rehearsal.requirements.RehearsalError: {message}\n"
    )


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("script", "last"),
    [
        (TRAINER, f"hf_memopt.prediction.rehearsal.requirements.RehearsalError: {DEEPSPEED}"),
        (ATTENTION, f"ValueError: An error occurred while trying to load from 'kernels-community/relu': {KERNEL}."),
    ],
    ids=["TrainingArguments", "attn_implementation"],
)
def test_transformers_own_calls_are_refused_too(
    script: str, last: str, packages: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (packages / "train.py").write_text(script, encoding="utf-8")
    done = invoked("rehearse", "--memory", "2GiB", "train.py")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "")
    assert capfd.readouterr().err.splitlines()[-1] == last


@pytest.mark.stand_in
def test_a_script_that_only_imports_them_sees_nothing(packages: Path, capfd: pytest.CaptureFixture[str]) -> None:
    training = """
import deepspeed, kernels, torch
weight = torch.ones(8, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
while True:
    weight.sum().backward()
    optimizer.step()
"""
    (packages / "train.py").write_text(training, encoding="utf-8")
    done = invoked("rehearse", "--memory", "2GiB", "train.py")
    assert (done.exit_code, done.stderr, capfd.readouterr().err) == (0, "", "")
    assert done.stdout.startswith("FITS: 0.22 of 2.00 GiB (custom 2.00 GiB)\n")
