"""`python -m keyfed`, and `torchrun --nproc-per-node 2 -m keyfed`: the command line."""

from keyfed.cli.app import main

if __name__ == "__main__":
    main()
