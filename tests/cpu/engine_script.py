"""A small model trained by another engine, started by what `tilemesh plan --for` wrote: prints the loss of each step.

python engine_script.py deepspeed|accelerate|plain LOSSES [flags of the launch command]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, TOKENS = 4, 4, 16


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(intermediate_size=64, vocab_size=64, **sizes)).float()  # type: ignore[arg-type]


def batch(step: int) -> Tensor:
    return torch.randint(0, 64, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("losses", type=Path)
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--per_device_train_batch_size", type=int, default=BATCH)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, eps=1.0)  # nearly linear in its gradients
    if args.engine == "deepspeed":
        import deepspeed

        net, optimizer, _, _ = deepspeed.initialize(args=args, model=net, optimizer=optimizer)
        assert net.zero_optimization_stage() == 2
        sizes = net.train_micro_batch_size_per_gpu(), net.gradient_accumulation_steps()
    else:
        sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if args.engine == "accelerate":
            from accelerate import Accelerator

            theirs = Accelerator()
            net, optimizer = theirs.prepare(net, optimizer)
    assert world * sizes[0] * sizes[1] == BATCH
    losses = []
    for step in range(STEPS):
        own = batch(step).tensor_split(world)[rank]
        total = torch.zeros(())
        for rows in own.split(sizes[0]):
            loss = net(input_ids=rows, labels=rows).loss
            if args.engine == "deepspeed":
                net.backward(loss)
                net.step()
            elif args.engine == "accelerate":
                theirs.backward(loss / sizes[1])
            else:
                (loss / sizes[1]).backward()
            total += loss.detach() / sizes[1]
        if args.engine != "deepspeed":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # as DeepSpeed does unless it is told
            optimizer.step()
            optimizer.zero_grad()
        if world > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total) / world)
    if rank == 0:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
