"""`tilemesh train` as a rank that mpiexec, srun or torchrun started: a module of its own, which `-m` can name."""

import sys

from tilemesh.cli.commands.train import run_rank

if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1]))
