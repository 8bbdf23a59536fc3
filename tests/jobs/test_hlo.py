"""What is read of a program that the TPU compiler has compiled; the texts are short ones in its format."""

import pytest

from jobs.runtime.jax import hlo

ESTIMATE = 'backend_config={"window_config":{"estimated_cycles":"%d","iteration_bounds":["1"]}}'


def operation(name: str, cycles: int, op_name: str = "", opcode: str = "fusion") -> str:
    meta = f'metadata={{op_name="{op_name}" stack_frame_id=3}}, ' if op_name else ""
    shape = "f32[8,128]{1,0:T(8,128)S(1)}"
    return f"  %{name} = {shape} {opcode}(%p), kind=kLoop, calls=%inner, {meta}{ESTIMATE % cycles}"


def program(*lines: str, before: str = "") -> str:
    return "\n".join(
        [
            "HloModule jit_step, is_scheduled=true",
            "%inner (p: f32[8,128]) -> f32[8,128] {",
            "  %p = f32[8,128]{1,0:T(8,128)} parameter(0)",
            operation("counted_by_the_fusion_around_it", 999, opcode="add").replace("calls=%inner, ", ""),
            "}",
            before,
            "ENTRY %main.1_spmd (p: f32[8,128], q: bf16[4,6]) -> (f32[8,128], f32[]) {",
            "  %p = f32[8,128]{1,0:T(8,128)} parameter(0)",
            "  %q = bf16[4,6]{1,0:T(8,128)(2,1)} parameter(1)",
            *lines,
            "}",
        ]
    )


LOOP = """%body.2 (w: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = f32[8,128]{1,0} get-tuple-element(%w), index=1
  %f.9 = f32[8,128]{1,0} fusion(%p), calls=%inner, backend_config={"window_config":{"estimated_cycles":"10"}}
}
%condition.3 (w: (s32[], f32[8,128])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(7)
  %i = s32[]{:T(128)} get-tuple-element(%w), index=0
  ROOT %lt.4 = pred[]{:T(512)} compare(%i, %constant.4), direction=LT, metadata={op_name="jit(step)/while/cond/lt"}
}"""
WHILE = (
    "  %while.1 = (s32[]{:T(128)}, /*index=1*/f32[8,128]{1,0:T(8,128)S(1)}) while(%tuple.2), condition=%condition.3, "
    'body=%body.2, metadata={op_name="jit(step)/while"}'
)


def test_a_loops_operations_count_as_often_as_it_turns_and_those_within_a_fusion_not_at_all() -> None:
    text = program(operation("a", 100), WHILE, before=LOOP)
    assert hlo.summary(text, [(0, 0)]).all_cycles == 100 + 7 * 10
    said = WHILE + ', backend_config={"known_trip_count":{"n":"3"}}'
    assert hlo.summary(program(said, before=LOOP), [(0, 0)]).all_cycles == 3 * 10


PART_OF_A_STACK = """%take.1 (s: f32[12,8,128], i: s32[]) -> f32[8,128] {
  %s = f32[12,8,128]{2,1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  ROOT %cut = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%s, %i), dynamic_slice_sizes={1,8,128}
}
%renew.1 (s: f32[12,8,128], n: f32[1,8,128]) -> f32[12,8,128] {
  %s = f32[12,8,128]{2,1,0:T(8,128)} parameter(0)
  %n = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  ROOT %put = f32[12,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%s, %n)
}"""
MATRIX_BYTES = 4 * 8 * 128
STACK = "  %stack = f32[12,8,128]{2,1,0:T(8,128)} parameter(2)"


@pytest.mark.parametrize(
    ("line", "moved_bytes"),
    [
        (operation("reads_memory_and_writes_beside_the_core", 1), MATRIX_BYTES),
        (
            operation("reads_both", 1).replace("S(1)", "").replace("(%p)", "(%p, %q)"),
            2 * MATRIX_BYTES + 4 * 6 * 2,
        ),
        (
            "  %c = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)",
            MATRIX_BYTES + 4,
        ),
        (f"  %cut = f32[8,128]{{1,0}} fusion(%stack, %p), calls=%take.1, {ESTIMATE % 1}", 3 * MATRIX_BYTES),
        (
            f"  %put = f32[12,8,128]{{2,1,0}} fusion(%stack, %p), calls=%renew.1, {ESTIMATE % 1}",
            2 * MATRIX_BYTES,
        ),
    ],
)
def test_what_an_operation_moves_to_and_from_memory_is_the_part_that_it_takes_or_renews(
    line: str, moved_bytes: int
) -> None:
    assert hlo.summary(program(STACK, line, before=PART_OF_A_STACK), [(0, 0)]).memory_bytes == moved_bytes


