"""Convolutions and products of blocks in every configuration: copies of 16 bytes that nobody waits for, and wgmma."""

WALK = """
import json, re, torch
from tilestack.kernels.conv.configs import CONFIGS
from tilestack.kernels.conv.conv2d import conv2d, conv2d_backward
from tilestack.kernels.sparse import blocks
from tilestack.lab.compile.absent_gpu import AbsentGpu
made = lambda *shape, **order: torch.empty(shape, dtype=torch.bfloat16, device="meta", **order)
image = lambda *shape: made(*shape, memory_format=torch.channels_last)
x, weight, geometry = image(32, 128, 56, 56), image(256, 128, 3, 3), ((2, 2), (1, 1), (1, 1), 1)
places = torch.empty(512, dtype=torch.int32, device="meta")
with torch.no_grad(), AbsentGpu(90) as gpu:
    for config in CONFIGS.values():
        out = conv2d(x, weight, None, *geometry, config=config)
        conv2d_backward(out, x, weight, None, *geometry, (True, True, False), config=config)
    for config in blocks.CONFIGS.values():
        for side in (64, 128):
            blocks.dsd(made(512, side, side), places, places, made(4096, 4096), 4096 // side, config)
            blocks.dds(made(4096, 4096), made(512, side, side), places, places, 4096 // side, config)
            blocks.sampled_product(made(4096, 4096), made(4096, 4096), places, places, side, config)
    copies = re.compile(r"cp[.]async[.]c[ag][.]shared[.]global[^;]*, (0x[0-9a-f]+)(?:, %r[0-9]+)?;")
    of = lambda r: dict(copies=sorted(set(copies.findall(r.ptx))), waits=re.findall(r"wgmma.wait_group[.a-z]* ([0-9]+)", r.ptx))
    print(json.dumps([report.row() | of(report) for report in gpu.reports()]))
"""
PRODUCTS = {"conv2d_kernel", "conv2d_bwd_weight_kernel", "sparse_times_dense_kernel", "sampled_product_kernel"}


def test_every_configuration_copies_vectors_and_multiplies_meanwhile(uninterpreted):
    rows = [row for row in uninterpreted("-c", WALK) if row["kernel"] in PRODUCTS]
    assert {row["kernel"] for row in rows} == PRODUCTS
    assert {True, False} == {row["constants"].get("BACKWARDS") for row in rows} - {None}
    for row in rows:
        assert not row["failures"], row
        assert row["copies"] == ["0x10"], row
        assert row["instructions"]["wgmma"], row
        assert row["waits"][0] == "1", row  # the step before is waited for, not the one just begun


FIRST_LAYER = """
import json, re, torch
from tilestack.kernels.conv.configs import CONFIGS
from tilestack.kernels.conv.conv2d_lines import conv2d, conv2d_backward
from tilestack.lab.compile.absent_gpu import AbsentGpu
image = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta", memory_format=torch.channels_last)
x, weight, geometry = image(32, 3, 224, 224), image(64, 3, 7, 7), ((2, 2), (3, 3), (1, 1), 1)
with torch.no_grad(), AbsentGpu(90) as gpu:
    for config in CONFIGS.values():
        out = conv2d(x, weight, None, *geometry, config=config)
        conv2d_backward(out, x, weight, None, *geometry, (True, True, False), config=config)
    single = re.compile(r"ld[.]global[.]b16")
    print(json.dumps([report.row() | dict(singles=len(single.findall(report.ptx))) for report in gpu.reports()]))
"""


def test_of_three_channels_written_out_in_lines_every_product_has_vectors_and_wgmma(uninterpreted):
    rows = [row for row in uninterpreted("-c", FIRST_LAYER) if row["kernel"] in PRODUCTS]
    assert {(row["kernel"], row["constants"].get("BACKWARDS")) for row in rows} == {
        ("conv2d_kernel", True), ("conv2d_kernel", False), ("conv2d_bwd_weight_kernel", None)
    }  # fmt: skip
    for row in rows:
        assert not row["failures"], row
        assert row["instructions"]["wgmma"], row
        assert row["instructions"]["cp.async"], row
        assert not row["instructions"]["mma"], row
        assert not row["singles"], row


HOPPER = """
import json, torch
from tilestack.kernels.hopper.conv2d import CODES_CONFIGS, CONFIGS, conv2d, conv2d_backward, conv2d_int8
from tilestack.lab.compile.absent_gpu import AbsentGpu
image = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta", memory_format=torch.channels_last)
x, weight, bias = image(32, 256, 28, 28), image(512, 256, 3, 3), torch.empty(512, dtype=torch.bfloat16, device="meta")
with torch.no_grad(), AbsentGpu(90) as gpu:
    for config in CONFIGS.values():
        for stride in ((1, 1), (2, 2)):
            out = conv2d(x, weight, bias, stride, (1, 1), (1, 1), 1, config=config)
            conv2d_backward(out, x, weight, bias, stride, (1, 1), (1, 1), 1, (True, False, False), config=config)
        conv2d(x, weight[:, :, :1, :1].clone(), bias, (1, 1), (0, 0), (1, 1), 1, config=config)
    for config in CODES_CONFIGS.values():
        for dtype in ("bfloat16", "float32"):
            codes = x.to(torch.int8), weight.to(torch.int8)
            conv2d_int8(*codes, bias[0], bias, bias, (1, 1), (1, 1), (1, 1), 1, dtype, config=config)
print(json.dumps([report.row() for report in gpu.reports()]))
"""


def test_every_configuration_for_hopper_fits(uninterpreted):
    rows = uninterpreted("-c", HOPPER)
    assert {row["kernel"] for row in rows} == {"conv2d_hopper_kernel", "matmul_hopper_kernel"}
    for row in rows:
        assert not row["failures"], row
        assert row["instructions"]["tma"], row
        assert row["instructions"]["wgmma"], row
