"""Floats to bytes and back: layout, error, edges, and what must not change a result."""

import copy
import math
import pickle
import threading

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lowcomm.sync.codec import BF16, Codec, Int4, Int8, TopK, make_codec

CODECS = [BF16(), Int8(), Int4(), TopK(), TopK(density=0.3)]
SCALED = [Int8(), Int4()]
LEVELS = {"int8": 127, "int4": 7}
FLOAT32 = torch.finfo(torch.float32)
DENORMAL = 2.0**-149  # the least float32 above zero
LARGE = (1 << 20) + (1 << 19) + 777  # several chunks and a short block

each = pytest.mark.parametrize("codec", CODECS, ids=repr)
each_scaled = pytest.mark.parametrize("codec", SCALED, ids=repr)

sizes = st.one_of(
    st.sampled_from([0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025]),
    st.sampled_from([4095, 4096, 4097, 4096 + 511, 4608, 4609]),
    st.integers(0, 5000),
)


def there_and_back(codec, flat):
    return codec.decode(codec.encode(flat), flat.numel())


def randn(n, seed=0, exponent=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    return (values * 10.0**exponent).float()


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def peaks(flat, block):
    """The largest magnitude in the block of each value."""
    blocks = flat.abs().split(block)
    return torch.cat([part.amax().expand(len(part)) for part in blocks])


# The bytes, by hand


@pytest.mark.parametrize(
    ("codec", "values", "wire"),
    [
        pytest.param(BF16(), [1.0, -2.0], "803f 00c0", id="bf16"),
        # 127 / 127 is a scale of 1, 0x3f800000.
        pytest.param(Int8(), [127, -64.4, 0.6, -1], "0000803f 7f c0 01 ff", id="int8"),
        # Halves (7, -3) and (1,): 7+8 + 16 (1+8) = 0x9f, -3+8 + 16 (0+8) = 0x85.
        pytest.param(Int4(), [7, -3.4, 0.6], "0000803f 9f 85", id="int4-odd"),
        # Halves (0, -14) and (6, 14) in steps of 2: 8 + 16 (3+8), 1 + 16 (7+8).
        pytest.param(Int4(), [0, -14, 6, 14], "00000040 b8 f1", id="int4-even"),
        # No division by a scale of zero, or by a denormal one.
        pytest.param(Int8(), [0, -0.0], "0000803f 00 00", id="int8-zeros"),
        pytest.param(Int4(), [0, -0.0], "0000803f 88", id="int4-zeros"),
        pytest.param(TopK(0.5), [3, -1, 0, -4], "0000 0300 4040 80c0", id="topk"),
    ],
)
def test_bytes_are_as_worked_out_by_hand(codec, values, wire):
    flat = torch.tensor(values, dtype=torch.float32)
    assert bytes(codec.encode(flat).tolist()) == bytes.fromhex(wire)


@pytest.mark.parametrize(
    ("codec", "values", "back"),
    [
        pytest.param(
            BF16(), [1 + 2**-8, 1 + 3 * 2**-8, -1e30], [1, 1 + 2**-6, -1e30], id="bf16"
        ),
        pytest.param(Int8(), [127, 0.5, 1.5, -2.5, 9.4], [127, 0, 2, -2, 9], id="int8"),
        pytest.param(Int4(), [7, 0.5, 1.5, -2.5, 4.4], [7, 0, 2, -2, 4], id="int4"),
        pytest.param(TopK(0.4), [1, -9, 0, 2, 8], [0, -9, 0, 0, 8], id="topk"),
    ],
)
def test_values_come_back_rounded_to_nearest_even(codec, values, back):
    decoded = there_and_back(codec, torch.tensor(values, dtype=torch.float32))
    torch.testing.assert_close(
        decoded, torch.tensor(back, dtype=torch.float32), rtol=2**-8, atol=0
    )


def test_the_second_half_of_an_int4_block_is_in_the_upper_half_bytes():
    flat = torch.arange(512).remainder(15).sub(7).float()
    codes = Int4().encode(flat)[4:].int()
    assert torch.equal((codes & 15) - 8, flat[:256].int())
    assert torch.equal((codes >> 4) - 8, flat[256:].int())


def test_scales_of_all_blocks_come_first():
    flat = torch.cat([torch.full((512,), 7.0), torch.full((100,), 14.0)])
    for codec, largest in ((Int8(), 127), (Int4(), 7)):
        scales = codec.encode(flat)[:8].view(torch.float32)
        torch.testing.assert_close(scales, torch.tensor([7.0, 14.0]) / largest)


# Sizes


@each
@given(n=sizes, seed=st.integers(0, 99))
def test_wire_bytes_is_the_size_of_the_message(codec, n, seed):
    flat = randn(n, seed)
    wire = codec.encode(flat)
    assert (wire.dtype, wire.shape) == (torch.uint8, (codec.wire_bytes(n),))
    decoded = codec.decode(wire, n)
    assert (decoded.dtype, decoded.shape) == (torch.float32, (n,))


@pytest.mark.parametrize(
    ("codec", "n", "size"),
    [
        (BF16(), 3, 6),
        (Int8(), 1, 4 + 1),
        (Int8(), 512, 4 + 512),
        (Int8(), 513, 8 + 513),
        (Int4(), 1, 4 + 1),
        (Int4(), 511, 4 + 256),
        (Int4(), 512, 4 + 256),
        (Int4(), 513, 8 + 257),
        (TopK(), 1, 4 * 1),
        (TopK(), 64, 4 * 1),
        (TopK(), 65, 4 * 2),
        (TopK(), 4096, 4 * 64),
        (TopK(), 4097, 4 * 65),
        (TopK(density=1.0), 5000, 4 * 5000),
    ],
)
def test_wire_bytes_by_hand(codec, n, size):
    assert codec.wire_bytes(n) == size


@each
def test_nothing_becomes_nothing(codec):
    assert codec.wire_bytes(0) == 0
    assert there_and_back(codec, torch.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [(BF16(), 16), (Int8(), 8.0625), (Int4(), 4.0625), (TopK(), 0.5)],
    ids=repr,
)
def test_bits_a_value_are_what_is_claimed(codec, bits):
    assert 8 * codec.wire_bytes(1 << 20) / (1 << 20) == bits
    n = 50_000_001
    assert 8 * codec.wire_bytes(n) / n == pytest.approx(bits, rel=1e-5)


# Errors


@each_scaled
@given(n=sizes, seed=st.integers(0, 99), exponent=st.integers(-44, 37))
@example(n=513, seed=0, exponent=-38)
def test_the_error_is_at_most_half_a_step(codec, n, seed, exponent):
    flat = randn(n, seed, exponent).clamp(-FLOAT32.max, FLOAT32.max)
    if n == 0:
        return
    levels = LEVELS[codec.name]
    error = (there_and_back(codec, flat).double() - flat.double()).abs()
    bound = peaks(flat, 512).double() / levels / 2 * (1 + 1e-4)
    # A step has whole multiples of the least float: at most one more than it should.
    assert (error <= bound + levels * DENORMAL).all()


@each_scaled
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=700)
)
@example([FLOAT32.max, -FLOAT32.max, 1.0])
@example([DENORMAL, -DENORMAL, 0.0])
@example([190 * DENORMAL, DENORMAL])  # in steps of one and a half least floats
@example([FLOAT32.smallest_normal, DENORMAL])
def test_no_finite_value_overflows_or_leaves_its_half_step(codec, values):
    flat = torch.tensor(values, dtype=torch.float32)
    decoded = there_and_back(codec, flat)
    assert decoded.isfinite().all()
    if len(values):
        levels = LEVELS[codec.name]
        bound = peaks(flat, 512).double() / levels / 2 * (1 + 1e-4)
        error = (decoded.double() - flat.double()).abs()
        assert (error <= bound + levels * DENORMAL).all()


