"""Every branch that a launcher takes by size is taken both ways by some case, and proved there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lowered import LOWERED, lowered

from tilestack import ops
from tilestack.lab.mutation.suite import elements_of
from tilestack.lab.proof.claims import claims
from tilestack.lab.proof.verify import prove

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = 1 << 17  # elements of a call that takes the interpreter little time
OF_THE_GPU = "one GPU takes one way; tests/compile compiles for those that take the other, or they are refused"
GPU_ONLY = "asked only where there is a GPU; tests/gpu and `tilestack verify` there take both ways"
EMULATED = "asked only on Hopper; tests/kernels/test_gluon_conv_on_cpu.py takes both ways"
LAYOUTS = "asked only on Hopper; tests/kernels/test_hopper.py takes both ways"
TOO_LARGE = "the other way takes tensors larger than memory here"
OF_SHAPES = "tests/kernels/test_gluon_products_on_cpu.py asks both ways, of shapes alone"
EXPANDED = "the other way takes expanded rows, one of the layouts"
DECODE_STEP = "no operator; tests/engine/test_persistent.py and tests/kernels/test_cuda_on_cpu.py take both ways"
FEW_ROWS = "tests/kernels/test_cuda_backend.py and test_cuda_on_cpu.py take both ways"
ON_HOPPER = "asked only on Hopper; tests/kernels/test_gluon_few_rows_on_cpu.py takes both ways"
LARGE_PAGES = "no operator; tests/kernels/test_cpu_large_pages.py takes both ways"
UNDECIDED = {
    "attention.ladder takes: q.shape[0] * q.shape[2] > MOST_HEADS": "beyond it the call is refused, which tests/ops shows",
    "conv.conv2d_lines takes_lines: weight.shape[3] <= MOST_TAPS": "the same",
    "attention.quantised takes_int8: q.shape[0] * q.shape[2] > MOST_HEADS": "the same",
    "hopper.attention_codes takes: k.shape[0] * k.shape[2] > MOST_HEADS": OF_SHAPES,
    "hopper.fp8_gated_tiles in_vectors: BLOCK * max(rows, x.shape[1], x.stride(0)) < 2**31": OF_SHAPES,
    "hopper.fp8_gated_tiles rows_in_vectors: BLOCK * grad.stride(0) < 2**31": OF_SHAPES,
    "quantised.fp8_tiles of_whole_vectors: BLOCK * max(*x.shape[-2:], x.stride(-2)) < 2**31": OF_SHAPES,
    "cuda.weight_only takes: shared_memory(x.device) < MOST_SHARED": OF_THE_GPU,
    "attention.aten has_flash: q.numel() > 0": GPU_ONLY,
    "attention.aten has_flash: q.shape[3] == v.shape[3] <= 256": GPU_ONLY,
    "attention.aten trusted_kernels: q.numel() > 0": GPU_ONLY,
    "hopper.attention takes: q.numel() > 0": GPU_ONLY,
    "hopper.attention takes: k.numel() > 0": GPU_ONLY,
    "hopper.attention takes: q.shape[1] < min(ROWS, k.shape[1])": GPU_ONLY,
    "hopper.attention takes: scale <= 0": GPU_ONLY,
    "hopper.attention cudnn_takes: q.shape[1] == k.shape[1] > 1": LAYOUTS,
    "hopper.conv2d takes_boxes: max(dilation) > 1": EMULATED,
    "hopper.conv2d takes_boxes: step > 1": EMULATED,
    "hopper.conv box_of_places: h * w <= places": EMULATED,
    "hopper.attention_codes takes: q.shape[1] < min(ROWS, k.shape[1])": GPU_ONLY,
    "hopper.attention_codes takes: q.numel() > 0": GPU_ONLY,
    "hopper.attention_tiles as_tma_reads: size > 1": LAYOUTS,
    "hopper.attention_tiles empty_as: min(tokens, heads) > 1": LAYOUTS,
    "hopper.attention_tiles empty_as: x.stride(2) > x.stride(1)": LAYOUTS,
    "hopper.attention_tiles tiles_of: size > 1": LAYOUTS,
    "quantised.codes reads_fp8: target.arch >= 89": OF_THE_GPU,
    "early begins_early: capability(device) >= FIRST_CAPABILITY": OF_THE_GPU,
    "hopper.fused fused_product: config.n > 128": "a configuration's, and each is proved",
    "matmul.tma can_move: shared_memory(x.device) < PIPELINE_BYTES": OF_THE_GPU,
    "attention.paged paged_tile: group < 4": "asked of half precisions, whose proofs take both ways",
    "attention.paged paged_tile: units > 2 * PROGRAMS * gpu": GPU_ONLY,
    "cpu.decode_step check_tokens: tokens > self.most": "no operator; tests/engine/test_cpu_step_shapes.py takes both ways",
    "cpu.large_pages use_large_pages: sum(end - start for start, end in spans) < WORTHWHILE": LARGE_PAGES,
    "cpu.large_pages whole_pages: start <= found[-1][1]": LARGE_PAGES,
    "cuda.decode_step divides: split > 0": DECODE_STEP,
    "cuda.decode_step divides: rows > 0": DECODE_STEP,
    "cuda.decode_step is_even: queries + keys <= WARPS": DECODE_STEP,
    "cuda.decode_step shape_refused: shape.hidden > 2048": DECODE_STEP,
    "cuda.matmul has_tensor_cores: torch.cuda.get_device_capability(x.device) >= (8, 0)": OF_THE_GPU,
    "cuda.paged_decode paged_attention: splits > 1": FEW_ROWS,
    "cuda.paged_decode takes: 0 < group <= MOST_GROUP": FEW_ROWS,
    "cuda.paged_decode takes: len({each.dtype for each in (block_tables, lengths, cu_queries)}) > 1": FEW_ROWS,
    "cuda.paged_decode takes: most_queries > 1": FEW_ROWS,
    "cuda.weight_only fitting_plan: (plan := plan_of(config, *sizes)).shared_bytes > MOST_SHARED": FEW_ROWS,
    "cuda.weight_only fitting_plan: config.row_warps > 1": FEW_ROWS,
    "cuda.weight_only fitting_plan: config.splits < MOST_SPLITS": FEW_ROWS,
    "cuda.weight_only plan_of: M <= 8": FEW_ROWS,
    "cuda.weight_only takes: plan_of(SMALLEST, *sizes_of(x, weight, scale)).shared_bytes > MOST_SHARED": FEW_ROWS,
    "cuda.weight_only takes: torch.cuda.get_device_capability(x.device) < (9, 0)": OF_THE_GPU,
    "hopper.few_rows plan: k > LEAST_STEP": ON_HOPPER,
    "hopper.few_rows plan: tiles > room": ON_HOPPER,
    "hopper.few_rows plan: slots_beside_x >= LEAST_SLOTS": ON_HOPPER,
    "hopper.few_rows takes: apart >= weight.shape[1]": ON_HOPPER,
    "hopper.few_rows plan: ring // (height * k) < LEAST_SLOTS": ON_HOPPER,
    "hopper.few_rows plan: rows >= M": ON_HOPPER,
    "hopper.few_rows plan: slots < of_a_program": ON_HOPPER,
    "hopper.few_rows few_rows_product: plan.parts > 1": ON_HOPPER,
    "hopper.scaled can_move_codes: x.numel() > 0": GPU_ONLY,
    "matmul.tma lies_in_rows: min(steps) > 0": EXPANDED,
    "matmul.tma lies_in_rows: steps[-1] >= matrix.shape[-1]": EXPANDED,
    "quantised.aten multiplies_fp8: torch.cuda.get_device_capability(x.device) < (9, 0)": OF_THE_GPU,
    "quantised.aten multiplies_fp8: x_scale.ndim > 1": GPU_ONLY,
    "quantised.aten multiplies_integers: weight.numel() > 0": GPU_ONLY,
    "quantised.aten multiplies_integers: x.shape[:-1].numel() < LEAST_ROWS": GPU_ONLY,
    "quantised.weight_only linear_weight_only: config.splits > 1": "a configuration's, and each is proved",
    "routing takes: experts > MOST_EXPERTS": "beyond it the call is refused, and the definition takes it",
    "memory.embedding sorted_and_zeros: vocabulary < 2**30": TOO_LARGE,
    "memory.permute index_up_to: farthest < 2**31": TOO_LARGE,
    "memory.rows sorted_by_place: rows <= torch.iinfo(d).max": TOO_LARGE,
    "norm.rows backward_shape: 1 < height <= 4": "it chooses the number of warps, and nothing that a proof could see",
    "norm.rows norm_forward: ragged.granule(columns, size) > 0": "the other way takes rows apart, one of the layouts",
    "softmax.masked places_in_mask: shape[-1] > 1": "the other way takes a mask that is strided, one of the layouts",
    "optim.steps log: x > 0": "optimizers are no operators; tests/optim takes both ways",
}


def test_every_size_that_a_launcher_looks_at_is_on_both_sides_of_its_threshold():
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("thresholds.py"))],
        env=os.environ | dict(TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path])),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = set(json.loads(done.stdout))
    assert found - set(UNDECIDED) == set(), "add a case that crosses it, or lower it in lowered.py"
    assert set(UNDECIDED) - found == set(), "these are crossed now: strike them off the list"


@pytest.mark.parametrize("what", LOWERED)
def test_what_lies_beyond_a_lowered_threshold_is_proved(what):
    file, constants, names = LOWERED[what]
    with lowered(file, constants):
        for name in names:
            operator = ops.operator_named(name)
            dtypes = [torch.float32, torch.float16]  # some thresholds are those of half precision
            tried = claims([operator], CPU, only={name: "triton"}, dtypes=dtypes, every_variant=False)
            proofs = [prove(claim) for claim in tried if elements_of(claim.case) <= SMALL]
            assert not [proof for proof in proofs if proof.ok is False]
            assert any(proof.ok for proof in proofs)
