"""Jobs that cannot work end with the same error in every rank, and none waits for another."""

from __future__ import annotations

from pathlib import Path

from two_ranks import run_pair

PROGRAM = str(Path(__file__).parent / "bad_launches.py")
MESSAGES = {
    "batch of another number of processes": (
        "ValueError: per_device_train_batch_size=8, gradient_accumulation_steps=1 make 16 examples per step on 2 "
        "processes; expected the effective batch of 32. Give one of the two, or effective_batch_size=16"
    ),
    "effective batch": (
        "ValueError: WORLD_SIZE=2 on 2 processes does not divide the effective batch of 33; expected a divisor. Pass "
        "effective_batch_size=32"
    ),
    "batch of a device": (
        "ValueError: per_device_train_batch_size=5 on 2 processes does not divide the effective batch of 32; "
        "expected a divisor. Pass effective_batch_size=30"
    ),
    "missing deepspeed": (
        "ModuleNotFoundError: deepspeed={'fp16': 'auto'} needs the package deepspeed, which is not installed; expected "
        "it on every host. Call: pip install deepspeed, or pass fsdp=True"
    ),
    "visible GPUs": (
        "RuntimeError: n_gpu=2 GPUs are visible to this one process, so the Trainer would use torch.nn.DataParallel; "
        "expected one process per GPU. Launch: torchrun --nproc_per_node=2 your_script.py (or show it one GPU only: "
        "CUDA_VISIBLE_DEVICES=0 python your_script.py; a notebook is restarted and begins with "
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0')"
    ),
    "view of another number of processes": (
        "ValueError: world_size=3 of the bucketed view differs from the run's 2; expected the same. Build it in the "
        "launched script, or pass bucketed(..., world_size=2)"
    ),
    "technique": (
        "ValueError: gradient release and DDP, default flags are incompatible: weights would step before the processes "
        "have shared gradients; expected only one of them. Train with the plain optimizer class"
    ),
}


def test_every_rank_says_what_is_wrong_and_none_hangs(tmp_path) -> None:
    one, other = run_pair(tmp_path, PROGRAM, str(tmp_path), timeout_seconds=120)
    assert one == other
    assert one == MESSAGES