@given(n=sizes, seed=st.integers(0, 99), exponent=st.integers(-37, 37))
def test_bf16_errs_by_at_most_one_part_in_256(n, seed, exponent):
    flat = randn(n, seed, exponent)
    error = (there_and_back(BF16(), flat) - flat).abs()
    assert (error <= flat.abs() * 2**-8 + 1e-40).all()


@pytest.mark.parametrize(
    ("codec", "error"), [(BF16(), 0.0017), (Int8(), 0.0074), (Int4(), 0.135)], ids=repr
)
def test_the_relative_error_on_normal_values_is_what_is_claimed(codec, error):
    flat = randn(1 << 20)
    lost = there_and_back(codec, flat) - flat
    assert float(lost.norm() / flat.norm()) == pytest.approx(error, rel=0.03)


@each_scaled
def test_rounding_has_no_bias(codec):
    """Truncation would shrink every value by half a step."""
    flat = randn(1_000_000)
    steps = peaks(flat, 512) / LEVELS[codec.name]
    lost = (there_and_back(codec, flat) - flat).double() / steps
    assert abs(lost.mean()) < 1e-3
    kept = float(there_and_back(codec, flat) @ flat / (flat @ flat))
    assert kept == pytest.approx(1, abs=1e-3)


def test_bf16_has_no_bias():
    flat = randn(1_000_000)
    steps = 2.0 ** (flat.frexp().exponent - 8)
    lost = (there_and_back(BF16(), flat) - flat).double() / steps
    assert abs((lost * flat.sign()).mean()) < 1e-3


