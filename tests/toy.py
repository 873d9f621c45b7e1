"""Two problems small enough to check: a quadratic by hand, a network by its bits.

The quadratic: worker m pulls two parameters towards its own target,

    f_m(x) = 1/2 * sum_i a_i (x_i - c_mi)^2,    a = (1, 4),
    c_0 = (1, -1),  c_1 = (3, 1),  start (0, 0.5),

so that its gradient is a * (x - c_m), without noise and in float64.

The network is seeded by explicit generators only: the same (step, rank) is the same
batch wherever it is asked for, and the global random state is left alone.
"""

import io

import torch
from torch import Tensor, nn

CURVATURE = torch.tensor([1.0, 4.0], dtype=torch.float64)
TARGETS = torch.tensor([[1.0, -1.0], [3.0, 1.0]], dtype=torch.float64)


def start() -> nn.Parameter:
    return nn.Parameter(torch.tensor([0.0, 0.5], dtype=torch.float64))


def pull(x: nn.Parameter, opt: torch.optim.Optimizer, rank: int) -> None:
    """One optimizer step on the quadratic of worker `rank`."""
    x.grad = CURVATURE * (x.detach() - TARGETS[rank])
    opt.step()


def trajectory(x: nn.Parameter, opt, rank: int, num_steps: int) -> list[list[float]]:
    """The parameters after each of `num_steps` steps on the quadratic."""
    points = []
    for _ in range(num_steps):
        pull(x, opt, rank)
        points.append(x.tolist())
    return points


def scalar(value: float, dtype=torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def slide(x: Tensor, opt: torch.optim.Optimizer, slope: float = 1.0) -> None:
    """One optimizer step with the same gradient everywhere."""
    x.grad = torch.full_like(x, slope)
    opt.step()


def network(seed: int = 0, dtype=torch.float64) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return model


def loss_of(model: nn.Module, step: int, rank: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(4, 3, generator=generator).to(dtype)
    target = torch.randn(4, 2, generator=generator).to(dtype)
    return (model(batch) - target).square().mean()


def train(model: nn.Module, opt, steps: range, rank: int = 0) -> None:
    for step in steps:
        opt.zero_grad()
        loss_of(model, step, rank).backward()
        opt.step()


def snapshot(tree):
    """A copy of nested tensors, containers and plain values."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(snapshot(value) for value in tree)
    return tree


def tensors_of(tree) -> list[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in tensors_of(value)]
    if isinstance(tree, list | tuple):
        return [t for value in tree for t in tensors_of(value)]
    return []


def parameters_of(model: nn.Module) -> list[Tensor]:
    return snapshot(list(model.parameters()))


def inner_state_of(opt) -> list:
    """The inner optimizer's state, in the order of the parameters."""
    return snapshot([opt.state[p] for g in opt.param_groups for p in g["params"]])


def same(left, right) -> bool:
    """Whether nested containers hold the same bits in the same dtypes and shapes."""
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left.nan_to_num(7.5), right.nan_to_num(7.5))
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, list | tuple):
        return (
            isinstance(right, list | tuple)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    return bool(left == right)


def through_a_file(state):
    """What `torch.load` with its safe defaults makes of a saved `state`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
