"""Where a low result meets an operation that does not promote, and where a model is not fp32 throughout."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from tests.test_programs import BOUND, check, error, fp32_matmuls, in_fp64, low_matmuls, matmuls, mixprec, step


class Merge(nn.Module):
    """Puts image features among fp32 text embeddings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.text, self.image, self.head = nn.Embedding(10, 8), nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        x, features = self.text(ids), self.image(image)
        if self.how == "mask":
            x[ids == 3] = features
        elif self.how == "index":
            x[:, torch.tensor([0, 2])] = features.view(2, 2, 8)
        elif self.how == "masked_scatter":
            x = x.masked_scatter((ids == 3).unsqueeze(-1), features)
        elif self.how == "accumulate":
            x = x.flatten(0, 1).index_put((torch.tensor([0, 2, 2, 2]),), features, accumulate=True).view_as(x)
        else:
            x = torch.cat((x[:, 2:], torch.where(features > 0, features, x[:, 0].repeat(2, 1)).view(2, 2, 8)), 1)
        return self.head(x)


IDS = torch.tensor([[3, 1, 3, 2], [0, 3, 4, 3]])


@pytest.mark.parametrize("how", ["index", "masked_scatter", "accumulate", "cat and where"])
def test_merging_modalities(how: str) -> None:
    check(Merge(how), IDS, torch.randn(4, 6), low=(2, 3))


def test_merging_by_a_boolean_mask() -> None:
    # Its backward gathers as many rows as the mask has, which torch captures only on request.
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(Merge("mask"), IDS, torch.randn(4, 6), low=(2, 3))


@pytest.mark.filterwarnings("ignore:Error detected in IndexPutBackward0:UserWarning")  # Dynamo's anomaly mode
def test_merging_by_a_boolean_mask_that_torch_does_not_capture_warns_and_stays_fp32() -> None:
    with pytest.warns(mpcompile.MixprecWarning, match=r"runs eagerly in float32: DynamicOutputShapeException"):
        check(Merge("mask"), IDS, torch.randn(4, 6), low=(0, 0), bound=1e-5)


class Experts(nn.Module):
    """Top-2 routing with an fp32 router; the results are summed up by ``index_add``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, 3, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(3, 8, 8) / 3) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        scores = F.linear(h.float(), self.router.weight.float())
        weights, chosen = scores.softmax(-1).topk(2)
        total = torch.zeros_like(x)
        for slot in range(2):
            tokens = torch.arange(len(x), device=x.device)
            up, down = self.up[chosen[:, slot]], self.down[chosen[:, slot]]
            y = torch.bmm(F.silu(torch.bmm(h[:, None], up)), down)[:, 0]
            total = total.index_add(0, tokens, y * weights[:, slot, None])
        return total, chosen


def test_mixture_of_experts_routes_in_fp32() -> None:
    model, x = Experts(), torch.randn(12, 8)
    truth = step(model, model, [x])
    compiled = mixprec(model)
    mixed = step(compiled, model, [x])
    assert torch.equal(mixed.outputs[1], truth.outputs[1])
    assert error(mixed.outputs[:1], truth.outputs[:1]) < BOUND
    assert error(mixed.gradients, truth.gradients) < BOUND
    assert mixed.outputs[0].dtype == torch.float32
    # Two matmuls for each of two slots; with one row a token, a weight's gradient is a product and no matmul.
    # The router's three are fp32 because the model says so.
    assert (low_matmuls(compiled), fp32_matmuls(compiled)) == ((4, 4), (1, 2))
    router = [node for node in matmuls(compiled) if "bfloat16" not in node.inputs]
    assert {(node.rule, node.reason) for node in router} == {
        ("user", "every operand was explicitly asked for in float32")
    }


class BiasApart(nn.Module):
    """Adds its biases by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first + self.bias) @ self.second + self.bias


def test_bias_added_apart_costs_no_casts() -> None:
    compiled = check(BiasApart(), torch.randn(4, 8), low=(2, 3))
    (report,) = mpcompile.reports(compiled)
    forward = [cast for cast in report.casts if cast.direction == "forward" and cast.after == "bfloat16"]
    # The input, two weights, and what the second matmul reads.
    assert len(forward) == 4


class LowRank(nn.Module):
    """A frozen bf16 layer and a trained fp32 pair beside it."""

    def __init__(self, convert: bool = True) -> None:
        super().__init__()
        self.convert = convert
        self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(self.base.weight.dtype) if self.convert else x)
        return base.to(x.dtype) + self.up(self.down(x))


def test_low_rank_adapter_beside_a_frozen_bf16_layer() -> None:
    model = LowRank()
    check(model, torch.randn(4, 8), low=(3, 3))
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]


def test_matmul_of_two_storage_dtypes_has_one_compute_dtype() -> None:
    model, x = LowRank(convert=False), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model(x)
    exact = in_fp64(model)
    truth = step(exact, exact, [x.double()])
    compiled = mixprec(model)
    mixed = step(compiled, model, [x])
    assert error(mixed.outputs, truth.outputs) < BOUND
    assert error(mixed.gradients, truth.gradients) < BOUND
    assert {gradient.dtype for gradient in mixed.gradients} == {torch.float32}
    assert low_matmuls(compiled) == (3, 3)