@each
def test_values_of_a_bf16_model_are_coded_as_any_others(codec):
    flat = randn(3000).bfloat16().float()
    decoded = there_and_back(codec, flat)
    if codec.name in ("bf16", "topk"):
        assert ((decoded == flat) | (decoded == 0)).all()
    else:
        lost = (decoded - flat).norm() / flat.norm()
        assert lost < {"int8": 0.01, "int4": 0.2}[codec.name]


# Edges of magnitude


@each
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zeros(codec, zero):
    flat = torch.full((10_000,), zero)
    assert torch.equal(there_and_back(codec, flat), torch.zeros(10_000))


@each_scaled
def test_a_block_of_zeros_stays_one_between_others(codec):
    flat = randn(3 * 512)
    flat[512:1024] = 0
    decoded = there_and_back(codec, flat)
    assert (decoded[512:1024] == 0).all()
    assert decoded[:512].any() and decoded[1024:].any()


@each_scaled
@pytest.mark.parametrize("magnitude", [1e-35, 1e-30, 1e-7, 1.0, 1e6, 1e30, 1e38])
def test_magnitude_does_not_matter(codec, magnitude):
    flat = randn(2000).clamp(-3, 3)
    plain = there_and_back(codec, flat)
    scaled = there_and_back(codec, flat * magnitude) / magnitude
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-5)


@each_scaled
def test_ratios_survive_where_half_precision_scales_would_not(codec):
    flat = torch.tensor([1e-9, -1e-9 / LEVELS[codec.name]])
    torch.testing.assert_close(there_and_back(codec, flat), flat, rtol=1e-6, atol=0)


@each
def test_a_processor_that_drops_denormals_makes_no_nan(codec):
    flat = torch.tensor([0.0, 1e-40, -DENORMAL] * 200)
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot drop denormals")
    try:
        decoded = there_and_back(codec, flat)
    finally:
        torch.set_flush_denormal(False)
    assert (decoded.abs() <= 1.01e-40).all()


# What is not finite


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 600, 4999])
def test_what_is_not_finite_never_comes_back_finite(codec, bad, where):
    flat = randn(5000)
    flat[where] = bad
    assert not there_and_back(codec, flat)[where].isfinite()


@each_scaled
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_makes_its_block_nan_and_no_other(codec, bad):
    flat = randn(3 * 512 + 100)
    good = there_and_back(codec, flat)
    flat[700] = bad
    decoded = there_and_back(codec, flat)
    assert decoded[512:1024].isnan().all()
    decoded[512:1024] = good[512:1024]
    assert same_bits(decoded, good)


