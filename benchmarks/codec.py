"""What a codec costs, in memcpys of the values, and what it loses.

Encode and decode into outputs that are used again, as the engine does; with fresh ones
the operating system zeroes every page first. All values are standard normal.

    python benchmarks/codec.py
"""

import statistics

import torch
from _report import in_turns, ratio, report

from lowcomm.sync import make_codec

NAME = "codec"

# Of encode and decode in memcpys, of bits a value, of the relative error.
LIMITS = {
    "bf16": (3.0, 16.0, 0.0018),
    "int8": (4.0, 8.0625, 0.0078),
    "int4": (6.0, 4.0625, 0.14),
    "topk": (None, 0.5, None),
}
# Values between two neighbouring codes, to count a bias in.
LEVELS = {"int8": 127, "int4": 7}


def limited(limit: float | None) -> dict[str, float]:
    return {} if limit is None else {"limit": limit}


def measure_speed(name: str, flat: torch.Tensor, size: str, repeats: int) -> None:
    codec = make_codec(name)
    assert codec is not None
    n = flat.numel()
    copy, decoded = torch.empty_like(flat), torch.empty_like(flat)
    wire = codec.encode(flat)

    def reused() -> None:
        codec.decode(codec.encode(flat, out=wire), n, out=decoded)

    def fresh() -> None:
        codec.decode(codec.encode(flat), n)

    times, base, anew = in_turns(
        reused, lambda: copy.copy_(flat), fresh, repeats=repeats
    )
    speed = 4e-9 * n / statistics.median(times)
    limit = limited(LIMITS[name][0])
    report(NAME, f"{name}_{size}", ratio(times, base), "memcpys", **limit)
    report(NAME, f"{name}_{size}", speed, "GB/s of float32")
    report(NAME, f"{name}_fresh_{size}", ratio(anew, base), "memcpys")


def measure_loss(name: str, flat: torch.Tensor) -> None:
    codec = make_codec(name)
    assert codec is not None
    n = flat.numel()
    error = codec.decode(codec.encode(flat), n).sub_(flat)
    relative = float(error.norm() / flat.norm())
    bits = 8 * codec.wire_bytes(n) / n
    _, most_bits, most_error = LIMITS[name]
    report(NAME, f"{name}_bits", bits, "bits a value", **limited(most_bits))
    report(NAME, f"{name}_error", relative, "of the norm", **limited(most_error))
    if name in LEVELS:
        steps = flat.view(-1, codec.block).abs().amax(1, keepdim=True) / LEVELS[name]
        bias = abs(
            float((error.view(-1, codec.block) / steps).mean(dtype=torch.float64))
        )
        report(NAME, f"{name}_bias", bias, "steps", limit=1e-3)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    flat = torch.randn(50_000_000)
    for name in LIMITS:
        measure_loss(name, flat[: 1 << 23])
        # The choice of the largest takes ten times as long as the rest.
        few = name == "topk"
        measure_speed(name, flat[: 1 << 23], "8M", repeats=3 if few else 15)
        measure_speed(name, flat, "50M", repeats=1 if few else 7)


if __name__ == "__main__":
    main()
