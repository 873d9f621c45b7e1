"""What optimizers with one or several slow momenta have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class Slots(NamedTuple):
    """Tensors of the parameters of one group that take the same step.

    Args:
        params: updated.
        grads: of the loss, of the parameters' shapes.
        momenta: one list of tensors for each momentum; updated.
        squares: the second moments; updated.
        step: how often these parameters have been stepped, this time included.
    """

    params: list[Tensor]
    grads: list[Tensor]
    momenta: list[list[Tensor]]
    squares: list[Tensor]
    step: int


class MomentaOptimizer(Optimizer):
    """An adaptive optimizer with momenta of several time scales.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate.
        betas: decay of the momentum and of the second moment; with several momenta
            `((b, ...), b2)`.
        omega: weight of the momentum in a step, the gradient has the rest; with several
            momenta a weight for each.
        eps: keeps the division finite.
        weight_decay: decoupled, as in AdamW.
        foreach: update all tensors of a group by one call for each operation; None for
            yes, where they are on an accelerator.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float | Sequence[float], float],
        omega: float | Sequence[float],
        eps: float,
        weight_decay: float,
        foreach: bool | None,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {name}={value}.")
        decays, weights = as_tuple(betas[0]), as_tuple(omega)
        if not all(0 <= beta < 1 for beta in (*decays, betas[1])):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas=}.")
        if len(decays) != len(weights):
            raise ValueError(
                f"omega must have a weight for each momentum, got {omega=} with "
                f"{betas=}."
            )
        if not all(weight >= 0 for weight in weights) or sum(weights) > 1 + 1e-12:
            raise ValueError(
                f"omega must be at least 0 and sum to at most 1, got {omega=}."
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "omega": omega,
            "eps": eps,
            "weight_decay": weight_decay,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    @abstractmethod
    def _update_(self, slots: Slots, group: dict[str, Any]) -> None:
        """The equation, on lists of tensors, in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for slots in self._slots(group):
                self._update_(slots, group)
        return loss

    def _slots(self, group: dict[str, Any]) -> Iterable[Slots]:
        names = momentum_names(group["betas"])
        together: dict[Any, Slots] = {}
        for i, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(
                    f"gradients of {type(self).__name__} must be dense, got a sparse "
                    "one. Take torch.optim.SparseAdam for that parameter."
                )
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in (*names, "exp_avg_sq"):
                    state[name] = torch.zeros_like(
                        param, memory_format=torch.preserve_format
                    )
            state["step"] += 1
            step = int(state["step"])
            foreach = group["foreach"]
            if foreach is None:
                foreach = param.device.type != "cpu"
            key = (step, param.dtype, param.device) if foreach else i
            if key not in together:
                together[key] = Slots([], [], [[] for _ in names], [], step)
            slots = together[key]
            slots.params.append(param)
            slots.grads.append(param.grad)
            for momenta, name in zip(slots.momenta, names, strict=True):
                momenta.append(state[name])
            slots.squares.append(state["exp_avg_sq"])
        return together.values()


def as_tuple(value: float | Sequence[float]) -> tuple[float, ...]:
    """One number or several as a tuple."""
    return tuple(value) if isinstance(value, Sequence) else (value,)


def momentum_names(betas: tuple[float | Sequence[float], float]) -> tuple[str, ...]:
    """The state names of the momenta."""
    if not isinstance(betas[0], Sequence):
        return ("exp_avg",)
    return tuple(f"exp_avg_{j}" for j in range(len(betas[0])))


def decay_(slots: Slots, group: dict[str, Any]) -> None:
    """Decoupled weight decay, as in AdamW."""
    if group["weight_decay"]:
        torch._foreach_mul_(slots.params, 1 - group["lr"] * group["weight_decay"])


def mix(
    fresh: list[Tensor],
    momenta: list[list[Tensor]],
    omega: float | Sequence[float],
    corrections: Sequence[float],
) -> list[Tensor]:
    r"""The direction :math:`(1 - \sum_j \omega_j) g + \sum_j \omega_j u_j / c_j`."""
    weights = as_tuple(omega)
    direction = list(torch._foreach_mul(fresh, 1 - sum(weights)))
    for momentum, weight, correction in zip(momenta, weights, corrections, strict=True):
        torch._foreach_add_(direction, momentum, alpha=weight / correction)
    return direction