def test_topk_keeps_nan_before_inf_before_all_else():
    flat = torch.tensor([1.0, math.inf, 3e38, math.nan, -5.0, -math.inf])
    decoded = there_and_back(TopK(density=0.5), flat)
    assert decoded[3].isnan() and decoded[1] == math.inf and decoded[5] == -math.inf
    assert torch.equal(decoded[[0, 2, 4]], torch.zeros(3))


# What is kept


@given(
    n=sizes,
    seed=st.integers(0, 99),
    density=st.sampled_from([0.001, 1 / 64, 0.1, 0.5, 1.0]),
)
def test_topk_keeps_exactly_the_largest(n, seed, density):
    flat = randn(n, seed)
    decoded = there_and_back(TopK(density=density), flat)
    for given_, kept in zip(flat.split(4096), decoded.split(4096), strict=True):
        count = math.ceil(given_.numel() * density)
        largest = given_.abs().argsort(descending=True)[:count]
        expected = torch.zeros_like(given_)
        expected[largest] = given_[largest].bfloat16().float()
        assert torch.equal(kept, expected)


def test_topk_tells_magnitudes_apart_that_bfloat16_does_not():
    above_one = torch.randperm(4096, generator=torch.Generator().manual_seed(0))
    flat = 1 + above_one * 2**-23
    flat[::2] *= -1
    kept = there_and_back(TopK(), flat).nonzero().flatten()
    assert sorted(above_one[kept].tolist()) == list(range(4096 - 64, 4096))


def test_topk_keeps_the_first_of_equal_magnitudes():
    flat = torch.tensor([1.0, -2.0, 2.0, 1.0, -1.0, 2.0]).repeat(100)
    decoded = there_and_back(TopK(density=0.4), flat)
    largest = flat.abs().argsort(descending=True, stable=True)[:240]
    expected = torch.zeros(600).index_copy(0, largest, flat[largest])
    assert torch.equal(decoded, expected)


def test_topk_of_everything_is_bf16():
    flat = randn(5000)
    assert torch.equal(
        there_and_back(TopK(density=1.0), flat), there_and_back(BF16(), flat)
    )


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, math.nan])
def test_an_impossible_density_is_refused(density):
    with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
        TopK(density=density)


# What must not change a result


@each
def test_aligned_slices_have_the_codes_of_the_whole(codec):
    flat = randn(LARGE)
    whole = there_and_back(codec, flat)
    cuts = [codec.block * c for c in (0, 1, 3, 100, 127)] + [1 << 19, (1 << 20) + 4096]
    bounds = [*cuts, LARGE]
    parts = [
        there_and_back(codec, flat[a:b])
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    assert same_bits(torch.cat(parts), whole)


@each_scaled
def test_messages_of_slices_make_up_the_message_of_the_whole(codec):
    flat = randn(LARGE)
    head, tail = codec.encode(flat[: 1 << 19]), codec.encode(flat[1 << 19 :])
    blocks = [(1 << 19) // 512, -(-(LARGE - (1 << 19)) // 512)]
    scales = torch.cat([head[: 4 * blocks[0]], tail[: 4 * blocks[1]]])
    codes = torch.cat([head[4 * blocks[0] :], tail[4 * blocks[1] :]])
    assert torch.equal(codec.encode(flat), torch.cat([scales, codes]))


@each
def test_the_number_of_threads_does_not_change_a_bit(codec):
    flat = randn(LARGE)
    one = codec.encode(flat)
    torch.set_num_threads(2)
    try:
        two = codec.encode(flat)
        decoded = codec.decode(two, LARGE)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, two)
    assert same_bits(decoded, codec.decode(one, LARGE))


@each
def test_outputs_may_be_used_again(codec):
    first, second = randn(5000, seed=1), randn(5000, seed=2)
    wire = torch.full((codec.wire_bytes(5000),), 255, dtype=torch.uint8)
    flat = torch.full((5000,), math.nan)
    for values in (first, second, first):
        assert codec.encode(values, out=wire) is wire
        assert torch.equal(wire, codec.encode(values))
        assert codec.decode(wire, 5000, out=flat) is flat
        assert same_bits(flat, codec.decode(wire, 5000))


@each
def test_values_may_be_replaced_by_what_comes_back(codec):
    flat = randn(5000)
    expected = there_and_back(codec, flat)
    codec.decode(codec.encode(flat), 5000, out=flat)
    assert same_bits(flat, expected)


@each
def test_inputs_are_left_as_they_are(codec):
    flat = randn(5000)
    wire = codec.encode(flat)
    bytes_before = wire.clone()
    codec.decode(wire, 5000)
    assert same_bits(flat, randn(5000))
    assert torch.equal(wire, bytes_before)


@each
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])
def test_a_message_may_begin_at_any_byte(codec, offset):
    flat = randn(1003)
    room = torch.zeros(codec.wire_bytes(1003) + offset + 2, dtype=torch.uint8)
    wire = room[offset:-2]
    codec.encode(flat, out=wire)
    assert torch.equal(wire, codec.encode(flat))
    assert same_bits(codec.decode(wire, 1003), there_and_back(codec, flat))
    assert not room[:offset].any() and not room[-2:].any()


