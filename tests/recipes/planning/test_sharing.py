"""Plans for several GPUs: which strategy is chosen and why, what is refused, and what is written for the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_plans
import yaml
from invoked import invoked

from hf_memopt import Plan, estimate, plan

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MEMORY = "90MiB"


def planned(memory: str, **options: Any) -> Plan:
    given = {"seq_len": 32, "effective_batch_size": 4, "method": "full", "world_size": 2, **options}
    return tiny_plans.planned(memory, tiny_plans.config(vocab_size=2000), **given)


def sharing(one: Any) -> tuple[str, bool]:
    """Return the strategy of a candidate, and whether sharded states wait in host memory."""
    return one.sharing.strategy, one.sharing.offload_params


@pytest.mark.slow
def test_ddp_where_the_model_fits_on_each_gpu() -> None:
    found = planned("800MiB")
    assert found.chosen is not None
    assert {sharing(one) for one in found.candidates} == {("ddp", False)}  # no other could be faster
    assert "each GPU holds the whole model, and only gradients are exchanged" in found.table(200)
    assert found.launch.strategy == "ddp"


@pytest.mark.parametrize(
    ("model", "flags", "is_cut"),
    [
        ("google-bert/bert-base-uncased", "ddp_find_unused_parameters=False, ddp_broadcast_buffers=False,", True),
        ("facebook/dinov2-base", "ddp_find_unused_parameters=True,  # dinov2.embeddings.mask_token gets no", False),
    ],
)
def test_a_script_under_ddp_cuts_batches_unless_a_weight_gets_no_gradient(model: str, flags: str, is_cut: bool) -> None:
    """Stock looks for such weights unless there is checkpointing, and DDP then stops; micro-batching needs it off."""
    found = plan(model, gpu="T4", world_size=2)
    script, launch = str(found.script()), found.launch
    assert launch.strategy == "ddp"
    assert flags in script
    assert launch.training_arguments["ddp_find_unused_parameters"] is not is_cut
    assert ("mask_token gets no gradient" in str(launch)) is not is_cut
    assert ("hf_memopt.MicrobatchCallback()," in script) == is_cut


@pytest.fixture(scope="module")
def sharded() -> Plan:
    return planned(MEMORY)


def test_fsdp2_where_it_is_faster_than_what_fits_under_ddp(sharded: Plan) -> None:
    chosen = sharded.chosen
    assert sharing(chosen) == ("fsdp2", False)
    step = {"batch_size": chosen.rows, "seq_len": 32, "gradient_accumulation_steps": chosen.accumulation_steps}
    job = {"recipe": chosen.recipe, "gpu": sharded.gpu, "world_size": 2, "strategy": "fsdp2"}
    itself = estimate(tiny_plans.config(vocab_size=2000), **step, **job)
    assert chosen.total_bytes == itself.total_bytes
    rivals = [one for one in sharded.candidates if sharing(one)[0] == "ddp" and one.fits]
    assert min(one.cost for one in rivals) > chosen.cost
    assert "2 GPUs share a step by FSDP2: as fast as the best under DDP, and without " in sharded.table(400)
    assert (chosen.tokens, chosen.rows * chosen.accumulation_steps * 2) == (4 * 32, 4)  # of the whole job
    assert not chosen.recipe.micro_batching
    assert chosen.recipe.fused_cross_entropy
    assert "processes wait for each other" in chosen.recipe.reasons["micro_batching"]


@pytest.mark.slow
def test_offload_where_nothing_fits_without_it() -> None:
    found = planned("70MiB")
    assert sharing(found.chosen) == ("fsdp2", True)
    shown = found.table(400)
    assert "nothing fits under DDP or FSDP2" in shown
    assert "; the host holds " in shown


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_is_planned_where_it_is_asked_for(strategy: str) -> None:
    found = planned("2GiB", strategy=strategy)
    assert sharing(found.chosen) == (strategy, False)
    assert "ZeRO is computed from DeepSpeed's documentation, and nothing of it was measured" in found.notes
    assert found.launch.deepspeed is not None


@pytest.mark.slow
def test_the_command_writes_the_launchers_file_and_prints_the_launch_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_plans.config(vocab_size=2000).save_pretrained("model")
    options = ("--gpu", "T4", "--gpus", "2", "--seq-len", "32", "--effective-batch", "4", "--method", "full")
    found = invoked("plan", "model", *options, "--write", "run")
    assert found.exit_code == 0, found.output
    assert "4 examples a step on 2 GPUs" in found.output
    assert found.output.splitlines()[-1] == "  accelerate launch --config_file run/accelerate.yaml run/train.py"
    written = yaml.safe_load(Path("run/accelerate.yaml").read_text())
    assert (written["distributed_type"], written["num_processes"]) == ("MULTI_GPU", 2)
    assert Path("run/train.py").exists()


@pytest.mark.slow
def test_four_bits_under_fsdp2_are_stored_so_that_they_are_cut(tmp_path: Path) -> None:
    found = planned("2GiB", method="qlora", strategy="fsdp2")
    assert sharing(found.chosen) == ("fsdp2", False)
    written = found.write(tmp_path / "run")
    script = written.script.read_text()
    assert 'bnb_4bit_quant_storage="float16"' in script or 'bnb_4bit_quant_storage="bfloat16"' in script
    assert "FusedCrossEntropyCallback" in script
    for refused in ("MicrobatchCallback", "OverflowCallback", "EvaluationGuardCallback"):
        assert refused not in script
    launch = yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())
    assert (launch["distributed_type"], launch["fsdp_config"]["fsdp_version"]) == ("FSDP", 2)
