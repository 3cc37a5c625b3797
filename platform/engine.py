"""The DeepSpeed engine of one trial: how it is started, fed, and taken down so that the process can start another."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from depthlaw.archs.backbone import Model
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.ranks import Ranks


def prepare() -> Any:
    """Import DeepSpeed so that it neither compiles anything nor needs a compiler."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    # ZeRO 3 calls a deprecated name of torch's in every pass.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    # The shared-memory communication op would be compiled at the first engine (a minute, and a crash without g++).
    # One process, or gloo, needs no such op. A private name: a test fails when it goes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _number_from_zero() -> None:
    """ZeRO 3 compares the numbers of modules and tensors between ranks, and goes on counting from engine to engine.

    A process that has run a trial before then disagrees with a fresh one. Private names: a test fails when they go.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    (modules,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    modules[0] = Init.param_id = 0


def engine_config(spec: TrialSpec, universal: bool = False) -> dict[str, Any]:
    """What DeepSpeed is told. bf16 is autocast over fp32 parameters: its own bf16 mode would round routing scalars.

    `universal`: the checkpoint that it will load was written at another world size and converted.
    """
    return {
        "train_micro_batch_size_per_gpu": spec.micro_batch_seqs,
        "gradient_accumulation_steps": spec.rank_seqs // spec.micro_batch_seqs,
        "gradient_clipping": spec.optimizer["clip"],
        "zero_optimization": {"stage": spec.zero_stage},
        "torch_autocast": {"enabled": spec.precision == "bf16", "dtype": "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        "steps_per_print": 10**9,
    }


def make_optimizer(model: Model, spec: TrialSpec) -> torch.optim.Optimizer:
    """torch AdamW in two groups: decayed and not."""
    groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for _, tensor, decayed in model.decayed():
        groups[decayed].append(tensor)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": spec.optimizer["weight_decay"]},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=spec.lr,
        betas=tuple(spec.optimizer["betas"]),
        eps=spec.optimizer["eps"],
        fused=True,
    )


@contextmanager
def running_engine(model: Model, spec: TrialSpec, ranks: Ranks | None = None, universal: bool = False) -> Iterator[Any]:
    """A DeepSpeed engine around the model, in a process group of its own: with the other ranks, or alone.

    Which checkpoint it will load, and so whether that is `universal`, is known to rank 0. Leaving the context ends the
    group through DeepSpeed, not through torch: only then can the process start another.
    """
    deepspeed = prepare()
    ranks = ranks or Ranks()
    # DeepSpeed asks the environment who it is. The group itself meets in the store, and no port is chosen here.
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks.world))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=ranks.store, rank=ranks.rank, world_size=ranks.world)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)  # finds the group and takes it over
    if spec.zero_stage == 3:
        _number_from_zero()
    engine = None
    try:
        config = engine_config(spec, ranks.agreed(universal))
        engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model, spec), config=config)
        yield engine
    except BaseException:
        ranks.lost()  # first: the group cannot be left while the others are inside a collective
        raise
    finally:
        if engine is not None:
            engine.destroy()
        deepspeed.comm.destroy_process_group()


def final_step(engine: Any) -> float:
    """The step that follows the last micro-batch of a batch; returns the global gradient norm before clipping.

    DeepSpeed keeps no norm at ZeRO stage 0 in fp32, where the gradients themselves are still in place before the step.
    """
    if engine.zero_optimization_stage() == 0:
        norm = torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
        engine.step()
    else:
        engine.step()
        norm = engine.get_global_grad_norm()
    return float(norm)
