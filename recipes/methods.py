"""From a configuration to an optimizer: every method, over AdamW or ADOPT."""

from typing import Any

from runs import Config
from torch import nn

import lowcomm


def build_optimizer(config: Config, model: nn.Module, group: Any = None) -> Any:
    """The method of a run, but for DDP, around the inner optimizer.

    Args:
        config: the run.
        model: whose parameters it is built over.
        group: the workers; torch's default process group if None.
    """
    method, every = config.method, config.sync_every
    params, inner = build_inner(config, model)
    common = {"overlap": overlap_of(config), "codec": config.codec, **inner}
    common["group"] = group
    # What a run leaves open is for the method's own default.
    outer = {"outer_lr": config.outer_lr, "outer_momentum": config.outer_momentum}
    outer = {name: value for name, value in outer.items() if value is not None}
    match method:
        case "local_sgd" | "local_adam":
            rule: lowcomm.QSR | int = every
            if config.qsr:  # a warm-up begins near 0: its first round would not end
                rule = lowcomm.QSR(every, config.qsr, config.warmup_steps)
            average_states = method == "local_adam"
            return lowcomm.LocalSGD(
                params, sync_every=rule, average_states=average_states, **common
            )
        case "diloco":
            return lowcomm.DiLoCo(params, sync_every=every, **outer, **common)
        case "streaming":
            fragments = config.fragments
            return lowcomm.DiLoCo(
                params, sync_every=every, fragments=fragments, **outer, **common
            )
        case "eager":
            return lowcomm.DiLoCo(
                params, sync_every=every, eager=True, **outer, **common
            )
        case "noloco":
            return lowcomm.NoLoCo(params, sync_every=every, **outer, **common)
        case "desloc":
            periods = {
                "params": every,
                "exp_avg": every * config.first_periods,
                "exp_avg_sq": every * config.second_periods,
            }
            return lowcomm.DESLOC(params, sync_every=periods, **common)
        case "mtdao":
            return lowcomm.MTDAO(params, sync_every=every, **common)
        case "slowmo":
            slow = {name.replace("outer", "slow"): v for name, v in outer.items()}
            return lowcomm.SlowMo(params, sync_every=every, **slow, **common)
    raise ValueError(f"method must be one that exchanges in rounds, got {method!r}.")


def build_inner(config: Config, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """What a method is built over, and the keywords for what it builds itself."""
    is_slow = config.method == "mtdao"
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.slow_beta if is_slow else config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
    }
    omega = {"omega": config.omega} if is_slow else {}
    if config.inner == "adopt":
        return lowcomm.ADOPT(model.parameters(), **settings, **omega), {}
    if is_slow:  # over parameters it builds QHAdamW, which has no fused kernel
        return model.parameters(), settings | omega
    return model.parameters(), settings | {"fused": True}


def overlap_of(config: Config) -> int:
    """Steps between launching an exchange and applying its result."""
    if config.overlap is not None:
        return config.overlap
    return max(1, config.sync_every // 10) if config.method == "streaming" else 0