@each
def test_values_may_begin_anywhere_in_their_memory(codec):
    flat = randn(1003)
    moved = torch.cat([torch.zeros(3), flat])[3:]
    assert torch.equal(codec.encode(moved), codec.encode(flat))


@each
def test_threads_do_not_disturb_each_other(codec):
    inputs = [randn(300_001, seed) for seed in range(4)]
    expected = [there_and_back(codec, flat) for flat in inputs]
    wrong, start = [], threading.Barrier(4)

    def work(flat, right):
        start.wait()
        for _ in range(5):
            if not same_bits(there_and_back(codec, flat), right):
                wrong.append(flat)

    threads = [
        threading.Thread(target=work, args=pair)
        for pair in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@each
def test_torch_modes_do_not_change_a_result(codec):
    flat = randn(3000)
    expected = []

    def in_a_new_thread():  # whose scratch is made in inference mode
        with torch.inference_mode():
            there_and_back(codec, flat)
        expected.append(there_and_back(codec, flat))

    thread = threading.Thread(target=in_a_new_thread)
    thread.start()
    thread.join()
    leaf = flat.clone().requires_grad_()
    torch.set_default_dtype(torch.float64)
    try:
        decoded = there_and_back(codec, leaf)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not decoded.requires_grad
    assert same_bits(decoded, there_and_back(codec, flat))
    assert same_bits(decoded, expected[0])


@pytest.mark.gpu
@each
def test_a_gpu_gives_the_same_bits(codec):
    flat = torch.cat([randn(LARGE), randn(4096, 1, -42), torch.zeros(4096)])
    wire = codec.encode(flat.cuda())
    assert torch.equal(wire.cpu(), codec.encode(flat))
    decoded = codec.decode(wire, flat.numel())
    assert same_bits(decoded.cpu(), there_and_back(codec, flat))


# Wrong calls


@each
@pytest.mark.parametrize(
    ("flat", "got"),
    [
        pytest.param(torch.zeros(4, dtype=torch.float64), "float64", id="float64"),
        pytest.param(torch.zeros(4, dtype=torch.bfloat16), "bfloat16", id="bfloat16"),
        pytest.param(torch.zeros(4, dtype=torch.int32), "int32", id="integers"),
        pytest.param(torch.zeros(2, 2), "shape (2, 2)", id="matrix"),
        pytest.param(torch.tensor(1.0), "shape ()", id="scalar"),
        pytest.param(torch.zeros(8)[::2], "non-contiguous", id="strided"),
    ],
)
def test_values_of_another_kind_are_refused(codec, flat, got):
    with pytest.raises(ValueError, match="flat must be contiguous") as caught:
        codec.encode(flat)
    assert got in str(caught.value)
    assert "Pass flat.float().flatten()." in str(caught.value)


@each
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda out: out[:-1], id="short"),
        pytest.param(lambda out: torch.cat([out, out]), id="long"),
        pytest.param(lambda out: out.int(), id="dtype"),
        pytest.param(lambda out: out.view(1, -1), id="matrix"),
        pytest.param(lambda out: out.repeat_interleave(2)[::2], id="strided"),
        pytest.param(lambda out: out.to("meta"), id="device"),
    ],
)
def test_outputs_and_messages_of_another_kind_are_refused(codec, change):
    flat = randn(100)
    wire = codec.encode(flat)
    with pytest.raises(ValueError, match="out must be .* Leave it out to get a new"):
        codec.encode(flat, out=change(wire))
    with pytest.raises(ValueError, match="out must be .* Leave it out to get a new"):
        codec.decode(wire, 100, out=change(flat))
    if change(wire).device == wire.device:
        with pytest.raises(ValueError, match="wire must be .* Pass what"):
            codec.decode(change(wire), 100)