class OddStorage(nn.Module):
    """One fp16 bias among fp32 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8).half())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first + self.bias).sigmoid() @ self.second


def test_parameter_of_the_other_16_bit_type() -> None:
    model, x = OddStorage(), torch.randn(4, 8)
    exact = in_fp64(model)
    truth = step(exact, exact, [x.double()])
    compiled = mixprec(model)
    with pytest.warns(mpcompile.MixprecWarning, match="1 trained parameters are float16: they have no float32 master"):
        mixed = step(compiled, model, [x])
    assert error(mixed.outputs, truth.outputs) < BOUND
    assert error(mixed.gradients, truth.gradients) < BOUND
    assert [g.dtype for g in mixed.gradients] == [torch.float32, torch.float32, torch.float16]
    assert low_matmuls(compiled) == (2, 3)


def test_model_loaded_in_bf16_still_trains() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    with pytest.warns(mpcompile.MixprecWarning, match="6 trained parameters are bfloat16"):
        compiled = check(model, x, low=(2, 3), bound=0.05)
    assert {node.reason for node in matmuls(compiled)} == {"already in a 16-bit type where the graph enters"}


class Wide(nn.Module):
    """Parts in fp64, complex and integers between low layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("wide", torch.randn(8, 8, dtype=torch.float64))
        self.register_buffer("rotation", torch.polar(torch.ones(8, 8), torch.randn(8, 8)))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        wide = y.to(torch.float64) @ self.wide
        turned = torch.view_as_real(y.to(torch.complex64) @ self.rotation)
        return self.second(wide.to(y.dtype) + turned.sum(-1)), ids @ ids.t(), wide


def test_fp64_complex_and_integers_are_untouched() -> None:
    model, x, ids = Wide(), torch.randn(4, 8), torch.randint(0, 1 << 20, (4, 8))
    compiled = mixprec(model)
    mixed, truth = step(compiled, model, [x, ids]), step(model, model, [x, ids])
    assert [value.dtype for value in mixed.outputs] == [torch.float32, torch.int64, torch.float64]
    assert torch.equal(mixed.outputs[1], ids @ ids.t())
    assert error(mixed.outputs[:1] + mixed.gradients, truth.outputs[:1] + truth.gradients) < BOUND
    kept = {node.inputs for node in matmuls(compiled) if "bfloat16" not in node.inputs}
    assert {"float64", "int64", "complex64"} <= {dtype for inputs in kept for dtype in inputs}
    assert not {dtype for inputs in kept for dtype in inputs} & {"float32", "complex32", "float16"}
    assert low_matmuls(compiled) == (2, 3)


class Quantised(nn.Module):
    """VQ: nearest code, straight-through gradient, codebook moved by an average."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        # Codes that lie close together: rounding the distances would take others.
        self.register_buffer("codes", 1 + torch.randn(64, 4) * 0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encoder(x)
        distance = z.square().sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.square().sum(1)
        chosen = distance.argmin(1)
        quantised = self.codes[chosen]
        if self.training:
            one_hot = F.one_hot(chosen, 64).to(z.dtype)
            with torch.no_grad():
                self.codes.lerp_(one_hot.t() @ z, 0.01)
        return self.decoder(z + (quantised - z).detach()), chosen, z


def test_vector_quantisation_takes_the_nearest_code() -> None:
    model, x = Quantised(), torch.randn(256, 8)
    codes = model.codes.clone()
    compiled = mixprec(model)
    found, chosen, z = compiled(x)
    found.square().mean().backward()
    exact = torch.cdist(z.detach().double(), codes.double()).square()
    least = exact.min(1).values
    taken = exact.gather(1, chosen[:, None])[:, 0]
    assert float((taken - least).max()) < 1e-5
    low = torch.cdist(z.detach().bfloat16().double(), codes.bfloat16().double()).argmin(1)
    assert float((exact.gather(1, low[:, None])[:, 0] - least).max()) > 1e-3  # the test can tell
    assert model.encoder.weight.grad.abs().sum() > 0
    assert model.codes.dtype == torch.float32
    expected = codes.double().lerp(F.one_hot(chosen, 64).double().t() @ z.detach().double(), 0.01)
    assert error([model.codes - codes], [expected - codes]) < BOUND
    reasons = {node.reason for node in matmuls(compiled) if "bfloat16" not in node.inputs}
    assert "only compared or ranked: rounding could change the order" in reasons


class GroupedExperts(nn.Module):
    """Tokens sorted by expert, all experts in one call."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight, self.head = nn.Parameter(torch.randn(3, 8, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y = F.grouped_mm(x.to(self.dtype), self.weight.to(self.dtype), offs=ends)
        return self.head(y.to(x.dtype))


ENDS = torch.tensor([5, 6, 12], dtype=torch.int32)


def test_grouped_matmul_of_fp32_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="Expected inputs of BF16 type"):
        mixprec(GroupedExperts(torch.float32))(torch.randn(12, 8), ENDS)


def test_grouped_matmul_of_bf16_beside_a_low_layer() -> None:
    model, x = GroupedExperts(torch.bfloat16), torch.randn(12, 8)
    compiled = mixprec(model)
    found = step(lambda x: compiled(x, ENDS), model, [x])

    def one_by_one(x: Tensor) -> Tensor:
        weight = exact.weight
        return exact.head(torch.cat([x[:5] @ weight[0], x[5:6] @ weight[1], x[6:] @ weight[2]]))

    exact = in_fp64(model)
    truth = step(one_by_one, exact, [x.double()])
    assert error(found.outputs, truth.outputs) < BOUND
    assert error(found.gradients, truth.gradients) < BOUND
    assert {gradient.dtype for gradient in found.gradients} == {torch.float32}
    assert low_matmuls(compiled) == (2, 3)
