"""Plans for several GPUs: which strategy is chosen and why, what is refused, and what is written for the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import tiny
from hf_memopt import Plan, custom_gpu, estimate, plan
from hf_memopt.cli.app import app
from hf_memopt.recipes.planning.sharing import Sharing
from hf_memopt.units import parse_bytes

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


MEMORY = "90MiB"


def config() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 2000}
    return tiny.llama_config(**sizes, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128)


def planned(memory: str, **options: Any) -> Plan:
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes
    assert context_bytes is not None
    gpu = custom_gpu(parse_bytes(memory) + context_bytes, "8.6", name=f"a GPU with {memory}")
    options = {"seq_len": 32, "effective_batch_size": 4, "method": "full", "world_size": 2, **options}
    return plan(config(), gpu=gpu, **options)


@pytest.mark.slow
def test_ddp_where_the_model_fits_on_each_gpu() -> None:
    found = planned("800MiB")
    assert found.chosen is not None
    assert found.chosen.sharing == Sharing("ddp")
    assert {one.sharing for one in found.candidates} == {Sharing("ddp")}  # no other could be faster
    assert "each GPU holds the whole model, and only gradients are exchanged" in found.table(200)
    assert found.launch is not None
    assert found.launch.strategy == "ddp"


@pytest.fixture(scope="module")
def sharded() -> Plan:
    return planned(MEMORY)


def test_fsdp2_where_it_is_faster_than_what_fits_under_ddp(sharded: Plan) -> None:
    chosen = sharded.chosen
    assert chosen is not None
    assert chosen.sharing == Sharing("fsdp2")
    itself = estimate(
        config(),
        batch_size=chosen.rows,
        seq_len=32,
        recipe=chosen.recipe,
        gpu=sharded.gpu,
        gradient_accumulation_steps=chosen.accumulation_steps,
        world_size=2,
        strategy="fsdp2",
    )
    assert chosen.total_bytes == itself.total_bytes
    rivals = [one for one in sharded.candidates if one.sharing == Sharing("ddp") and one.fits]
    assert min(one.cost for one in rivals) > chosen.cost
    assert "2 GPUs share a step by FSDP2: as fast as the best under DDP, and without " in sharded.table(400)
    assert not chosen.recipe.micro_batching
    assert chosen.recipe.fused_cross_entropy
    assert "processes wait for each other" in chosen.recipe.reasons["micro_batching"]


def test_the_speed_is_that_of_the_whole_job(sharded: Plan) -> None:
    chosen = sharded.chosen
    assert chosen is not None
    assert chosen.tokens == 4 * 32
    assert chosen.rows * chosen.accumulation_steps * 2 == 4


@pytest.mark.slow
def test_offload_where_nothing_fits_without_it() -> None:
    found = planned("70MiB")
    assert found.chosen is not None
    assert found.chosen.sharing == Sharing("fsdp2", offload_params=True)
    shown = found.table(400)
    assert "nothing fits under DDP or FSDP2" in shown
    assert "; the host holds " in shown


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_is_planned_where_it_is_asked_for(strategy: str) -> None:
    found = planned("2GiB", strategy=strategy)
    assert found.chosen is not None
    assert found.chosen.sharing == Sharing(strategy)
    assert "ZeRO is computed from DeepSpeed's documentation, and nothing of it was measured" in found.notes
    assert found.launch is not None
    assert found.launch.deepspeed is not None


REFUSED = [
    ({"strategy": "fsdp"}, "strategy='fsdp' is unknown; expected one of 'auto', 'ddp', 'fsdp2', 'zero2', 'zero3'"),
    ({"strategy": "fsdp2", "world_size": 1}, "strategy='fsdp2', world_size=1 do not fit each other"),
    ({"strategy": "zero3", "goal": "longest"}, "strategy='zero3', goal='longest' are incompatible"),
    ({"effective_batch_size": 5}, "effective_batch_size=5 cannot be cut over world_size=2 GPUs; expected a multiple."),
    ({"allow": "release_clipping"}, "released gradients would step before the GPUs have shared them"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_what_cannot_work_is_one_clear_error(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        planned("800MiB", **asked)
    assert message in str(error.value)


@pytest.mark.slow
def test_the_command_writes_the_launchers_file_and_prints_the_launch_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config().save_pretrained("model")
    options = ("--gpu", "T4", "--gpus", "2", "--seq-len", "32", "--effective-batch", "4", "--method", "full")
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", "model", *options, "--write", "run"])
    assert found.exit_code == 0, found.output
    assert "4 examples a step on 2 GPUs" in found.output
    assert found.output.splitlines()[-1] == "  accelerate launch --config_file run/accelerate.yaml run/train.py"
    written = yaml.safe_load(Path("run/accelerate.yaml").read_text())
    assert (written["distributed_type"], written["num_processes"]) == ("MULTI_GPU", 2)
    assert Path("run/train.py").exists()


@pytest.mark.slow
def test_four_bits_under_fsdp2_are_stored_so_that_they_are_cut(tmp_path: Path) -> None:
    found = planned("2GiB", method="qlora", strategy="fsdp2")
    assert found.chosen is not None
    assert found.chosen.sharing == Sharing("fsdp2")
    written = found.write(tmp_path / "run")
    assert written.script is not None
    script = written.script.read_text()
    assert 'bnb_4bit_quant_storage="float16"' in script or 'bnb_4bit_quant_storage="bfloat16"' in script
    assert "FusedCrossEntropyCallback" in script
    for refused in ("MicrobatchCallback", "OverflowCallback", "EvaluationGuardCallback"):
        assert refused not in script
    launch = yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())
    assert (launch["distributed_type"], launch["fsdp_config"]["fsdp_version"]) == ("FSDP", 2)