@each
def test_a_message_of_another_size_is_refused(codec):
    wire = codec.encode(randn(1000))
    with pytest.raises(ValueError, match="for n=2000 values"):
        codec.decode(wire, 2000)
    with pytest.raises(ValueError, match="n must be .* at least 0, got n=-1"):
        codec.decode(wire, -1)


@each
def test_input_and_output_in_the_same_memory_are_refused(codec):
    flat = torch.ones(1000)
    size = codec.wire_bytes(1000)
    wire = flat.view(torch.uint8)[:size]
    with pytest.raises(ValueError, match="out must not share memory"):
        codec.encode(flat, out=wire)
    with pytest.raises(ValueError, match="out must not share memory"):
        codec.decode(wire, 1000, out=flat)


@each
def test_what_is_no_tensor_is_refused(codec):
    with pytest.raises(TypeError, match="flat must be a tensor, got list"):
        codec.encode([1.0])
    with pytest.raises(TypeError, match="wire must be a tensor, got bytes"):
        codec.decode(b"", 0)


# Names and settings


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        ("bf16", BF16()),
        ("int8", Int8()),
        ("int4", Int4()),
        ("topk", TopK(density=1 / 64)),
        (TopK(density=0.1), TopK(density=0.1)),
        (None, None),
    ],
)
def test_make_codec_knows_names_codecs_and_none(spec, codec):
    assert make_codec(spec) == codec
    if isinstance(spec, str):
        assert make_codec(spec).name == spec


@pytest.mark.parametrize("spec", ["int7", "INT8", "", 8, Int8, ["int8"]])
def test_make_codec_refuses_anything_else_and_says_what_it_knows(spec):
    with pytest.raises(ValueError) as caught:
        make_codec(spec)
    assert repr(spec) in str(caught.value)
    for name in ("bf16", "int8", "int4", "topk"):
        assert repr(name) in str(caught.value)


@each
def test_codecs_are_their_settings(codec):
    codec.encode(randn(100))  # scratch is not among them
    for twin in (copy.deepcopy(codec), pickle.loads(pickle.dumps(codec))):
        assert twin == codec and hash(twin) == hash(codec) and repr(twin) == repr(codec)
        assert torch.equal(twin.encode(randn(100)), codec.encode(randn(100)))
    assert len(pickle.dumps(codec)) < 200
    assert [other for other in CODECS if other == codec] == [codec]
    assert eval(repr(codec)) == codec


def test_a_codec_of_ones_own_needs_three_methods():
    class Float32(Codec):
        name = "float32"
        block = 1

        def wire_bytes(self, n):
            return 4 * n

        def encode_(self, flat, wire):
            wire.copy_(flat.view(torch.uint8))

        def decode_(self, wire, flat):
            flat.view(torch.uint8).copy_(wire)

    codec = make_codec(Float32())
    assert same_bits(there_and_back(codec, randn(100)), randn(100))
    with pytest.raises(TypeError, match="abstract"):
        Codec()