@pytest.mark.parametrize(
    ("op_name", "label"),
    [
        ("jit(step)/shard_map/jvp(layer_3)/dot_general", ("layers", "dot_general")),
        ("jit(step)/shard_map/transpose(jvp(layer_11))/dot_general", ("layers, backward", "dot_general")),
        ("jit(step)/shard_map/transpose(jvp(layer_1/bmhk,bshk->bhms))/add", ("layers, backward", "add")),
        ("jit(train_step)/jvp(layer_0_qkv)/dot_general", ("layers_qkv", "dot_general")),
        ("jit(step)/optimizer/jit(_where)/select_n", ("optimizer", "select_n")),
        ("jit(step)/shard_map/jvp(bhms,bshk->bmhk)/dot_general", ("elsewhere", "dot_general")),
        ("jit(f)/shard_map/while/body/checkpoint/jvp(head)/tanh", ("head", "tanh")),
        ("", ("made by the compiler", "fusion")),
    ],
)
def test_an_operation_has_the_name_of_its_layer_and_of_its_direction(
    op_name: str, label: tuple[str, str]
) -> None:
    assert hlo.summary(program(operation("a", 5, op_name)), [(0, 0)]).cycles == {label: 5}


GROUPS = [
    ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
    ("replica_groups={}", [[0, 1, 2, 3]]),
    ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
    ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['data'=2,'fsdp'=2] {'fsdp'}", [[0, 1], [2, 3]]),
    ("replica_groups=mesh['data'=2,'fsdp'=2] {'data'}", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['data'=2,'fsdp'=2] {'data','fsdp'}", [[0, 1, 2, 3]]),
    ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
]


@pytest.mark.parametrize(("attributes", "groups"), GROUPS)
def test_the_groups_of_a_collective_are_read_in_every_form_that_xla_writes(
    attributes: str, groups: list[list[int]]
) -> None:
    assert hlo.device_groups(f"channel_id=1, {attributes}, use_global_device_ids=true", 4) == groups


ONE_HOST, TWO_HOSTS = [(0, 0)] * 4, [(0, 0), (0, 0), (0, 1), (0, 1)]
ALL, PAIRS = "replica_groups={{0,1,2,3}}", "replica_groups={{0,1},{2,3}}"
P, Q = 8 * 128 * 4, 4 * 6 * 2
SEND = (
    "  %send.1 = (f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%p, %after-all), channel_id=4, "
    'is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ALL_REDUCE"}'
)


@pytest.mark.parametrize(
    ("line", "places", "found"),
    [
        (
            f"  %a = (f32[8,128]{{1,0}}, bf16[4,6]{{1,0}}) all-reduce(%p, /*index=1*/%q), {ALL}, to_apply=%inner",
            ONE_HOST,
            ("all-reduce", "within a host", 4, round((P + Q) * 2 * 3 / 4), 0),
        ),
        (
            f"  %a = bf16[8,6]{{1,0}} all-gather(%q), {PAIRS}, dimensions={{0}}",
            TWO_HOSTS,
            ("all-gather", "within a host", 2, Q, 0),
        ),
        (
            f"  %a = bf16[16,6]{{1,0}} all-gather-start(%q), {ALL}, dimensions={{0}}",
            TWO_HOSTS,
            ("all-gather", "between hosts", 4, 3 * Q, 0),
        ),
        (
            f"  %a = f32[2,128]{{1,0}} reduce-scatter(%p), {ALL}, to_apply=%inner",
            TWO_HOSTS,
            ("reduce-scatter", "between hosts", 4, P * 3 // 4, 0),
        ),
        (SEND, [(0, 0), (0, 0), (1, 1), (1, 1)], ("all-reduce", "between slices", 2, P, 0)),
    ],
)
def test_what_a_device_sends_follows_from_the_collective_and_its_group(
    line: str, places: list[tuple[int, int]], found: tuple[str, str, int, int, bool]
) -> None:
    assert hlo.summary(program(line), places).collectives == [found]


FUSED_SUM = """%%%s (r: f32[8,128]) -> (f32[8,128], f32[2,128]) {
  %%r = f32[8,128]{1,0} parameter(0)
  %%sum.%s = f32[2,128]{1,0} reduce-scatter(%%r), channel_id=%s, replica_groups={{0,1,2,3}}, to_apply=%%inner, \
backend_config={"async_collective_fusion_config":{"flag_end":"8","flag_start":"2"}}
}"""
PAIR = (
    "  %s.1 = f32[8,128]{1,0} all-reduce-start(%p), replica_groups={{0,1},{2,3}}, to_apply=%inner",
    "  %d.1 = f32[8,128]{1,0} all-reduce-done(%s.1)",
)
LOOP_OF_A_PAIR = LOOP.replace("  %f.9", f"{PAIR[0]}\n  %f.9").replace("\n}", f"\n{PAIR[1]}\n}}", 1)
WRAPPED = """%wrapped (r: f32[8,128]) -> f32[2,128] {
  %r = f32[8,128]{1,0} parameter(0)
  %sum.1 = f32[2,128]{1,0} reduce-scatter(%r), replica_groups={{0,1,2,3}}, to_apply=%inner
}"""
TRANSFER = '_xla_host_transfer_rendezvous="sum_0"'
SEND_BETWEEN = (
    "  %send.1 = (f32[8,128]{1,0}, u32[], token[]) send(%p, %after-all), channel_id=3, "
    f'frontend_attributes={{_xla_megascale_transfer_type="ALL_REDUCE",{TRANSFER}}}'
)
RECEIVE = (
    f"  %recv.1 = (f32[8,128]{{1,0}}, u32[], token[]) recv(%after-all), frontend_attributes={{{TRANSFER}}}"
)
RECEIVED = "  %done.1 = (f32[8,128]{1,0}, token[]) recv-done(%recv.1), channel_id=4"


def fused(name: str, cycles: int) -> str:
    return operation(name, cycles).replace("%inner", f"%computation_{name}")


@pytest.mark.parametrize(
    ("lines", "before", "overlapped"),
    [
        ([operation("a", 1), PAIR[0], operation("b", 100), operation("c", 20), PAIR[1], operation("d", 3)], "", [120]),
        (  # two at once share the core's cycles by their bytes
            [
                PAIR[0],
                "  %s.2 = f32[24,128]{1,0} all-gather-start(%p), replica_groups={{0,1},{2,3}}",
                operation("b", 100),
                PAIR[1],
                operation("c", 20),
                "  %d.2 = f32[24,128]{1,0} all-gather-done(%s.2)",
            ],
            "",
            [50, 50 + 20],
        ),
        (  # one within the slice and one between slices do not
            [PAIR[0], SEND_BETWEEN, RECEIVE, operation("b", 100), PAIR[1], RECEIVED],
            "",
            [100, 100],
        ),
        (
            [
                "  %s.1 = ((f32[8,128]), f32[2,128]) async-start(%p), calls=%wrapped",
                operation("b", 100),
                "  %d.1 = f32[2,128]{1,0} async-done(%s.1)",
            ],
            WRAPPED,
            [100],
        ),
        ([WHILE], LOOP_OF_A_PAIR, [7 * 10]),
        (  # a collective in three fusions is one; what is carried out between these carries it no further
            [fused("begin", 1), operation("b", 100), fused("go_on", 50), operation("c", 20), fused("end", 2)],
            "\n".join(FUSED_SUM % (f"computation_{name}", name, "5") for name in ("begin", "go_on", "end")),
            [50],
        ),
        (  # two of one channel, as those of a shard_map are
            [
                *(fused(f"begin_{chain}", 1) for chain in (0, 1)),
                *(fused(f"go_on_{chain}", 50 - 20 * chain) for chain in (0, 1)),
                *(fused(f"end_{chain}", 2) for chain in (0, 1)),
            ],
            "\n".join(
                FUSED_SUM
                % (f"computation_{name}_{chain}", name, f'1, frontend_attributes={{chain_id="{chain}"}}')
                for name in ("begin", "go_on", "end")
                for chain in (0, 1)
            ),
            [50, 30],
        ),
    ],
)  # fmt: skip
def test_what_the_core_computes_from_a_collectives_start_to_its_end_hides_it(
    lines: list[str], before: str, overlapped: list[float]
) -> None:
    found = hlo.summary(program(*lines, before=before), [(0, 0), (0, 0), (1, 0), (1, 0)]).collectives
    assert [each.overlapped_cycles for each in found] == [round(cycles) for cycles in overlapped]


def test_a_sum_that_the_compiler_has_fused_with_a_slice_sends_what_a_reduce_scatter_sends() -> None:
    scatter = f"""%all-reduce-scatter.1 (p: f32[8,128]) -> f32[2,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  %sum = f32[8,128]{{1,0}} all-reduce(%p), {ALL}, to_apply=%inner
}}"""
    line = "  %f = f32[2,128]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    (found,) = hlo.summary(program(line, before=scatter), ONE_HOST).collectives
    assert (found.kind, found.sent_bytes) == ("reduce-scatter", P * 3 // 4)


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (
            "E1000: CompileTimeHbmOom: the total memory required (48.00G) exceeds available HBM (15.75G).",
            (48 * 2**30, round(15.75 * 2**30)),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.50M of 256.0M hbm.",
            (round(512.5 * 2**20), 256 * 2**20),
        ),
        ("INTERNAL: Mosaic failed to compile TPU kernel", None),
    ],
)
def test_a_program_that_is_too_large_is_told_from_one_that_cannot_be_compiled(
    message: str, found: tuple[int, int] | None
) -> None:
    assert hlo.out_of_memory(message) == found
