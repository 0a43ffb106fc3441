"""Tracing once, splitting at attention, compiling each distinct piece once; and what breaks it."""

from __future__ import annotations

import multiprocessing
import operator
import random
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minivllm import LLM, SamplingParams
from minivllm.compilation.compilers import EagerCompiler, InductorCompiler, InductorPiece
from minivllm.compilation.piecewise_backend import PiecewiseBackend
from minivllm.compilation.signature import graph_signature
from minivllm.compilation.splitting import split_graph
from minivllm.compilation.wrapper import CompiledModel
from minivllm.errors import ConfigError, ModelError
from minivllm.forward_context import ForwardContext, set_forward_context
from minivllm.layers.attention import Attention
from minivllm.models.source import find_model

ATTENTION = "minivllm::attention_with_output"
ALL_TINY = ["tiny", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Test operations: one to split at, and one that does something that its schema does not say.
_library = torch.library.Library("minivllm_test", "FRAGMENT")
_library.define("split_here(Tensor x, Tensor(a!) out) -> ()")
_library.define("secret_effect(Tensor x) -> ()")
_effects: list[int] = []


def _double(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


for _key in ("CPU", "CUDA"):
    _library.impl("split_here", _double, _key)
    _library.impl("secret_effect", lambda x: _effects.append(x.shape[0]), _key)
_library._register_fake("split_here", lambda x, out: None)
_library._register_fake("secret_effect", lambda x: None)
SPLIT = "minivllm_test::split_here"


def split_here(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.minivllm_test.split_here(x, out)
    return out


class Small(nn.Module):
    """Anything with a model's interface: token ids and positions in, something per token out."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids.float(), positions.float())


def compile_small(
    body: Any, compiler: Any = None, strict: bool = False, sizes: tuple[int, ...] = ()
) -> CompiledModel:
    backend = PiecewiseBackend(compiler or EagerCompiler(), [SPLIT], sizes)
    model = CompiledModel(Small(body), backend, strict)
    model.trace(torch.device("cpu"))
    return model


def run_small(model: CompiledModel, num_tokens: int) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.arange(num_tokens, dtype=torch.int32)
        return model(ids, torch.ones(num_tokens, dtype=torch.int64))


# ------------------------------------------------------------------------------- the whole engine


def generate(llm: LLM) -> list[list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (1, 2, 3, 17, 40, 100)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def make_llm(preset: str, compile: str, device: str = "cpu", **options: Any) -> LLM:
    return LLM(
        f"random:{preset}",
        device=device,
        dtype="float32",
        compile=compile,
        max_model_len=256,
        num_kv_blocks=64,
        max_num_batched_tokens=48,
        **options,
    )


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory):
    """One cache for the module: equal pieces of other tests are loaded, not compiled again."""
    folder = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivllm.compilation.wrapper.cache_root", lambda: folder)
        yield folder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", ALL_TINY)
def test_every_way_of_running_gives_the_same_tokens(
    preset: str, device: str, artifacts: Path
) -> None:
    expected = generate(make_llm(preset, "none", device))
    assert generate(make_llm(preset, "eager", device)) == expected
    assert generate(make_llm(preset, "inductor", device)) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_a_real_run_traces_once_and_compiles_three_pieces(device: str) -> None:
    torch._dynamo.utils.counters.clear()
    llm = make_llm("tiny", "eager", device)
    generate(llm)
    for num_tokens in (1, 2, 3, 17, 48):
        llm.generate([list(range(num_tokens))], SamplingParams(max_tokens=1))
    stats = llm.stats()["compilation"]
    assert stats["num_graphs"] == 1
    assert stats["num_pieces"] == 4
    assert stats["num_compilations"] == stats["num_distinct_pieces"] == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_smollm2s_thirty_one_pieces_cost_three_compilations() -> None:
    with LLM("smollm2", device="cpu", max_model_len=64, compile="eager") as llm:
        stats = llm.stats()["compilation"]
    assert (stats["num_pieces"], stats["num_compilations"]) == (31, 3)


def test_attentions_output_is_passed_through_without_a_copy(artifacts: Path) -> None:
    """The buffer that a piece allocates is the one that attention writes and the next one reads."""
    llm = make_llm("tiny", "inductor")
    runner = llm.engine.core.runner
    assert isinstance(runner.forward, CompiledModel)
    pieces = runner.forward.backend.pieces
    written, read = [], []
    for layer in runner.model.attention_layers():
        attend = layer.attend

        def spy(query, key, value, output, attend=attend):
            written.append(output.data_ptr())
            attend(query, key, value, output)

        layer.attend = spy
    for piece in pieces[1:]:
        shapes = [getattr(value, "shape", ()) for value in piece.content.example_inputs]
        (index,) = [i for i, s in enumerate(shapes) if len(s) == 3 and tuple(s[1:]) == (8, 64)]

        def spy_piece(*args, piece=piece, index=index):
            read.append(args[index].data_ptr())
            return type(piece).__call__(piece, *args)

        runner.forward.backend.stitched.__dict__[piece.name] = spy_piece
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert written == read
    assert len(written) == 3 * 2
    for split in runner.forward.backend.splits:
        assert not any("clone" in str(node.target) for node in split.graph.graph.nodes)


def test_the_attention_operation_writes_output_and_nothing_else_that_it_was_given() -> None:
    backend = make_llm("tiny", "none").engine.core.runner.model.attention_layers()[0].backend
    layer = Attention(backend, "layer")
    query, key = torch.randn(3, 8, 64), torch.randn(3, 4, 64)
    with set_forward_context(ForwardContext(None, {"layer": layer})):
        arguments = (query, key, key.clone(), torch.ones(3, 8, 64), "layer")
        torch.library.opcheck(torch.ops.minivllm.attention_with_output.default, arguments)
        torch.ops.minivllm.attention_with_output(*arguments)
    assert not arguments[3].any(), "without data, attention fills its output with zeros"


def test_no_layer_name_is_inside_a_compiled_piece() -> None:
    llm = make_llm("tiny", "eager")
    forward = llm.engine.core.runner.forward
    assert isinstance(forward, CompiledModel)
    for split in forward.backend.splits:
        constants = [a for n in split.graph.graph.nodes for a in n.args if isinstance(a, str)]
        assert constants == ([] if not split.is_splitting else constants)
        assert bool(constants) == split.is_splitting


def test_chosen_sizes_are_compiled_on_first_need_and_used(artifacts: Path) -> None:
    llm = make_llm("tiny", "inductor", compile_sizes=(1, 4))
    forward = llm.engine.core.runner.forward
    assert isinstance(forward, CompiledModel)
    assert all(not content.exact for content in forward.backend.distinct.values())
    assert generate(llm) == generate(make_llm("tiny", "none"))
    assert all(1 in content.exact for content in forward.backend.distinct.values())


def test_chosen_sizes_are_compiled_at_the_start_if_wanted(artifacts: Path) -> None:
    llm = make_llm("tiny", "inductor", compile_sizes=(1, 4), compile_sizes_at_start=True)
    forward = llm.engine.core.runner.forward
    assert isinstance(forward, CompiledModel)
    before = [sorted(content.exact) for content in forward.backend.distinct.values()]
    assert before == [[1, 4]] * 3
    work = dict(llm.stats()["compilation"])
    assert generate(llm) == generate(make_llm("tiny", "none"))
    assert llm.stats()["compilation"] == work, "no step has waited for a compiler"


# ------------------------------------------------------------------------------------- splitting


def test_pieces_and_splits_alternate_and_keep_their_order() -> None:
    model = compile_small(lambda x, p: split_here(split_here(x + p) * 3) - 1)
    kinds = [split.is_splitting for split in model.backend.splits]
    assert kinds == [False, True, False, True, False]
    assert run_small(model, 3).tolist() == [11.0, 23.0, 35.0]


def test_neighbouring_splitting_operations_share_a_piece() -> None:
    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        first, second = torch.empty_like(x), torch.empty_like(x)
        torch.ops.minivllm_test.split_here(x, first)
        torch.ops.minivllm_test.split_here(first, second)
        return second + p

    model = compile_small(body)
    assert [split.is_splitting for split in model.backend.splits] == [False, True, False]
    assert run_small(model, 3).tolist() == [1.0, 5.0, 9.0]


def test_an_allocation_alone_between_splits_moves_to_the_piece_before() -> None:
    model = compile_small(lambda x, p: split_here(split_here(x + p)) + 1)
    assert [split.is_splitting for split in model.backend.splits] == [False, True, False]
    assert run_small(model, 3).tolist() == [5.0, 9.0, 13.0]


def test_an_allocation_beside_a_computation_between_splits_stays() -> None:
    model = compile_small(lambda x, p: split_here(split_here(x + p).relu()) + 1)
    assert [s.is_splitting for s in model.backend.splits] == [False, True, False, True, False]
    assert run_small(model, 3).tolist() == [5.0, 9.0, 13.0]


@pytest.mark.parametrize("compiler", [EagerCompiler(), InductorCompiler()], ids=lambda c: c.name)
def test_a_whole_shape_may_be_used_on_the_other_side_of_a_split(compiler) -> None:
    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, p]).relu()
        return (split_here(both) + torch.ones(both.size()))[: x.shape[0]]

    assert run_small(compile_small(body, compiler), 3).tolist() == [1.0, 3.0, 5.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["add", "relu", "split", "alloc", "tuple"]), max_size=12))
def test_any_chain_of_operations_splits_in_order_and_computes_the_same(steps: list[str]) -> None:
    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        for step in steps:
            if step == "add":
                x = x + p
            elif step == "relu":
                x = torch.relu(x - 2)
            elif step == "split":
                x = split_here(x)
            elif step == "alloc":
                x = x + torch.empty_like(x).zero_()
            else:
                x = torch.stack((x, x + 1)).unbind(0)[1]
        return x * 1

    model = compile_small(body)
    expected = body(torch.arange(5.0), torch.ones(5))
    assert torch.equal(run_small(model, 5), expected)
    kinds = [split.is_splitting for split in model.backend.splits]
    assert all(a != b for a, b in pairwise(kinds)), "neighbours of one kind are one piece"


def test_a_graph_without_splitting_operations_is_one_piece() -> None:
    model = compile_small(lambda x, p: x * 2 + p)
    assert len(model.backend.pieces) == 1
    assert run_small(model, 2).tolist() == [1.0, 3.0]


@pytest.mark.parametrize("compiler", [EagerCompiler(), InductorCompiler()], ids=lambda c: c.name)
def test_a_tuple_never_crosses_a_border_and_pieces_may_return_several_results(compiler) -> None:
    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        low, high = torch.stack((x, x + 10)).split(1)
        middle = split_here(low)
        return middle[0] + high[0] + p

    model = compile_small(body, compiler)
    assert run_small(model, 3).tolist() == [11.0, 14.0, 17.0]
    first = model.backend.pieces[0].content
    assert first.returns_tuple
    assert not model.backend.pieces[1].content.returns_tuple


def test_a_symbolic_size_is_passed_between_pieces_as_an_input() -> None:
    model = compile_small(lambda x, p: split_here(x) + torch.zeros(x.shape[0]) + x.shape[0])
    examples = model.backend.pieces[1].content.example_inputs
    assert any(isinstance(value, torch.SymInt) for value in examples)
    assert run_small(model, 5).tolist() == [5.0, 7.0, 9.0, 11.0, 13.0]


# ------------------------------------------------------------------ what Inductor's pieces skip


def returns_its_input(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = split_here(x)
    return torch.cat((split_here(y + p), y, p))  # the middle piece passes its input on


def returns_a_view_of_its_input(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = split_here(x)
    view = y.unsqueeze(0)
    return torch.cat((split_here(y + p), view[0]))


def changes_its_input(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = split_here(x)
    y.mul_(3)
    return torch.cat((split_here(y + p), y))


def uses_one_input_twice(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return split_here(torch.stack((x, x)).sum(0)) + p


@pytest.mark.parametrize(
    "body",
    [returns_its_input, returns_a_view_of_its_input, changes_its_input, uses_one_input_twice],
)
def test_a_piece_computes_the_same_with_and_without_torchs_wrappers(body: Any) -> None:
    model = compile_small(body, InductorCompiler())
    for num_tokens in (4, 1, 9, 4):  # the first call has decided what is skipped
        x, p = torch.arange(float(num_tokens)), torch.ones(num_tokens)
        assert torch.equal(run_small(model, num_tokens), body(x, p))


def test_the_models_pieces_need_no_wrappers_and_skip_them(artifacts: Path) -> None:
    for preset in ALL_TINY:
        forward = make_llm(preset, "inductor").engine.core.runner.forward
        assert isinstance(forward, CompiledModel)
        generals = [content.general for content in forward.backend.distinct.values()]
        skipped = [isinstance(g, InductorPiece) and g.is_direct for g in generals]
        assert skipped == [True] * 3


def test_a_piece_that_returns_its_input_keeps_its_wrappers() -> None:
    model = compile_small(returns_its_input, InductorCompiler())
    generals = [piece.content.general for piece in model.backend.pieces]
    assert [g.is_direct for g in generals if isinstance(g, InductorPiece)].count(False) >= 1


# --------------------------------------------------------------------------------- equal pieces


def traced(body: Any) -> PiecewiseBackend:
    return compile_small(body).backend


def test_layers_that_differ_in_parameters_alone_are_one_piece() -> None:
    weights = [torch.full((1,), float(i)) for i in range(6)]

    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = split_here(torch.relu(x * weight)) + p
        return x

    backend = traced(body)
    assert [len(backend.pieces), len(backend.distinct)] == [7, 3]
    assert sorted(content.uses for content in backend.distinct.values()) == [1, 1, 5]


def test_a_constant_that_differs_makes_another_piece() -> None:
    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            x = split_here(torch.relu(x) * (2.0 if i == 2 else 3.0))
        return x + p

    assert len(traced(body).distinct) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda x, p: torch.relu(x) - p,
        lambda x, p: torch.relu(p) + x,
        lambda x, p: torch.relu(x) + p * 1.5,
        lambda x, p: torch.sigmoid(x) + p,
        lambda x, p: (torch.relu(x) + p).unsqueeze(0),
    ],
)
def test_another_computation_has_another_signature(other: Any) -> None:
    graphs = [traced(body).graph for body in (lambda x, p: torch.relu(x) + p, other)]
    signatures = {graph_signature(graph) for graph in graphs if graph is not None}
    assert len(signatures) == 2


def test_layers_whose_tables_differ_in_one_element_are_two_pieces() -> None:
    tables = [torch.zeros(4000), torch.zeros(4000)]
    tables[1][2000] = 1e-6

    def signature(table: torch.Tensor) -> str:
        graph, root = torch.fx.Graph(), nn.Module()
        root.table = table
        graph.output(graph.call_function(torch.relu, (graph.get_attr("table"),)))
        return graph_signature(torch.fx.GraphModule(root, graph))

    assert signature(tables[0]) != signature(tables[1])
    assert signature(tables[0]) == signature(torch.zeros(4000))


def test_which_input_bounds_a_slice_is_part_of_the_signature() -> None:
    def signature(names: tuple[str, str], bound: int) -> str:
        graph = torch.fx.Graph()
        inputs = [graph.placeholder(name) for name in ("x", *names)]
        index = (inputs[0], slice(None, inputs[bound], None))
        graph.output(graph.call_function(operator.getitem, index))
        return graph_signature(torch.fx.GraphModule(nn.Module(), graph))

    assert signature(("m", "n"), 1) != signature(("n", "m"), 2)
    assert signature(("m", "n"), 1) == signature(("a", "b"), 1)


def test_names_do_not_matter_to_a_signature() -> None:
    def one(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        long_name = torch.relu(x)
        return long_name + p

    graphs = [traced(body).graph for body in (one, lambda x, p: torch.relu(x) + p)]
    assert len({graph_signature(graph) for graph in graphs if graph is not None}) == 1


# --------------------------------------------------------------------------- promises and breaks


def branching(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[0] > 8 else x - 1


def test_a_branch_on_the_number_of_tokens_is_silently_frozen_by_default() -> None:
    model = compile_small(branching)  # traced with more than 8 tokens
    assert run_small(model, 20).tolist() == [i + 1.0 for i in range(20)]
    assert run_small(model, 3).tolist() == [1.0, 2.0, 3.0], "without guards the other side is lost"


def test_strict_makes_a_branch_on_the_number_of_tokens_an_error_that_names_it() -> None:
    model = compile_small(branching, strict=True)
    assert run_small(model, 20).tolist() == [i + 1.0 for i in range(20)]
    with pytest.raises(ModelError, match=r"8.*x\.shape\[0\] > 8|x\.shape\[0\] > 8") as caught:
        run_small(model, 3)
    assert "test_piecewise.py" in str(caught.value)


def test_strict_lets_a_model_without_branches_run_at_every_size() -> None:
    model = compile_small(lambda x, p: split_here(x) + p, strict=True)
    for num_tokens in (1, 2, 3, 17, 256):
        assert run_small(model, num_tokens).tolist() == [2.0 * i + 1 for i in range(num_tokens)]
    assert model.backend.stats.num_graphs == 1


def test_an_effect_that_the_schema_does_not_declare_is_lost_inside_a_compiled_piece() -> None:
    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        torch.ops.minivllm_test.secret_effect(x)
        return x + p

    for compiler, expected in ((EagerCompiler(), [4]), (InductorCompiler(), [])):
        model = compile_small(body, compiler)
        _effects.clear()
        run_small(model, 4)
        # Inductor deletes an operation without a used result and without a declared effect.
        assert _effects == expected


def test_a_model_that_cannot_be_one_graph_is_refused_with_the_users_line() -> None:
    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        if x.sum() > 3:  # depends on data: two graphs
            return x
        return x + p

    with pytest.raises(ModelError, match="cannot be traced as one graph") as caught:
        compile_small(body)
    assert "if x.sum() > 3" in str(caught.value)


def test_a_model_that_asks_for_one_number_of_tokens_is_refused_with_the_users_line() -> None:
    def body(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 61:  # the size that is traced with
            return x
        return x + p

    with pytest.raises(ModelError, match="ties the number of tokens to a constant") as caught:
        compile_small(body)
    assert "if x.shape[0] == 61" in str(caught.value)


def test_an_unknown_splitting_operation_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no operation 'minivllm::nothing'.*attention_with_out"):
        make_llm("tiny", "eager", splitting_ops=("minivllm::nothing",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "fast"}, "compile='fast': expected one of"),
        ({"compile_sizes": (0,), "compile": "eager"}, "compile_sizes=0"),
        ({"compile_sizes": (64,), "compile": "eager"}, "no step has 64 tokens"),
        ({"splitting_ops": (), "compile": "eager"}, "attention cannot be compiled"),
        ({"enforce_eager": True, "compile": "inductor"}, "contradicts"),
        ({"compile_sizes_at_start": True, "compile": "eager"}, "no effect without sizes"),
        ({"strict": True, "compile": "none"}, "no effect"),
    ],
)
def test_an_impossible_choice_is_refused_when_the_engine_is_built(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm("tiny", **options)


# ------------------------------------------------------------------------------------- the cache


def start(folder: Path, **options: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivllm.compilation.wrapper.cache_root", lambda: folder)
        llm = make_llm("tiny", "inductor", **options)
    assert generate(llm) == generate(make_llm("tiny", "none"))
    return llm.stats()["compilation"]


def test_the_second_start_loads_what_the_first_has_compiled(artifacts: Path) -> None:
    start(artifacts)
    again = start(artifacts)
    assert (again["num_compilations"], again["num_cache_hits"]) == (0, 3)


def test_a_truncated_entry_costs_a_compilation_and_a_line_in_the_log(
    artifacts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(artifacts)
    folder = tmp_path / "compiled"
    folder.mkdir()
    # The newest three are this model's: cut one short.
    files = sorted((artifacts / "compiled").iterdir())
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes()[:1000])
    stats = start(tmp_path)
    assert (stats["num_compilations"], stats["num_cache_hits"]) == (3, 0)
    assert sum("is damaged, compiling again" in r.message for r in caplog.records) == 3
    assert start(tmp_path)["num_cache_hits"] == 3


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "compiled").write_text("a file where the folder should be")
    assert start(tmp_path)["num_compilations"] == 3
    assert sum("cannot keep a compiled piece" in r.message for r in caplog.records) == 3


def _start_in_a_process(folder: str) -> tuple[list[list[int]], int, int]:
    import minivllm.compilation.wrapper as wrapper

    torch.set_num_threads(1)
    wrapper.cache_root = lambda: Path(folder)
    llm = make_llm("tiny", "inductor")
    stats = llm.stats()["compilation"]
    return generate(llm), stats["num_compilations"], stats["num_cache_hits"]


def test_processes_that_start_at_once_share_a_cache_and_agree(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(4, mp_context=spawn) as pool:
        results = list(pool.map(_start_in_a_process, [str(tmp_path)] * 4))
    expected = generate(make_llm("tiny", "none"))
    assert [tokens for tokens, _, _ in results] == [expected] * 4
    assert all(compiled + loaded == 3 for _, compiled, loaded in results)
    # One entry for each piece, whole, and nothing half-written beside them.
    assert [file.suffix for file in (tmp_path / "compiled").iterdir()] == [".bin"] * 3
    assert start(tmp_path)["num_cache_hits"] == 3


def test_every_factor_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm.compilation import cache as module

    def key(**factors: Any) -> str:
        return module.ArtifactCache(Path("x"), factors).key("signature", 4)

    keys = {key(), key(world_size=2), module.ArtifactCache(Path("x"), {}).key("other", 4)}
    keys.add(module.ArtifactCache(Path("x"), {}).key("signature", None))
    real = module.environment_factors()
    for name in real:
        monkeypatch.setattr(module, "environment_factors", lambda name=name: {**real, name: "?"})
        keys.add(key())
    assert len(keys) == 4 + len(real)
    monkeypatch.setattr(module, "environment_factors", lambda: real)
    moved = module.ArtifactCache(Path("elsewhere"), {}).key("signature", 4)
    assert moved == key(), "where the cache lies must not matter"


def test_a_changed_source_line_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minivllm.compilation import cache as module

    before = module._source_hash()
    package = Path(module.__file__).parent.parent
    for name in ("models", "layers", "compilation"):
        (tmp_path / name).mkdir()
        for file in (package / name).glob("*.py"):
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(module, "__file__", str(tmp_path / "compilation" / "cache.py"))
    assert module._source_hash() == before
    with (tmp_path / "layers" / "norm.py").open("a") as file:
        file.write("# another line\n")
    assert module._source_hash() != before


def test_the_models_own_graph_is_split_where_attention_is() -> None:
    config = find_model("random:tiny").config
    forward = make_llm("tiny", "eager").engine.core.runner.forward
    assert isinstance(forward, CompiledModel)
    assert forward.backend.graph is not None
    _, pieces = split_graph(forward.backend.graph, {ATTENTION})
    assert len(pieces) == 2 * config.num_hidden_layers + 1
