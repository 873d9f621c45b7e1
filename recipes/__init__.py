raise ModuleNotFoundError(
    "recipes is not a package: its files are read, copied and launched, never "
    "imported. Launch one with `torchrun --nproc-per-node=2 recipes/pretrain.py`, or "
    "copy it into your own project."
)
