"""Train on the nodes of a Ray cluster: Ray places one actor on each, and each actor starts torchrun there.

python examples/ray_train.py --nodes 2 --ranks-per-node 8 -- train --mesh dp=4,tp=4 --out /shared/runs/first

What stands after -- is for `tilemesh`. Without a cluster Ray starts one on this machine.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys


class Node:
    """One node's torchrun."""

    def address(self) -> tuple[str, int]:
        """Where the ranks meet, if this is the first node: its name and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return socket.gethostbyname(socket.gethostname()), probe.getsockname()[1]

    def run(self, rank: int, nodes: int, ranks: int, first: tuple[str, int], words: list[str]) -> int:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(rank)]
        command += ["--nproc-per-node", str(ranks), "--master-addr", first[0], "--master-port", str(first[1])]
        return subprocess.run([*command, "-m", "tilemesh", *words], check=False).returncode


def main() -> int:
    import ray
    from ray.util.placement_group import placement_group

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("words", nargs="+", help="what tilemesh is told, after --")
    options = parser.parse_args()
    ray.init(log_to_driver=True, include_dashboard=False)
    bundle = {"CPU": float(options.ranks_per_node), **({"GPU": float(options.ranks_per_node)} if options.gpus else {})}
    spread = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD" if options.nodes > 1 else "PACK")
    ray.get(spread.ready())
    resources = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0.0), "placement_group": spread}
    nodes = [
        ray.remote(Node).options(placement_group_bundle_index=index, **resources).remote()
        for index in range(options.nodes)
    ]
    first = ray.get(nodes[0].address.remote())
    codes = ray.get(
        [
            node.run.remote(rank, options.nodes, options.ranks_per_node, first, options.words)
            for rank, node in enumerate(nodes)
        ]
    )
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
